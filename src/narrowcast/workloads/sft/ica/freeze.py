"""Freeze: rows of weights that cannot move, while the rest of the same weight is trained.

An output channel of a down projection is a row of its weight and a number of its bias, and, with an
adapter, a row of the adapter's B. No optimizer leaves a row alone because its gradient is zero:
weight decay and momentum move it. So the rows are kept aside, with every digit, and put back after
each step, with the digits that master weights keep beside them. What the optimizer did to them in
between is never used by a forward pass.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from narrowcast.errors import RecipeError, UnsupportedError
from narrowcast.numerics.parts import nearest, split
from narrowcast.workloads.sft.ica.blocks import Projection, adapter_rows, find_blocks
from narrowcast.workloads.sft.ica.networks import Channels

if TYPE_CHECKING:
    from narrowcast.precision.step.prepared import Prepared
    from narrowcast.precision.weights.master import MasterWeights
    from narrowcast.training.task import Hook


@final
@dataclass(frozen=True, kw_only=True)
class FrozenRows:
    """Rows of one weight."""

    name: str
    weight: nn.Parameter
    rows: Tensor
    """Which, along `axis`."""
    axis: int

    def of(self, tensor: Tensor) -> Tensor:
        """Return a copy of these rows of a tensor like the weight."""
        return tensor.detach().index_select(self.axis, self.rows.to(tensor.device))

    def put(self, tensor: Tensor, values: Tensor) -> None:
        """Write these rows of a tensor like the weight."""
        rows = self.rows.to(tensor.device)
        tensor.detach().index_copy_(self.axis, rows, values.to(tensor.device, tensor.dtype))


@final
class Freeze:
    """Rows of a model that are put back after each step.

    With an optimizer of your own call `restore()` after `optimizer.step()`; a task takes `hook()`.
    """

    def __init__(self, model: nn.Module, channels: Channels) -> None:
        """Take the rows as they are now; weights that are not trained need no care.

        Refuses an adapter that has learnt something for these rows: its A moves them.
        """
        self._frozen = list(_frozen_rows(model, channels))
        if not self._frozen:
            raise RecipeError(
                "nothing to freeze: no weight of these channels is trained; leave freezing out, or "
                "train the down projections (LoRA targets such as down_proj or c_proj)"
            )
        self._kept = [frozen.of(frozen.weight) for frozen in self._frozen]

    @property
    def names(self) -> tuple[str, ...]:
        """The weights that have frozen rows."""
        return tuple(frozen.name for frozen in self._frozen)

    @torch.no_grad()
    def restore(self) -> None:
        """Put the rows back; does not wait for the device."""
        for frozen, kept in zip(self._frozen, self._kept, strict=True):
            frozen.put(frozen.weight, kept)

    @torch.no_grad()
    def drift(self) -> float:
        """Return the largest change of a frozen number, which is 0 after `restore`."""
        pairs = zip(self._frozen, self._kept, strict=True)
        return max(float((f.of(f.weight).double() - k.double()).abs().max()) for f, k in pairs)

    def hook(self, name: str = "freeze") -> "Hook":
        """Return what a task carries so that its rows stay, in every format and over a resume."""
        from narrowcast.training.task import Hook

        return Hook(
            name=name,
            before_first_step=self.take,
            after_step=lambda prepared, _applied: self.restore_in(prepared),
            state_dict=self._state,
            load_state_dict=self._load,
        )

    @torch.no_grad()
    def take(self, prepared: "Prepared") -> None:
        """Take the rows as a run has them, with every digit it keeps."""
        weights = prepared.engine.weights
        self._kept = [frozen.of(weights.full(frozen.weight)) for frozen in self._frozen]

    @torch.no_grad()
    def restore_in(self, prepared: "Prepared") -> None:
        """Put the rows back in a run: weights, what masters keep beside them, and averages."""
        weights = prepared.engine.weights
        places = {weight: i for i, weight in enumerate(weights.masters.parameters)}
        for frozen, kept in zip(self._frozen, self._kept, strict=True):
            place = places.get(frozen.weight)
            if place is None:
                frozen.put(frozen.weight, kept)
            else:
                _put_in_parts(frozen, kept.float(), weights.masters, place)
            average = None if weights.average is None else weights.average.of(frozen.weight)
            if average is not None:
                frozen.put(average, kept)

    def _state(self) -> dict[str, Any]:
        return {
            frozen.name: {"rows": frozen.rows, "values": kept}
            for frozen, kept in zip(self._frozen, self._kept, strict=True)
        }

    def _load(self, state: dict[str, Any]) -> None:
        same = set(state) == set(self.names) and all(
            torch.equal(state[f.name]["rows"].cpu(), f.rows.cpu()) for f in self._frozen
        )
        if not same:
            raise RecipeError(
                "the checkpoint froze other rows than this recipe does; resume with the networks "
                "it began with"
            )
        self._kept = [state[f.name]["values"].to(f.weight.device) for f in self._frozen]


def _put_in_parts(frozen: FrozenRows, full: Tensor, masters: "MasterWeights", place: int) -> None:
    """Write rows of a weight that is kept in 16 bits, as a master of each kind has them."""
    dtype, beside = frozen.weight.dtype, masters.beside(place)
    if masters.kind == "split":
        working, rest = split(full)
    else:
        working = nearest(full, dtype)
        rest = full if masters.kind == "fp32" else nearest(full - working.float(), dtype)
    frozen.put(frozen.weight, working)
    if beside is not None:
        frozen.put(beside, rest)


def _frozen_rows(model: nn.Module, channels: Channels) -> Iterator[FrozenRows]:
    blocks = find_blocks(model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    width = blocks.width("mlp_output")
    for layer, chosen in channels.items():
        if not 0 <= layer < blocks.depth or not all(0 <= c < width for c in chosen):
            raise RecipeError(
                f"layer {layer} with channels up to {max(chosen, default=0)} is not in this model, "
                f"which has {blocks.depth} layers of {width}; networks were made for another model"
            )
        if not chosen:
            continue
        rows = torch.tensor(sorted(chosen))
        for weight, axis in _row_weights(blocks.blocks[layer].down, chosen):
            if weight.requires_grad:
                rows = rows.to(weight.device)
                yield FrozenRows(name=names[weight], weight=weight, rows=rows, axis=axis)


def _row_weights(down: Projection, rows: Sequence[int]) -> Iterator[tuple[nn.Parameter, int]]:
    """Yield what holds the output rows of a projection, and along which axis."""
    weight, bias = (down.plain._parameters.get(name) for name in ("weight", "bias"))
    if weight is not None:
        yield weight, 1 if down.turned else 0
    if bias is not None:
        yield bias, 0
    for name, first, second in adapter_rows(down):
        if first.requires_grad and bool(second[list(rows)].any()):
            raise RecipeError(
                f"adapter {name!r} has already learnt something for channels that are to be "
                "frozen, and what it does to them would move with the rest of it; merge it into "
                "the model first, and begin with a new one"
            )
        assert isinstance(second, nn.Parameter)
        yield second, 0
    others = [m for m in down.module._modules if m.startswith("lora_magnitude")]
    if any(len(down.module._modules[m] or ()) for m in others):  # type: ignore[arg-type]
        raise UnsupportedError(
            "DoRA turns every row of a weight together with its length, so none can be frozen; "
            "write use_dora=False"
        )
