"""Which tokens drive each component, and how stable components are over documents."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor, nn

from narrowcast.errors import ConfigError
from narrowcast.workloads.sft.ica.entry import ModelSignals, check_fit
from narrowcast.workloads.sft.ica.networks import FunctionalNetworks, check_whole
from narrowcast.workloads.sft.ica.settings import SKIP_FIRST
from narrowcast.workloads.sft.ica.signals import RunningStatistics

AROUND = 8
"""Tokens of context on each side of an occurrence."""
FOUND = 0.5
"""IoU from which a network counts as found again."""


class DrivingToken(NamedTuple):
    """A token and how strongly a component reacts to it."""

    token: int
    times: int
    activity: float
    """Mean over its occurrences, relative to the mean over all tokens."""


class Occurrence(NamedTuple):
    """One token in its context."""

    before: tuple[int, ...]
    token: int
    after: tuple[int, ...]
    activity: float


@final
@dataclass(frozen=True, kw_only=True)
class Driving:
    """The tokens and occurrences that drive one component."""

    component: int
    tokens: tuple[DrivingToken, ...]
    occurrences: tuple[Occurrence, ...]

    def to_json(self, tokenizer: Any) -> dict[str, Any]:
        """Return plain data with the texts of tokens."""
        tokens = [
            {**each._asdict(), "text": str(tokenizer.decode([each.token]))} for each in self.tokens
        ]
        texts = [
            {
                "before": str(tokenizer.decode(list(each.before))),
                "text": str(tokenizer.decode([each.token])),
                "after": str(tokenizer.decode(list(each.after))),
                "activity": each.activity,
            }
            for each in self.occurrences
        ]
        return {"component": self.component, "tokens": tokens, "occurrences": texts}


@torch.no_grad()
def driving_tokens(
    model: nn.Module,
    documents: Sequence[Mapping[str, Tensor]],
    networks: FunctionalNetworks,
    *,
    most: int = 8,
    least_count: int = 3,
    skip_first: int = SKIP_FIRST,
) -> list[Driving]:
    """Return the tokens with the highest activity of each network.

    The activity of a network at a token is the root mean square of its channels, each standardised
    over all tokens.

    Args:
        model: The model of the networks.
        documents: `input_ids` of shape (1, tokens) each.
        networks: The networks.
        most: Tokens and occurrences per component.
        least_count: Occurrences that a token needs, so that one of them does not decide.
        skip_first: First tokens of each document to leave out.

    Raises:
        ConfigError: The networks are for another model, or a number is invalid.
    """
    check_fit(networks, model)
    check_whole("most", most, least=1)
    check_whole("least_count", least_count, least=1)
    if any(len(each["input_ids"]) != 1 for each in documents):
        raise ConfigError("A document must be one row of tokens. Pass batches of one row.")
    layout = networks.layout
    inputs = [{"input_ids": each["input_ids"]} for each in documents]
    settings: dict[str, Any] = {"layers": layout.layers, "site": layout.site}
    signals = ModelSignals(model, inputs, **settings, skip_first=skip_first)
    running, rows = RunningStatistics(), []
    for chunk in signals:
        running.add(chunk)
    statistics = running.result()
    places = {layer: number * layout.width for number, layer in enumerate(layout.layers)}
    columns = [
        torch.tensor([places[layer] + channel for layer, channels in network.items()
                      for channel in channels], dtype=torch.long)
        for network in (networks.networks[component] for component in networks.components)
    ]  # fmt: skip
    for chunk in signals:
        spread = statistics.spread.clamp(min=torch.finfo(torch.float32).tiny)
        scaled = (chunk.double() - statistics.mean.to(chunk.device)) / spread.to(chunk.device)
        squares = scaled.square()
        means = [squares[:, each.to(chunk.device)].mean(1).sqrt() for each in columns]
        rows.append(torch.stack(means, 1).float().cpu())
    activity = torch.cat(rows).numpy()  # (tokens, components)
    ids = [each["input_ids"][0].tolist() for each in documents]
    at = [(d, place) for d, row in enumerate(ids) for place in range(skip_first, len(row))]
    tokens = np.array([ids[d][place] for d, place in at])
    kinds, inverse, counts = np.unique(tokens, return_inverse=True, return_counts=True)
    if counts.max(initial=0) < least_count:
        raise ConfigError(
            f"No token occurs {least_count} times. Give more documents, or a smaller least_count."
        )
    result = []
    for number, component in enumerate(networks.components):
        values = activity[:, number]
        overall = float(values.mean()) or 1.0
        mean = np.bincount(inverse, values) / counts / overall
        order = [i for i in np.argsort(-mean, kind="stable") if counts[i] >= least_count][:most]
        drivers = [DrivingToken(int(kinds[i]), int(counts[i]), float(mean[i])) for i in order]
        shown: dict[int, Occurrence] = {}  # one per document
        for index in np.argsort(-values, kind="stable"):
            document, place = at[index]
            row = ids[document]
            if document not in shown:
                before = tuple(row[max(0, place - AROUND) : place])
                after = tuple(row[place + 1 : place + 1 + AROUND])
                value = float(values[index]) / overall
                shown[document] = Occurrence(before, row[place], after, value)
            if len(shown) == most:
                break
        result.append(
            Driving(component=component, tokens=tuple(drivers), occurrences=tuple(shown.values()))
        )
    return result


@final
@dataclass(frozen=True, kw_only=True)
class Resampled:
    """How well one component is found again in documents drawn with replacement."""

    component: int
    iou: float
    """Mean over resamples of the IoU with the nearest network."""
    low: float
    """5 % quantile."""
    recovered: float
    """Share of resamples with an IoU of at least `FOUND`."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def bootstrap(
    networks: FunctionalNetworks,
    documents: Sequence[Any],
    find: Callable[[Sequence[Any]], FunctionalNetworks],
    *,
    resamples: int = 10,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> list[Resampled]:
    """Return how stable networks are if other documents had been drawn.

    Args:
        networks: The networks found in all documents.
        documents: The documents.
        find: Finds networks in documents, with the settings of `networks`.
        resamples: Times that as many documents are drawn with replacement.
        seed: Of the draws.
        progress: Called with the resamples done and their total.
    """
    check_whole("resamples", resamples, least=1)
    chance = np.random.default_rng(seed)
    ious: list[list[float]] = []
    for number in range(resamples):
        drawn = chance.integers(0, len(documents), len(documents))
        other = find([documents[int(i)] for i in drawn])
        ious.append(
            [max(networks.iou(c, other, o) for o in other.components) for c in networks.components]
        )
        if progress is not None:
            progress(number + 1, resamples)
    table = np.array(ious)  # (resamples, components)
    return [
        Resampled(
            component=component,
            iou=float(table[:, i].mean()),
            low=float(np.quantile(table[:, i], 0.05)),
            recovered=float((table[:, i] >= FOUND).mean()),
        )
        for i, component in enumerate(networks.components)
    ]
