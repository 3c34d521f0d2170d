"""`ablate`: the loss of a model with its networks silenced, compared with random masks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from narrowcast.errors import ConfigError
from narrowcast.training.evaluation import in_eval_mode
from narrowcast.workloads.sft.data.packing import IGNORED
from narrowcast.workloads.sft.ica.entry import check_fit
from narrowcast.workloads.sft.ica.masks import Masks, random_like
from narrowcast.workloads.sft.ica.networks import (
    Channels,
    FunctionalNetworks,
    check_number,
    check_type,
    check_whole,
)
from narrowcast.workloads.sft.ica.study.ablation import (
    Ablation,
    Interval,
    KeepOnlyResult,
    Lesion,
    Level,
    Versus,
)

TIMES = 4000
BOUNDS = (2.5, 97.5)
Sums = NDArray[np.float64]
MOST_TOKENS = 2048
"""Per batch, because logits over a large vocabulary need much memory."""
Document: TypeAlias = Mapping[str, Tensor]
"""`input_ids` and unshifted `labels`, (1, tokens) each."""
RANDOM_MASKS = 39
"""The fewest for p = 0.05: a network beyond all 39 has a two-sided p of 2/40."""
SHARE = 0.15
"""As in the first such study."""
MOST_POINTS = 12
Progress: TypeAlias = Callable[[int, int], None]
"""Receives the passes done and their total."""


def difference(one: Sums, others: Sums, tokens: Sums, *, seed: int) -> Interval:
    """Return the difference of mean losses with a bootstrap interval over documents and masks."""
    chance = np.random.default_rng(seed)
    documents, masks = len(one), len(others)
    drawn = chance.multinomial(documents, np.full(documents, 1 / documents), size=TIMES)
    weights = drawn / (drawn @ tokens)[:, None]  # (times, documents)
    chosen = chance.multinomial(masks, np.full(masks, 1 / masks), size=TIMES) / masks
    rest = ((weights @ others.T) * chosen).sum(1)
    low, high = np.percentile(weights @ one - rest, BOUNDS)
    value = (one.sum() - others.mean(0).sum()) / tokens.sum()
    return Interval(value=float(value), low=float(low), high=float(high))


class Scores(NamedTuple):
    """Sums per document, (documents)."""

    losses: Sums
    hits: Sums
    tokens: Sums

    @property
    def level(self) -> Level:
        count = self.tokens.sum()
        return Level(loss=float(self.losses.sum() / count), accuracy=float(self.hits.sum() / count))


@torch.no_grad()
def score(model: nn.Module, documents: Sequence[Document]) -> Scores:
    """Return losses and hits of a model on documents; synchronises."""
    device = next(model.parameters()).device
    with in_eval_mode(model):
        matches = [_scored(model, batch, device) for batch in _batches(documents)]
    losses, hits, tokens = torch.cat(matches, 1).cpu().numpy()
    return Scores(losses=np.array(losses), hits=np.array(hits), tokens=np.array(tokens))


def learnt(document: Document) -> int:
    """Return the number of predicted tokens of a document."""
    return int((document["labels"][:, 1:] != IGNORED).sum())


def _batches(documents: Sequence[Document]) -> Iterator[dict[str, Tensor]]:
    """Yield neighbours of equal length together, without padding."""
    waiting: list[Document] = []
    for document in documents:
        length = document["input_ids"].shape[1]
        others = {each["input_ids"].shape[1] for each in waiting}
        if waiting and (others != {length} or (len(waiting) + 1) * length > MOST_TOKENS):
            yield _joined(waiting)
            waiting = []
        waiting.append(document)
    if waiting:
        yield _joined(waiting)


def _joined(documents: Sequence[Document]) -> dict[str, Tensor]:
    return {name: torch.cat([each[name] for each in documents]) for name in documents[0]}


def _scored(model: Any, batch: Document, device: torch.device) -> Tensor:
    """Return losses, hits and tokens per document, (3, documents)."""
    settings = {name: each.to(device) for name, each in batch.items() if name != "labels"}
    labels = batch["labels"][:, 1:].to(device)
    logits = model(**settings, use_cache=False).logits[:, :-1].float()
    losses = nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=IGNORED
    ).view_as(labels)
    counted = labels != IGNORED
    hits = (logits.argmax(-1) == labels) & counted
    return torch.stack([each.double().sum(1) for each in (losses, hits, counted)])


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
    """Measure the loss of a model without networks, compared with random masks.

    Random masks have as many channels per layer, or `share` of them (`share_masks` masks).
    `one_by_one` also tests single networks. `keep` lists how many of the first networks to keep
    alone. The model is unchanged afterwards, and the result depends only on the seed.
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
            model=model,
            documents=documents,
            networks=networks,
            masks=masks,
            seed=seed,
            passes=total,
            progress=progress,
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
@dataclass(kw_only=True, eq=False)
class _Bench:
    """Measures a model under different masks."""

    model: nn.Module
    documents: Sequence[Document]
    networks: FunctionalNetworks
    masks: Masks
    seed: int
    passes: int
    progress: Progress
    done: int = 0

    def __post_init__(self) -> None:
        self.chance = torch.Generator().manual_seed(self.seed)
        self.whole = self._score()

    def lesion(
        self, components: Sequence[int], random_masks: int, *, tests: int = 1
    ) -> tuple[Lesion, Scores]:
        """Silence networks, and random channels instead."""
        channels = self.networks.channels(components)
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
        """Compare scores with random masks of as many channels per layer."""
        width = self.networks.layout.width
        drawn = [random_like(like, width, generator=self.chance) for _ in range(random_masks)]
        others = [self._silenced(channels) for channels in drawn]
        sums = np.stack([each.losses for each in others])
        return Versus(
            channels=_count(like),
            masks=tuple(each.level for each in others),
            difference=difference(scores.losses, sums, scores.tokens, seed=self.seed),
            at_least=sum(each.level.loss >= scores.level.loss for each in others),
            at_most=sum(each.level.loss <= scores.level.loss for each in others),
            tests=tests,
        )

    def keep_only(self, components: Sequence[int]) -> KeepOnlyResult:
        """Silence all other analysed channels."""
        channels = self.networks.channels(components)
        scores = self._silenced(self.networks.others(channels))
        return KeepOnlyResult(
            components=len(components),
            channels=_count(channels),
            level=scores.level,
            cost=self._above_whole(scores),
        )

    def share_of_each(self, share: float) -> Mapping[int, tuple[int, ...]]:
        """Return a share of the channels of each layer, of which only the number counts."""
        count = max(1, round(share * self.networks.layout.width))
        return {layer: tuple(range(count)) for layer in self.networks.layout.layers}

    def _silenced(self, channels: Channels) -> Scores:
        self.masks.clear().lesion(channels)
        return self._score()

    def _score(self) -> Scores:
        scores = score(self.model, self.documents)
        self.done += 1
        self.progress(self.done, self.passes)
        return scores

    def _above_whole(self, scores: Scores) -> Interval:
        return difference(scores.losses, self.whole.losses[None], scores.tokens, seed=self.seed)


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
    """Return the numbers of networks to keep."""
    if count <= MOST_POINTS:
        return list(range(1, count + 1))
    return sorted({round(each) for each in np.geomspace(1, count, MOST_POINTS)})


def _count(channels: Channels) -> int:
    return sum(map(len, channels.values()))
