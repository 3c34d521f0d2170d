"""An input that several fp8 layers read is scaled and cast once, by the first of them.

In eager mode the first layer's codes are kept while the tensor and its region exist. A compiler
merges equal casts by itself. Layers with delayed scales that read one tensor share one scale.
"""

import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from narrowcast.kernels.fp8 import Quantized
from narrowcast.kernels.launch import PLAIN, is_capturing
from narrowcast.precision.fp8.delayed import AmaxHistory
from narrowcast.precision.fp8.scaling import Scale, quantize_scaled
from narrowcast.precision.products.autocast import active_cache

SHARED = 2
"""Inputs whose codes are kept after a second layer took them, such as those of cross-attention."""


class Wanted(NamedTuple):
    """What a layer wants of its input in fp8."""

    target: torch.dtype
    scaling: str
    columnwise: bool
    """Whether transposed as well, for the gradient of its weight."""


class _Made:
    """What a layer has made of an input, and what that was."""

    __slots__ = (
        "capturing",
        "history",
        "moves",
        "noted",
        "of",
        "results",
        "scale_inv",
        "stream",
        "taken",
        "version",
        "wanted",
    )  # fmt: skip

    def __init__(
        self,
        of: "weakref.ref[Tensor]",
        version: int,
        wanted: Wanted,
        scale: Scale,
        history: AmaxHistory | None,
        where: tuple[int, bool],
        result: Quantized,
    ) -> None:
        self.of, self.version, self.wanted, self.results = of, version, wanted, result
        self.scale_inv, self.noted = scale[0], scale[1] is not None
        self.history, self.moves = history, 0 if history is None else history.moves
        self.stream, self.capturing = where
        self.taken = False


def quantized_input(
    inputs: Tensor,
    rows: Tensor,
    *,
    wanted: Wanted,
    scale: Scale,
    history: AmaxHistory | None,
) -> Quantized:
    """Return the rows of what a layer was given in fp8, which another may have made before it."""
    stored = None if torch.compiler.is_compiling() else active_cache()
    if stored is None or type(inputs) not in PLAIN or inputs.is_inference():
        return _quantized(rows, wanted, scale)
    where = _where(inputs)
    if where[1] and inputs.grad_fn is None:
        # It may be from before the capture, where what is made of it would not be captured.
        return _quantized(rows, wanted, scale)
    made: _Made | None = stored.get(id(inputs))
    if made is not None and _fits(made, inputs, wanted, scale, history, where):
        made.taken = True
        return made.results
    matched = _quantized(rows, wanted, scale)
    _make_room(stored)
    key = id(inputs)
    of = weakref.ref(inputs, lambda gone: _forget(stored, key, gone))
    stored[key] = _Made(of, inputs._version, wanted, scale, history, where, matched)
    return matched


def _quantized(rows: Tensor, wanted: Wanted, scale: Scale) -> Quantized:
    return quantize_scaled(
        rows.detach(), wanted.target, wanted.scaling, scale=scale, columnwise=wanted.columnwise
    )


def _fits(
    made: _Made,
    settings: Tensor,
    wanted: Wanted,
    scale: Scale,
    history: AmaxHistory | None,
    where: tuple[int, bool],
) -> bool:
    """Return whether this layer would make the same codes; if so, let it share the scale."""
    mine = made.wanted
    if (
        made.of() is not settings
        or made.version != settings._version
        or (made.stream, made.capturing) != where
        or mine.target != wanted.target
        or mine.scaling != wanted.scaling
        or (wanted.columnwise and not mine.columnwise)
        or (scale[1] is not None and not made.noted)
        or made.moves != (0 if history is None else history.moves)
    ):
        return False
    if made.scale_inv is scale[0]:
        return True
    if history is None or made.history is None or scale[0] is None or made.scale_inv is None:
        return False
    return not made.capturing and history.reads_with(made.history)


def _where(inputs: Tensor) -> tuple[int, bool]:
    """Return the stream in use, and whether it is captured: another knows nothing of this one."""
    device = inputs.device
    if device.type != "cuda":
        return 0, False
    return torch._C._cuda_getCurrentRawStream(device.index), is_capturing(device)


def _make_room(saved: dict[int, _Made]) -> None:
    """Drop unused casts and the oldest used one."""
    taken = [key for key, made in saved.items() if made.taken]
    stays = set(taken[-SHARED:])
    for key in [key for key in saved if key not in stays]:
        del saved[key]


def _forget(stored: dict[int, _Made], key: int, gone: "weakref.ref[Tensor]") -> None:
    made = stored.get(key)
    if made is not None and made.of is gone:
        del stored[key]
