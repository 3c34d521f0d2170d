"""From a model and batches to its functional networks."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any, final

import torch
from torch import Tensor, nn

from narrowcast.errors import ConfigError
from narrowcast.training.evaluation import in_eval_mode
from narrowcast.workloads.sft.ica.blocks import find_blocks
from narrowcast.workloads.sft.ica.ica import ICA, Components
from narrowcast.workloads.sft.ica.networks import (
    FunctionalNetworks,
    Layout,
    Provenance,
    Score,
    Site,
    check_site,
    check_type,
    check_whole,
    parse_layers,
)
from narrowcast.workloads.sft.ica.selection import Percentile, Selector
from narrowcast.workloads.sft.ica.settings import SKIP_FIRST
from narrowcast.workloads.sft.ica.signals import dtype_name, storage_for


@final
class ModelSignals:
    """Channels of layers, side by side, for each token of the batches."""

    def __init__(
        self,
        model: nn.Module,
        batches: Iterable[Mapping[str, Tensor]],
        *,
        layers: Sequence[int] | None = None,
        site: Site = "mlp_output",
        skip_first: int = 0,
    ) -> None:
        """Check arguments; `batches` must be iterable repeatedly, `attention_mask` 0 at padding.

        `position_ids` separate sequences packed in one row.
        """
        check_whole("skip_first", skip_first, least=0)
        check_site(site)
        if isinstance(batches, Mapping | Tensor) or not isinstance(batches, Iterable):
            raise ConfigError(
                f"batches must be a list of what the model is called with, got a "
                f"{type(batches).__name__}. Write [{{'input_ids': ids}}]."
            )
        if iter(batches) is batches:
            raise ConfigError("batches can be iterated only once. Pass a list or a data loader.")
        blocks = find_blocks(model)
        chosen = tuple(range(blocks.depth)) if layers is None else tuple(layers)
        for layer in chosen:
            check_whole("a layer", layer, least=0)
        self.layout = Layout(layers=chosen, width=blocks.width(site), depth=blocks.depth, site=site)
        self._model, self._batches, self._skip_first = model, batches, skip_first
        self._blocks = [blocks.blocks[layer] for layer in chosen]

    @property
    def channels(self) -> int:
        return len(self._blocks) * self.layout.width

    @property
    def dtype(self) -> torch.dtype:
        return next(p.dtype for p in self._model.parameters() if p.is_floating_point())

    def __iter__(self) -> Iterator[Tensor]:
        rows = 0
        for batch in self._batches:
            check_type("a batch", batch, Mapping, "a mapping such as {'input_ids': ids}")
            chunk = self._signal_rows(batch)
            rows += len(chunk)
            yield chunk
        if self._skip_first and not rows:
            raise ConfigError(
                f"No sequence has more than skip_first={self._skip_first} tokens. Write a smaller "
                "skip_first, or give longer sequences."
            )

    def _signal_rows(self, batch: Mapping[str, Tensor]) -> Tensor:
        device = next(self._model.parameters()).device
        settings = {name: value.to(device) for name, value in batch.items()}
        heard: dict[int, Tensor] = {}
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(in_eval_mode(self._model))
            # Compiled code ignores hooks that are added later.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            for location, block in enumerate(self._blocks):
                stack.callback(self._listen(block, location, heard).remove)
            self._model(**settings)
        if len(heard) < len(self._blocks):
            raise ConfigError(
                f"{len(self._blocks) - len(heard)} of {len(self._blocks)} layers were not run by "
                "the model. Select layers that are run."
            )
        here = heard[0].device  # a model may span several devices
        rows = torch.cat([heard[i].to(here) for i in range(len(heard))], dim=-1)
        return rows[_counted(rows, settings, self._skip_first)]

    def _listen(self, block: Any, position: int, heard: dict[int, Tensor]) -> Any:
        if self.layout.site == "mlp_output":
            return block.output.register_forward_hook(
                lambda _module, _args, output: _keep(heard, position, output)
            )
        return block.down.module.register_forward_pre_hook(
            lambda _module, args: _keep(heard, position, args[0])
        )


def _keep(heard: dict[int, Tensor], location: int, value: Tensor) -> None:
    heard[location] = value.detach()


def _counted(rows: Tensor, batch: Mapping[str, Tensor], skip_first: int) -> Tensor:
    """Return which tokens are neither padding nor skipped."""
    mask = batch.get("attention_mask")
    tokens = rows.new_ones(rows.shape[:-1], dtype=torch.bool)
    if mask is not None and mask.dim() == 2:
        tokens = mask.bool().to(rows.device)
    if not skip_first:
        return tokens
    positions = batch.get("position_ids")
    if positions is None or positions.dim() != 2:
        positions = tokens.cumsum(-1) - 1
    return tokens & (positions.to(rows.device) >= skip_first)


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
    """Return the functional networks of a model on batches.

    Networks of MLP outputs span layers. With `site="down_input"` each layer is analysed alone, and
    components are numbered consecutively. The first `skip_first` tokens of sequences are skipped.
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
    parts, spans = [collected], {0: signals.layout.layers}
    if site != "mlp_output":
        stored, width = collected.signals, signals.layout.width
        starts = range(0, stored.channels, width)
        parts = [collected._replace(signals=stored.columns(i, i + width)) for i in starts]
        spans = {i: (layer,) for i, layer in enumerate(signals.layout.layers)}
    results = dict(enumerate(ica.fit_each(parts)))
    networks = networks_from(results, spans, layout=signals.layout, selector=selector)
    info = dict.fromkeys(str(f) for each in results.values() for f in each.findings)
    clip = ica.clip_activations
    clipped = "" if clip is None else f", clip_activations={clip:g}"
    known = replace(
        provenance,
        seed=ica.seed,
        dtype=dtype_name(collected.dtype),
        selector=str(selector),
        signals=f"skip_first={skip_first}{clipped}",
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
    """Select channels of components, numbered consecutively; `spans` has their layers."""
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
    """Raise if networks do not fit the shape of a model."""
    blocks = find_blocks(model)
    networks.require_fit(depth=blocks.depth, width=blocks.width(networks.layout.site))


@final
@dataclass(frozen=True, kw_only=True)
class ICAMask:
    """`functional_networks` with the names of FunctionalNetworksSFT."""

    num_components: int = 20
    percentile: float = 98.0
    ica_dtype: str | None = None
    seed: int = 0
    clip_activations: float | None = None
    skip_first: int = SKIP_FIRST

    def dtype_for(self, model: nn.Module | None = None) -> torch.dtype:
        """Return the storage dtype for a model."""
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
