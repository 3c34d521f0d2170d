"""Delayed scaling: scales of fp8 operands from the largest magnitudes of past steps.

The scales of all modules lie side by side, so that an applied step moves them in one operation. A
scale of zero is undecided: the first matrix decides it.
"""

import contextlib
import math
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from narrowcast.kernels.fp8 import DECIDED, scale_inv_for
from narrowcast.numerics import Format, scale_for
from narrowcast.precision.plan.module_plan import OPERANDS
from narrowcast.precision.products.operands import ProductFormats, is_delayed

LENGTH = 16
"""Steps remembered."""
COUNTS = ("looked at", "saturated", "flushed to zero")
"""Of values, beside the largest magnitude, in what a cast counts."""
COUNTED = 7
"""An emulated product samples one row in this many; no power of two, as sequence lengths are."""
_APART = 4
_INPUT = OPERANDS.index("input")


class AmaxHistories:
    """The histories of all modules with delayed scaling."""

    def __init__(self, formats: Sequence[ProductFormats], device: torch.device) -> None:
        shape = (len(formats), len(OPERANDS))
        self.amax = torch.zeros(*shape, LENGTH, device=device)
        # cuBLAS reads scales only from addresses that are multiples of 16 bytes, and a compiled
        # graph works on a copy of what is not at one.
        self.cast_stats = torch.zeros(*shape, _APART, dtype=torch.int32, device=device)
        self.scale_inv = torch.zeros(*shape, _APART, device=device)[..., 0]
        self._largest = torch.tensor([_largest(each) for each in formats], device=device)
        self.input_formats = [each.forward for each in formats]
        self.counts = torch.zeros(*shape, len(COUNTS), dtype=torch.int64, device=device)
        """What casts to fp8 of applied steps have lost since the counts were last taken."""
        self.peak = torch.zeros(*shape, device=device)
        """The largest magnitude they have met since then."""
        self.moves = 0
        """How often the scales may have changed."""
        self.reads_by_name = list(range(len(formats)))
        """Whose scale and counts a module's inputs have: often its own."""
        self._reads_by_name = torch.arange(len(formats), device=device)
        self._where = self._addresses
        DECIDED.remove(self._where)
        weakref.finalize(self, DECIDED.remove, self._where)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Be a copy: at other addresses, with the same scales. Waits for the device."""
        self.__dict__.update(state)
        self._where = self._addresses
        self._note_decided()
        weakref.finalize(self, DECIDED.remove, self._where)

    def of(self, module: int) -> "AmaxHistory":
        """Return one module's part."""
        return AmaxHistory(self, module)

    def advance(self, finite: Tensor, *, loss_growth: Tensor | None = None) -> None:
        """Add an applied step to the histories and set the next scales.

        When the loss scale grows, past gradients are multiplied too, or the next would saturate.
        """
        if self.reads_by_name != list(range(len(self.reads_by_name))):
            # Of inputs that are one tensor everybody remembers what one has noted.
            self.cast_stats[:, _INPUT] = self.cast_stats[self._reads_by_name, _INPUT]
        amax = self.cast_stats[..., 0].contiguous().view(torch.float32)
        amax = torch.where(finite & amax.isfinite(), amax, 0.0)
        moved = torch.cat([amax[..., None], self.amax[..., :-1]], dim=-1)
        self.amax.copy_(torch.where(finite, moved, self.amax))
        if loss_growth is not None:
            self.amax[:, OPERANDS.index("grad_output")] *= loss_growth
        self.counts += self.cast_stats[..., 1:] * finite
        torch.maximum(self.peak, amax, out=self.peak)
        self.cast_stats.zero_()
        self.moves += 1
        past = self.amax.amax(-1)
        self.scale_inv.copy_(
            torch.where(past > 0, scale_inv_for(past, self._largest), self.scale_inv)
        )

    def join(self, module: int, other: int) -> None:
        """Share the input scale and counts of another module."""
        self.reads_by_name[module] = other
        self._reads_by_name[module] = other

    @property
    def decided(self) -> frozenset[int]:
        """Where the scales are that native products use as they are: a matrix has decided them."""
        return DECIDED.among(self._where)

    def take_counts(self) -> tuple[Tensor, Tensor]:
        """Return what casts lost and the largest magnitudes since the last call. Does not wait."""
        taken = self.counts.clone(), self.peak.clone()
        self.counts.zero_()
        self.peak.zero_()
        return taken

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state: scale histories, and counts that are not reported yet."""
        return {name: getattr(self, name) for name in ("amax", "scale_inv", "counts", "peak")}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore saved histories. Waits for the device."""
        for name, held in self.state_dict().items():
            held.copy_(state[name])
        self.cast_stats.zero_()
        self.moves += 1
        self._note_decided()

    def forget(self, keep: frozenset[int] = frozenset()) -> None:
        """Let the next matrices initialise unset scales, except those at `keep`. Synchronises."""
        stored = torch.tensor(
            [each.data_ptr() in keep for each in self.scale_inv.view(-1).split(1)]
        )
        past = self.amax.amax(-1) > 0
        stays = past | stored.view(past.shape).to(past.device)
        self.scale_inv.copy_(torch.where(stays, self.scale_inv, 0.0))
        self.moves += 1
        self._note_decided()

    def take_over(self, pairs: Sequence[tuple["AmaxHistory", "AmaxHistory"]]) -> None:
        """Continue from other histories, as pairs of own and other; synchronises."""
        for mine, other in pairs:
            i, j, theirs = mine.module, other.module, other.whole
            self.amax[i] = theirs.amax[j]
            self.counts[i], self.peak[i] = theirs.counts[j], theirs.peak[j]
            past = self.amax[i].amax(-1)
            same = self._largest[i] == theirs._largest[j]
            first = torch.where(same, theirs.scale_inv[j], 0.0)  # from before any step was applied
            made = scale_inv_for(past, self._largest[i])
            self.scale_inv[i] = torch.where(past > 0, made, first)
        self.moves += 1
        self._note_decided()

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Undo what passes in the block note or decide; synchronises with the device."""
        # As `.data`: autograd may be keeping the counts for a backward pass.
        held = [each.data for each in (self.cast_stats, *self.state_dict().values())]
        before, moves = [each.clone() for each in held], self.moves
        try:
            yield
        finally:
            for each, value in zip(held, before, strict=True):
                each.copy_(value)
            self.moves = moves
            self._note_decided()

    @property
    def _addresses(self) -> set[int]:
        return {each.data_ptr() for each in self.scale_inv.view(-1).split(1)}

    def _note_decided(self) -> None:
        scales = self.scale_inv.view(-1)
        for each, decided in zip(scales.split(1), scales.tolist(), strict=True):
            if decided:
                DECIDED.add(each)
            else:  # from before its first step: the next matrix decides it
                DECIDED.remove({each.data_ptr()})


class AmaxHistory:
    """The scales of one module's operands, and where they note what they meet."""

    def __init__(self, whole: AmaxHistories, module: int) -> None:
        self.whole, self.module = whole, module  # the whole holds the memory
        self.amax = whole.amax[module]
        self._scale_inv: dict[str, Tensor] = {
            role: _single(whole.scale_inv[module, i]) for i, role in enumerate(OPERANDS)
        }
        self._cast_stats: dict[str, Tensor] = dict(
            zip(OPERANDS, whole.cast_stats[module], strict=True)
        )

    def reads_with(self, other: "AmaxHistory") -> bool:
        """Share the input's scale with a module that reads the same tensors, if possible."""
        whole, leader = self.whole, other.whole.reads_by_name[other.module]
        if (
            whole is not other.whole
            or whole.input_formats[self.module] != whole.input_formats[other.module]
        ):
            return False
        if (
            whole.reads_by_name[self.module] != self.module
            or whole.reads_by_name.count(self.module) > 1
        ):
            return leader == whole.reads_by_name[self.module]  # it shares one already
        self._scale_inv["input"] = other._scale_inv["input"]
        self._cast_stats["input"] = other._cast_stats["input"]
        whole.join(self.module, leader)
        return True

    def scale_inv(self, role: str) -> Tensor:
        """Return the inverse scale of a role: one number, zero until it is first used."""
        return self._scale_inv[role]

    def is_decided(self, role: str) -> bool:
        """Return whether native products use the scale of a role unchanged."""
        return self.scale_inv(role) in DECIDED

    def cast_stats(self, role: str) -> Tensor | None:
        """Return where a cast notes what it met in a role; of inputs, only in training."""
        noted = torch.is_grad_enabled() or role != "input"
        return self._cast_stats[role] if noted else None

    @property
    def moves(self) -> int:
        """How often the scales may have changed."""
        return self.whole.moves

    def scale(self, x: Tensor, target: Format, role: str) -> Tensor:
        """Return the scale of a role in force, which its first matrix decides; note this one."""
        if x.numel() == 0:
            return scale_for(x, target)
        amax, scale_inv = x.detach().abs().amax().float(), self.scale_inv(role)
        own = scale_for(amax, target)
        scale = torch.where(scale_inv[0] > 0, scale_inv[0].reciprocal(), own)
        cast_stats = self.cast_stats(role)
        if cast_stats is not None:
            scale_inv.copy_(scale.reciprocal())
            cast_stats[:1] = torch.maximum(cast_stats[:1], amax.view(1).view(torch.int32))
            # An evaluation looks at the weights of a step again and again.
            if role == "grad_output" or torch.is_grad_enabled():
                _count(cast_stats, x.detach(), target, scale)
        return scale

    def scale_of_past(self, role: str) -> Tensor | None:
        """Return the scale of a role if it is decided; note nothing. Waits for the device."""
        scale_inv = self.scale_inv(role)[0]
        return scale_inv.reciprocal() if scale_inv > 0 else None


def _count(cast_stats: Tensor, x: Tensor, target: Format, scale: Tensor) -> None:
    """Add what a cast loses of about one row in seven, at no fixed position of a sequence."""
    every, stride = x.reshape(-1, x.shape[-1]), COUNTED
    while math.gcd(stride, len(every)) > 1:
        stride += 1
    rows = every[::stride]
    scaled = rows.float().abs() * scale
    saturated = (scaled > target.largest) & rows.isfinite()
    flushed = (scaled <= target.smallest / 2) & (rows != 0)
    cast_stats[1] += rows.numel()
    cast_stats[2:] += torch.stack((saturated.sum(), flushed.sum())).int()


def _single(number: Tensor) -> Tensor:
    """Return a view of one number that is contiguous for a compiler too, which else copies it."""
    return number.as_strided((1,), (1,))


def _largest(formats: ProductFormats) -> list[float]:
    roles = (formats.forward, formats.forward, formats.grad_input)
    # Only 8-bit formats have a delayed scale; this number is not used.
    return [f.largest if isinstance(f, Format) and is_delayed(f) else 448.0 for f in roles]
