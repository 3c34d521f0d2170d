"""`ablate`: a model with its networks silenced, beside the same with channels drawn by chance."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, final

import numpy as np
import torch
from torch import nn

from narrowcast.errors import ConfigError
from narrowcast.workloads.sft.ica.arguments import check_number, check_type, check_whole
from narrowcast.workloads.sft.ica.entry import check_fit
from narrowcast.workloads.sft.ica.masks import Masks, random_like
from narrowcast.workloads.sft.ica.networks import Channels, FunctionalNetworks
from narrowcast.workloads.sft.ica.study.ablation import (
    Ablation,
    Interval,
    KeepOnlyResult,
    Lesion,
    Versus,
)
from narrowcast.workloads.sft.ica.study.bootstrap import difference
from narrowcast.workloads.sft.ica.study.scores import Document, Scores, learnt, score

RANDOM_MASKS = 39
"""With 39, a lesion beyond all of them has a two-sided p of 2/40: the fewest that can say anything
at 5 %."""
SHARE = 0.15
"""What the first such study compared with: 15 % of the channels at random."""
MOST_POINTS = 12
"""Of the curve of what networks keep alive."""
Progress: TypeAlias = Callable[[int, int], None]
"""Gets how many passes over the documents are done, and how many there are."""


def ablate(
    model: nn.Module,
    documents: Sequence[Document],
    networks: FunctionalNetworks,
    *,
    components: Sequence[int] | None = None,
    random_masks: int = RANDOM_MASKS,
    share: float = SHARE,
    share_masks: int | None = None,
    one_by_one: bool = True,
    keep: Sequence[int] | None = None,
    seed: int = 0,
    data: str = "",
    name: str = "",
    progress: Progress = lambda done, total: None,
) -> Ablation:
    """Measure what a model loses with networks, all or some; deterministic from the seed.

    Compares with random masks of as many channels in each layer, and with masks of a larger share,
    as many of them unless `share_masks` says how many.
    `one_by_one`: each network as well. `keep`: of how many of the first networks it is measured
    what they keep alive; none: of one, two and so on. The model is given back as it was.
    """
    check_type("networks", networks, FunctionalNetworks, "FunctionalNetworks")
    check_whole("random_masks", random_masks, least=1)
    if share_masks is not None:
        check_whole("share_masks", share_masks, least=1)
    check_fit(networks, model)
    _check_sample_size(documents, share)
    chosen = networks.components if components is None else tuple(dict.fromkeys(components))
    singles = [(number,) for number in chosen] if one_by_one and len(chosen) > 1 else []
    points = _points(len(chosen)) if keep is None else [n for n in keep if n <= len(chosen)]
    larger_ones = random_masks if share_masks is None else share_masks
    total = 1 + (1 + len(singles)) * (1 + random_masks) + larger_ones + len(points)
    with Masks(model, site=networks.layout.site) as masks:
        bench = _Bench(
            model, documents, networks, masks, seed=seed, passes=total, progress=progress
        )
        lesion, scores = bench.lesion(chosen, random_masks)
        larger = bench.versus(scores, bench.share_of_each(share), larger_ones)
        each = [bench.lesion(one, random_masks, tests=len(singles))[0] for one in singles]
        stored = [bench.keep_only(chosen[:count]) for count in points]
    return Ablation(
        model=name,
        data=data,
        networks=networks.provenance.name,
        documents=len(documents),
        tokens=sum(map(learnt, documents)),
        seed=seed,
        channels=len(networks.layout.layers) * networks.layout.width,
        whole=bench.whole.level,
        lesion=lesion,
        share=share,
        larger=larger,
        each=tuple(each),
        preserve=tuple(stored),
    )


@final
class _Bench:
    """A model whose channels are silenced one way after another."""

    def __init__(
        self,
        model: nn.Module,
        documents: Sequence[Document],
        networks: FunctionalNetworks,
        masks: Masks,
        *,
        seed: int,
        passes: int,
        progress: Progress,
    ) -> None:
        self._model, self._documents, self._networks, self._masks = (
            model,
            documents,
            networks,
            masks,
        )
        self._seed, self._chance = seed, torch.Generator().manual_seed(seed)
        self._done, self._passes, self._progress = 0, passes, progress
        self.whole = self._score()

    def lesion(
        self, components: Sequence[int], random_masks: int, *, tests: int = 1
    ) -> tuple[Lesion, Scores]:
        """Silence networks, and then random channels in their place."""
        channels = self._networks.channels(components)
        scores = self._silenced(channels)
        result = Lesion(
            components=tuple(components),
            channels=_count(channels),
            level=scores.level,
            cost=self._above_whole(scores),
            equal=self.versus(scores, channels, random_masks, tests=tests),
        )
        return result, scores

    def versus(
        self, scores: Scores, like: Channels, random_masks: int, *, tests: int = 1
    ) -> Versus:
        """Set a lesion beside random masks of as many channels in each layer."""
        width = self._networks.layout.width
        drawn = [random_like(like, width, generator=self._chance) for _ in range(random_masks)]
        others = [self._silenced(channels) for channels in drawn]
        sums = np.stack([each.losses for each in others])
        return Versus(
            channels=_count(like),
            masks=tuple(each.level for each in others),
            difference=difference(scores.losses, sums, scores.tokens, seed=self._seed),
            at_least=sum(each.level.loss >= scores.level.loss for each in others),
            at_most=sum(each.level.loss <= scores.level.loss for each in others),
            tests=tests,
        )

    def keep_only(self, components: Sequence[int]) -> KeepOnlyResult:
        """Silence all channels that were looked at but those of networks."""
        channels = self._networks.channels(components)
        scores = self._silenced(self._networks.others(channels))
        return KeepOnlyResult(
            components=len(components),
            channels=_count(channels),
            level=scores.level,
            cost=self._above_whole(scores),
        )

    def share_of_each(self, share: float) -> Mapping[int, tuple[int, ...]]:
        """Return a share of the channels of each layer; how many is what counts."""
        count = max(1, round(share * self._networks.layout.width))
        return {layer: tuple(range(count)) for layer in self._networks.layout.layers}

    def _silenced(self, channels: Channels) -> Scores:
        self._masks.clear().lesion(channels)
        return self._score()

    def _score(self) -> Scores:
        scores = score(self._model, self._documents)
        self._done += 1
        self._progress(self._done, self._passes)
        return scores

    def _above_whole(self, scores: Scores) -> Interval:
        return difference(scores.losses, self.whole.losses[None], scores.tokens, seed=self._seed)


def _check_sample_size(documents: Sequence[Document], share: float) -> None:
    for each in documents:
        if not isinstance(each, Mapping) or "labels" not in each:
            raise ConfigError(
                "documents must have input_ids and labels, got one without. Write document(ids) of "
                "narrowcast.workloads.sft.ica.study.documents."
            )
    if len(documents) < 2:
        raise ConfigError(
            f"The interval of a loss needs more documents, got {len(documents)}. Give more, or a "
            "smaller --max-length, which splits a text into more documents."
        )
    if empty := [i for i, each in enumerate(documents) if not learnt(each)]:
        raise ConfigError(f"Document {empty[0]} has no token to predict. Leave it out.")
    if not 0 < check_number("share", share, "a number above 0 and up to 1") <= 1:
        raise ConfigError(f"The random share must be above 0 and at most 1, got {share}.")


def _points(count: int) -> list[int]:
    """Return how many networks are kept, point by point, up to all of them."""
    if count <= MOST_POINTS:
        return list(range(1, count + 1))
    return sorted({round(each) for each in np.geomspace(1, count, MOST_POINTS)})


def _count(channels: Channels) -> int:
    return sum(map(len, channels.values()))
