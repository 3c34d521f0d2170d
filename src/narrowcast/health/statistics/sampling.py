"""Samples of tensors, taken where they pass through a model, forward and backward.

A sample is 4,096 values, one at a random position in each of as many equal parts: a fixed distance
would show the same few tokens of every row. With delayed scaling the fp8 kernels count saturated
and flushed values, because a sample scaled by itself never saturates.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from narrowcast.health.statistics.statistics import COLUMNS, RUN
from narrowcast.kernels.launch import unsupported_reason, upload
from narrowcast.precision.dtensor import local_part
from narrowcast.precision.fp8.delayed import AmaxHistory
from narrowcast.precision.plan.module_plan import OPERANDS
from narrowcast.precision.products.operands import ProductFormats

SAMPLE = 4096
"""Values of a sample: a share of one part in a thousand is seen, and what is rarer may not be."""
FRACTION_BITS = 31
"""Bits of a random offset, so that its product with a number of elements is an int64."""


@final
class Offsets:
    """Random offsets in units of 2**-31, written in place so that captured steps read new ones."""

    def __init__(self, device: torch.device, *, seed: int = 0) -> None:
        self._seed = seed
        self.single, self.runs = (
            torch.zeros(SAMPLE // run, dtype=torch.int64, device=device) for run in (1, RUN)
        )
        """For single values, and for runs of neighbours, as blocks that share a scale."""
        self.draw(0)

    def draw(self, step: int) -> None:
        """Draw the offsets of a reading from the seed and the step alone. Does not wait."""
        generator = torch.Generator().manual_seed((self._seed * 1_000_003 + step) % 2**63)
        for offsets in (self.single, self.runs):
            width = 2**FRACTION_BITS // len(offsets)
            # In no order: where only some are needed, those are of any part of a tensor.
            parts = torch.randperm(len(offsets), generator=generator)
            within = torch.randint(width, parts.shape, generator=generator)
            # As `.data`: a backward pass may have been promised what stood here.
            offsets.data.copy_(upload(parts * width + within, offsets.device))


def sample(x: Tensor, offsets: Tensor) -> Tensor:
    """Return SAMPLE values of a tensor at random `offsets`; a smaller tensor is repeated."""
    flat = x.detach().reshape(-1)
    count, run, alignment = spacing(flat.numel(), run=SAMPLE // len(offsets))
    copies, left = divmod(SAMPLE, count)
    drawn = offsets.to(flat.device)[: -(-left // run)]
    at = (drawn * (count // alignment) >> FRACTION_BITS) * alignment
    if run > 1:
        neighbours = torch.arange(run, device=at.device)
        at = ((at[:, None] + neighbours) % count).flatten()[:left]
    values = flat.index_select(0, at)
    return torch.cat([flat.repeat(copies), values]) if copies else values


def spacing(count: int, *, run: int) -> tuple[int, int, int]:
    """Return the number of values, the length of a run, and the alignment of its beginning."""
    return count, run, run if count % run == 0 else 1


def take(x: Tensor, into: Tensor, offsets: Tensor) -> None:
    """Copy a sample of `x`; of a tensor without values there is none."""
    if torch.compiler.is_compiling():
        _copy_sample(x, into, offsets)
        return
    # Else the function mode of an emulated region would look at each of these calls.
    with torch._C.DisableTorchFunction():
        _copy_sample(x, into, offsets)


def _copy_sample(x: Tensor, into: Tensor, offsets: Tensor) -> None:
    if x.numel():
        # As `.data`: a module that is called twice has promised this memory to two backward passes.
        into.data.copy_(sample(x, offsets))


def tap(x: Tensor, gradient_into: Tensor, offsets: Tensor) -> Tensor:
    """Return `x`; copy a sample of its gradient in the backward pass.

    Eager code may change `x` in place, so it gets `x` with a hook, which a compiler cannot trace.
    """
    if not torch.compiler.is_compiling():
        x.register_hook(lambda gradient: take(gradient, gradient_into, offsets))
        return x
    # Not as a view: views cannot be changed in place.
    result: Tensor = torch.ops.aten._unsafe_view(_tap(x, gradient_into, offsets), x.shape)
    return result


class _Tap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gradient_into: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(gradient_into, offsets)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        into, offsets = ctx.saved_tensors
        take(gradient, into, offsets)
        return gradient, None, None


_tap: Any = _Tap.apply


if TYPE_CHECKING:
    from narrowcast.kernels.samples import SampleKernel

TAKEN = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""Dtypes that the kernel reads."""


@final
class WeightSamples:
    """The samples of some weights, taken around an update."""

    def __init__(
        self, weights: Sequence[nn.Parameter], offsets: Offsets, *, in_runs: Sequence[bool]
    ) -> None:
        """Take the weights and where to sample them: in runs of neighbours, or single values."""
        self._weights = list(weights)
        self._offsets = [offsets.runs if runs else offsets.single for runs in in_runs]
        device = offsets.single.device
        self.before, self.gradient, self.update = (
            torch.zeros(len(self._weights), SAMPLE, device=device) for _ in range(3)
        )
        self.by_role = {
            "weight": self.before,
            "grad_weight": self.gradient,
            "update": self.update,
        }
        self._kernel = _kernel(self._weights, self._offsets, offsets)

    @torch.no_grad()
    def take(self) -> None:
        """Take samples of weights and gradients; zeros of a gradient that is not there."""
        self._fill(self.before, self._weights)
        self._fill(self.gradient, [weight.grad for weight in self._weights])

    @torch.no_grad()
    def take_updates(self) -> None:
        """Take samples of what an update has changed in the weights as they are kept."""
        self._fill(self.update, self._weights)
        self.update -= self.before

    def _fill(self, rows: Tensor, tensors: Sequence[Tensor | None]) -> None:
        if self._kernel is not None and all(t is None or _is_plain(t) for t in tensors):
            self._kernel(tensors, rows)
            return
        for row, tensor, offsets in zip(rows, tensors, self._offsets, strict=True):
            if tensor is None:
                row.zero_()
            else:
                take(local_part(tensor), row, offsets)  # of a sharded weight this rank's part


def _kernel(
    weights: Sequence[nn.Parameter], taken_at: Sequence[Tensor], offsets: Offsets
) -> "SampleKernel | None":
    if not weights or unsupported_reason(offsets.single.device) or not all(map(_is_plain, weights)):
        return None
    from narrowcast.kernels.samples import SampleKernel

    runs = [SAMPLE // len(at) for at in taken_at]
    spacings = [spacing(w.numel(), run=run) for w, run in zip(weights, runs, strict=True)]
    return SampleKernel(spacings, single=offsets.single, runs=offsets.runs)


def _is_plain(tensor: Tensor) -> bool:
    return (
        tensor.dtype in TAKEN and tensor.numel() > 0 and not is_traceable_wrapper_subclass(tensor)
    )


_AMAX, _OVERFLOW, _UNDERFLOW = map(COLUMNS.index, ("amax", "overflow", "underflow"))


@final
class CastCounts:
    """The rows of a table of statistics whose casts are counted, and where."""

    def __init__(self, model: nn.Module, tensors: Sequence[tuple[str, str, str]]) -> None:
        """Find the counts of tensors, each a module's name, a role and a format."""
        matches = [(i, _history(model, *tensor), tensor[1]) for i, tensor in enumerate(tensors)]
        counted = [(i, history, OPERANDS.index(role)) for i, history, role in matches if history]
        self._whole = next((history.whole for _, history, _ in counted), None)
        if self._whole is not None:
            device = self._whole.counts.device
            self._rows = torch.tensor([i for i, _, _ in counted], device=device)
            self._modules = torch.tensor([h.module for _, h, _ in counted], device=device)
            self._roles = torch.tensor([role for _, _, role in counted], device=device)

    @torch.no_grad()
    def take_into(self, table: Tensor) -> None:
        """Replace numbers of samples by the counts since the last call. Does not synchronise."""
        if self._whole is None:
            return
        counts, peak = self._whole.take_counts()
        looked, saturated, flushed = counts[self._modules, self._roles].float().unbind(1)
        for column, lost in ((_OVERFLOW, saturated), (_UNDERFLOW, flushed)):
            sampled = table[self._rows, column]
            table[self._rows, column] = torch.where(looked > 0, lost / looked, sampled)
        sampled = table[self._rows, _AMAX]
        table[self._rows, _AMAX] = torch.maximum(sampled, peak[self._modules, self._roles])


def _history(model: nn.Module, name: str, role: str, form: str) -> AmaxHistory | None:
    """Return what counts the casts of a tensor to this format, or None."""
    module = model.get_submodule(name)
    history, formats = module.__dict__.get("nc_history"), module.__dict__.get("nc_formats")
    if role not in OPERANDS or not isinstance(history, AmaxHistory):
        return None
    assert isinstance(formats, ProductFormats)
    cast_to = formats.grad_input if role == "grad_output" else formats.forward
    return history if cast_to.name == form else None
