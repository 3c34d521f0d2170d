"""Freeze rows of weights while the rest of the same weight is trained.

Weight decay and momentum move rows even with zero gradients, so rows are restored after each step.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
from torch import Tensor, nn

from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.numerics.rounding import nearest, split
from narrowcast.workloads.sft.ica.blocks import Block, Projection, find_blocks, iter_adapters
from narrowcast.workloads.sft.ica.networks import Channels, Site, check_channels, check_site

if TYPE_CHECKING:
    from narrowcast.precision.step.prepared import Prepared
    from narrowcast.precision.weights.master import MasterWeights
    from narrowcast.training.task import Hook


@final
@dataclass(frozen=True)
class FrozenRows:
    """Frozen rows of one weight."""

    name: str
    weight: nn.Parameter
    axis: int
    indices: Sequence[int]
    zeroed: bool = False
    """Whether they are set to zero first."""

    @cached_property
    def rows(self) -> Tensor:
        return torch.tensor(self.indices, device=self.weight.device)

    def of(self, tensor: Tensor) -> Tensor:
        """Return a copy of these rows."""
        return tensor.detach().index_select(self.axis, self.rows.to(tensor.device))

    def put(self, tensor: Tensor, values: Tensor) -> None:
        """Write these rows."""
        rows = self.rows.to(tensor.device)
        tensor.detach().index_copy_(self.axis, rows, values.to(tensor.device, tensor.dtype))


@final
class Freeze:
    """Rows of a model that are restored after each step.

    With your own optimizer, call `restore()` after `optimizer.step()`; a task uses `hook()`.
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module, channels: Channels, *, site: Site = "mlp_output") -> None:
        """Store the rows; raise if an adapter already has nonzero weights for them."""
        self._frozen = list(_frozen_rows(model, channels, site))
        if not self._frozen:
            raise ConfigError(
                "Nothing to freeze: no weight of these channels is trained. Leave freezing out, or "
                "train the down projections (LoRA targets such as down_proj or c_proj)."
            )
        for frozen in self._frozen:
            if frozen.zeroed:
                frozen.put(frozen.weight, torch.zeros_like(frozen.of(frozen.weight)))
        self._frozen_rows = [frozen.of(frozen.weight) for frozen in self._frozen]

    @classmethod
    def resumed(
        cls, model: nn.Module, channels: Channels, state: dict[str, Any], *, site: Site
    ) -> "Freeze":
        """Continue from a checkpoint, with trained adapters."""
        freeze = cls.__new__(cls)
        freeze._frozen = list(_frozen_rows(model, channels, site, begun=True))
        freeze.load_state_dict(state)
        return freeze

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the weights with frozen rows."""
        return tuple(frozen.name for frozen in self._frozen)

    @torch.no_grad()
    def restore(self) -> None:
        """Write the stored rows back; does not synchronise."""
        for frozen, stored in zip(self._frozen, self._frozen_rows, strict=True):
            frozen.put(frozen.weight, stored)

    @torch.no_grad()
    def drift(self) -> float:
        """Return the largest change of a frozen element."""
        pairs = zip(self._frozen, self._frozen_rows, strict=True)
        return max(float((f.of(f.weight).double() - k.double()).abs().max()) for f, k in pairs)

    def hook(self, name: str = "freeze") -> "Hook":
        """Return the hook for a task."""
        from narrowcast.training.task import Hook

        return Hook(
            name=name,
            one_rank=True,
            before_first_step=self.take,
            after_step=lambda prepared, _applied: self.restore_in(prepared),
            state_dict=self.state_dict,
            load_state_dict=self.load_state_dict,
        )

    @torch.no_grad()
    def take(self, prepared: "Prepared") -> None:
        """Store the rows in the full precision of a run."""
        weights = prepared.engine.weights
        self._frozen_rows = [frozen.of(weights.full(frozen.weight)) for frozen in self._frozen]

    @torch.no_grad()
    def restore_in(self, prepared: "Prepared") -> None:
        """Restore the rows in weights, master weights, averages and lookahead."""
        weights = prepared.engine.weights
        places = {weight: i for i, weight in enumerate(weights.masters.parameters)}
        for frozen, saved in zip(self._frozen, self._frozen_rows, strict=True):
            index = places.get(frozen.weight)
            if index is None:
                frozen.put(frozen.weight, saved)
            else:
                _put_in_parts(frozen, saved.float(), weights.masters, index)
            average = None if weights.average is None else weights.average.of(frozen.weight)
            if average is not None:
                frozen.put(average, saved)
            lead = None if weights.lookahead is None else weights.lookahead.of(frozen.weight)
            if lead is not None:  # else the rows would follow the optimizer
                frozen.put(lead, torch.zeros_like(saved))

    def state_dict(self) -> dict[str, Any]:
        return {
            frozen.name: {"rows": frozen.rows, "values": stored}
            for frozen, stored in zip(self._frozen, self._frozen_rows, strict=True)
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load rows; raise if other rows were frozen."""
        same = set(state) == set(self.names) and all(
            torch.equal(state[f.name]["rows"].cpu(), f.rows.cpu()) for f in self._frozen
        )
        if not same:
            raise ConfigError(
                "The checkpoint froze different rows than this recipe. Resume with the networks "
                "the run started with."
            )
        self._frozen_rows = [state[f.name]["values"].to(f.weight.device) for f in self._frozen]


def _put_in_parts(
    frozen: FrozenRows, full: Tensor, masters: "MasterWeights", location: int
) -> None:
    """Write rows of a 16-bit weight and its master weight."""
    dtype, residual = frozen.weight.dtype, masters.residual(location)
    if masters.kind == "split":
        working, rest = split(full)
    else:
        working = nearest(full, dtype)
        rest = full if masters.kind == "fp32" else nearest(full - working.float(), dtype)
    frozen.put(frozen.weight, working)
    if residual is not None:
        frozen.put(residual, rest)


def _frozen_rows(
    model: nn.Module, channels: Channels, site: Site, *, begun: bool = False
) -> Iterator[FrozenRows]:
    """Yield the rows; `begun` allows trained adapters."""
    check_site(site)
    check_channels(channels)
    blocks = find_blocks(model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    width = blocks.width(site)
    for layer, chosen in channels.items():
        if not 0 <= layer < blocks.depth or not all(0 <= c < width for c in chosen):
            raise ConfigError(
                f"The networks were made for another model: layer {layer}, channel "
                f"{max(chosen, default=0)} is outside this model's {blocks.depth} layers of "
                f"{width} channels. Build networks for this model."
            )
        for piece in _pieces(blocks.blocks[layer], sorted(chosen), site, begun) if chosen else ():
            if piece.weight.requires_grad or piece.zeroed:
                yield FrozenRows(names[piece.weight], *piece)


class _Piece(NamedTuple):
    weight: nn.Parameter
    axis: int
    rows: Sequence[int]
    zeroed: bool = False


def _pieces(block: Block, chosen: Sequence[int], site: Site, begun: bool) -> Iterator[_Piece]:
    """Yield the rows (or columns, and the rows that lead to them) of channels."""
    if site == "mlp_output":
        yield from _outputs(block.down, chosen, begun)
        return
    yield from _inputs(block.down, chosen, begun)
    for up in block.ups:
        copies = range(0, up.outputs, block.down.inputs)  # gate and up may be one projection
        yield from _outputs(up, [copy + each for copy in copies for each in chosen], begun)


def _outputs(projection: Projection, rows: Sequence[int], begun: bool) -> Iterator[_Piece]:
    weight, bias = _own(projection.plain)
    matches = [_Piece(weight, 1 if projection.turned else 0, rows)] if weight is not None else []
    matches += [_Piece(bias, 0, rows)] if bias is not None else []
    moves_freely = []
    for name, first, second in iter_adapters(projection):
        inner, (outer, shift) = _own(first)[0], _own(second)
        assert inner is not None
        assert outer is not None
        if not begun and inner.requires_grad and bool(outer[list(rows)].any()):
            _check_untrained(name)
        matches += [_Piece(each, 0, rows) for each in (outer, shift) if each is not None]
        moves_freely.append(inner)
    _check_wrapper(projection, [*(piece.weight for piece in matches), *moves_freely])
    yield from matches


def _inputs(projection: Projection, columns: Sequence[int], begun: bool) -> Iterator[_Piece]:
    weight, bias = _own(projection.plain)
    result = [_Piece(weight, 0 if projection.turned else 1, columns)] if weight is not None else []
    moves_freely = [] if bias is None else [bias]
    for name, first, second in iter_adapters(projection):
        inner, outers = _own(first)[0], _own(second)
        assert inner is not None
        if not begun and outers[0] is not None and bool(outers[0].any()):
            _check_untrained(name)
        # B is zero, so A has no effect yet and may be set to zero.
        result.append(_Piece(inner, 1, columns, zeroed=True))
        moves_freely += [outer for outer in outers if outer is not None]
    _check_wrapper(projection, [*(piece.weight for piece in result), *moves_freely])
    yield from result


def _own(module: nn.Module) -> tuple[nn.Parameter | None, nn.Parameter | None]:
    return module._parameters.get("weight"), module._parameters.get("bias")


def _check_untrained(adapter: str) -> None:
    raise ConfigError(
        f"Adapter {adapter!r} already has nonzero weights for channels to freeze, so they would "
        "change as the adapter trains. Merge it into the model and start with a new adapter."
    )


def _check_wrapper(projection: Projection, known: Sequence[nn.Parameter]) -> None:
    """Raise if a wrapper trains parameters other than LoRA's."""
    for name, parameter in projection.module.named_parameters():
        if parameter.requires_grad and not any(parameter is each for each in known):
            raise UnsupportedError(
                f"{type(projection.module).__module__} trains {name}, which can change every row "
                "of the weight. Freezing needs plain LoRA (no DoRA), or full training of the "
                "weight."
            )
