"""From a model and batches to its functional networks: the two names to begin with."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import NoneType
from typing import final

import torch
from torch import Tensor, nn

from narrowcast.errors import ConfigError
from narrowcast.workloads.sft.ica.arguments import check_type
from narrowcast.workloads.sft.ica.blocks import find_blocks
from narrowcast.workloads.sft.ica.capture import ModelSignals
from narrowcast.workloads.sft.ica.collect import Collected
from narrowcast.workloads.sft.ica.components import Components
from narrowcast.workloads.sft.ica.dtypes import dtype_name, storage_for
from narrowcast.workloads.sft.ica.ica import ICA
from narrowcast.workloads.sft.ica.layer_spec import parse_layers
from narrowcast.workloads.sft.ica.networks import (
    FunctionalNetworks,
    Layout,
    Provenance,
    Score,
    Site,
)
from narrowcast.workloads.sft.ica.selection import Percentile, Selector
from narrowcast.workloads.sft.ica.settings import SKIP_FIRST


def functional_networks(
    model: nn.Module,
    batches: Iterable[Mapping[str, Tensor]],
    *,
    ica: ICA = ICA(),  # noqa: B008  # frozen
    selector: Selector = Percentile(),  # noqa: B008  # frozen
    layers: str | Sequence[int] | None = None,
    site: Site = "mlp_output",
    skip_first: int = SKIP_FIRST,
    provenance: Provenance = Provenance(),  # noqa: B008  # frozen
) -> FunctionalNetworks:
    """Return the functional networks of a model on some batches.

    MLP outputs are taken together: a network reaches over layers. Inputs of down projections are
    taken layer by layer: each network is in one, and components are numbered through. The first
    `skip_first` tokens of each sequence are left out.
    """
    check_type("ica", ica, ICA, "an ICA, such as ICA(components=5)")
    if not callable(getattr(selector, "select", None)):
        raise ConfigError(f"selector must be a selector such as Percentile(98), got {selector!r}.")
    check_type("layers", layers, (str, Sequence, NoneType), "text such as 0:4 or a list of numbers")
    check_type("provenance", provenance, Provenance, "a Provenance")
    depth = find_blocks(model).depth
    chosen = parse_layers(layers, depth) if isinstance(layers, str | None) else tuple(layers)
    signals = ModelSignals(model, batches, layers=chosen, site=site, skip_first=skip_first)
    collected = ica.collect(signals, model_dtype=signals.dtype)
    if site == "mlp_output":
        results = {0: ica.fit(collected)}
        spans = {0: signals.layout.layers}
    else:
        results = dict(enumerate(ica.fit_each(_layer_by_layer(collected, signals.layout))))
        spans = {i: (layer,) for i, layer in enumerate(signals.layout.layers)}
    networks = networks_from(results, spans, layout=signals.layout, selector=selector)
    info = dict.fromkeys(str(f) for each in results.values() for f in each.findings)
    known = replace(
        provenance,
        seed=ica.seed,
        dtype=dtype_name(collected.dtype),
        selector=str(selector),
        signals=_signals(skip_first, ica.clip_activations),
        findings=tuple(info),
    )
    return replace(networks, provenance=known)


def networks_from(
    result: Mapping[int, Components],
    spans: Mapping[int, tuple[int, ...]],
    *,
    layout: Layout,
    selector: Selector,
) -> FunctionalNetworks:
    """Select channels of components, which are numbered through; `spans` has their layers."""
    networks: dict[int, dict[int, tuple[int, ...]]] = {}
    scores: dict[int, Score] = {}
    for location in sorted(result):
        components, layers = result[location], spans[location]
        for column in range(components.count):
            number = len(networks)
            chosen = selector.select(components.loadings[:, column])
            networks[number] = _by_layer(chosen, layers, layout.width)
            scores[number] = Score(
                explained=float(components.explained[column]),
                negentropy=float(components.negentropy[column]),
                stability=float(components.stability[column]),
            )
    return FunctionalNetworks(networks=networks, layout=layout, scores=scores)


def check_fit(networks: FunctionalNetworks, model: nn.Module) -> None:
    """Refuse networks that were made for a model of another shape."""
    blocks = find_blocks(model)
    networks.require_fit(depth=blocks.depth, width=blocks.width(networks.layout.site))


@final
@dataclass(frozen=True, kw_only=True)
class ICAMask:
    """The familiar name, with the familiar settings: components, percentile and `ica_dtype`."""

    num_components: int = 20
    percentile: float = 98.0
    ica_dtype: str | None = None
    seed: int = 0
    clip_activations: float | None = None
    skip_first: int = SKIP_FIRST

    def dtype_for(self, model: nn.Module | None = None) -> torch.dtype:
        """Return what signals of a model are stored in."""
        own = None if model is None else next(model.parameters()).dtype
        return storage_for(self.ica_dtype, own).dtype

    def compute(
        self,
        model: nn.Module,
        batches: Iterable[Mapping[str, Tensor]],
        *,
        layers: str | Sequence[int] | None = None,
        site: Site = "mlp_output",
    ) -> FunctionalNetworks:
        """Return the functional networks of a model."""
        return functional_networks(
            model,
            batches,
            ica=ICA(
                components=self.num_components,
                ica_dtype=self.ica_dtype,
                seed=self.seed,
                clip_activations=self.clip_activations,
            ),
            selector=Percentile(self.percentile),
            layers=layers,
            site=site,
            skip_first=self.skip_first,
        )


def _signals(skip_first: int, clip_activations: float | None) -> str:
    """Say which rows were left out, and what was done to the others."""
    clipped = "" if clip_activations is None else f", clip_activations={clip_activations:g}"
    return f"skip_first={skip_first}{clipped}"


def _layer_by_layer(collected: Collected, layout: Layout) -> list[Collected]:
    width = layout.width
    return [
        replace(collected, signals=collected.signals.columns(i * width, (i + 1) * width))
        for i in range(len(layout.layers))
    ]


def _by_layer(
    channels: Sequence[int], layers: Sequence[int], width: int
) -> dict[int, tuple[int, ...]]:
    if channels and channels[-1] >= len(layers) * width:
        raise ConfigError(
            f"channel must be below {len(layers)} layers x {width} channels, got {channels[-1]}."
        )
    network: dict[int, list[int]] = {}
    for channel in channels:
        network.setdefault(layers[channel // width], []).append(channel % width)
    return {layer: tuple(chosen) for layer, chosen in network.items()}
