"""Samples of tensors, taken where they pass through a model, forward and backward.

A sample is 4,096 values at random positions, one in each of as many equal parts of the tensor.
Every value is equally likely to be in it, whatever the shape: at positions a fixed distance apart,
every row of a batch would show the same few tokens. Plain torch operations copy it into memory of
its own, so a compiler joins them with what makes the tensor, and a captured step keeps them.
Nothing is changed on the way, and nothing is kept for the backward pass.
"""

from typing import Any, final

import torch
from torch import Tensor

from narrowcast.health.statistics.statistics import RUN
from narrowcast.kernels.tables import upload

SAMPLE = 4096
"""Values of a sample: a share of one part in a thousand is seen, and what is rarer may not be."""
FRACTION_BITS = 31
"""Bits of a random offset, so that its product with a number of elements is an int64."""


@final
class Offsets:
    """Random offsets into tensors, as fractions of their length, in units of 2**-31.

    Held on the device and written in place: what is compiled or captured reads those of now.
    """

    def __init__(self, device: torch.device, *, seed: int = 0) -> None:
        self._seed = seed
        self.single, self.runs = (
            torch.zeros(SAMPLE // run, dtype=torch.int64, device=device) for run in (1, RUN)
        )
        """For single values, and for runs of neighbours, as blocks that share a scale."""
        self.draw(0)

    def draw(self, step: int) -> None:
        """Draw the offsets of a step's reading, which depend on nothing but the seed and the step.

        Waits for nothing.
        """
        generator = torch.Generator().manual_seed((self._seed * 1_000_003 + step) % 2**63)
        for offsets in (self.single, self.runs):
            width = 2**FRACTION_BITS // len(offsets)
            # In no order: where only some are needed, those are of any part of a tensor.
            parts = torch.randperm(len(offsets), generator=generator)
            within = torch.randint(width, parts.shape, generator=generator)
            # As `.data`: a backward pass may have been promised what stood here.
            offsets.data.copy_(upload(parts * width + within, offsets.device))


def sample(x: Tensor, offsets: Tensor) -> Tensor:
    """Return SAMPLE values of a tensor, at random `offsets`, single or in runs of neighbours.

    A smaller tensor is there as often as it fits, and what is left is filled at random.
    """
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
    """Return, of so many values: their number, how many lie together, and where runs may begin.

    Runs begin at multiples of their length, as blocks do, unless the tensor has a part of one.
    """
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

    Eager code may go on to change `x` in place, so it gets `x` itself and a hook on it. A compiler
    traces no such hook, and knows by itself what is changed in place.
    """
    if not torch.compiler.is_compiling():
        x.register_hook(lambda gradient: take(gradient, gradient_into, offsets))
        return x
    # As no view, which nobody may change in place.
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
