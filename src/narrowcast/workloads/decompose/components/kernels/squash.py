"""Importances for masks and for losses from their logits, the leaky hard ones, in one launch.

By torch it takes seven, and sixteen back: more than all the products of a small site. What is not a
number stays none, forward and back.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowcast.kernels.launch import launch_kernel

_BLOCK = 1024


def squash(logits: Tensor, leak: float) -> tuple[Tensor, Tensor]:
    """Return the lower and the upper importances of contiguous `logits`, in their format."""
    low, up = torch.empty_like(logits), torch.empty_like(logits)
    size = logits.numel()
    launch_kernel(
        _forward,
        (triton.cdiv(size, _BLOCK),),
        logits,
        low,
        up,
        size,
        leak,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return low, up


def squash_back(
    logits: Tensor, grad_low: Tensor | None, grad_up: Tensor | None, leak: float
) -> Tensor:
    """Return the gradient of the logits; of a result without one there is nothing to read."""
    grad = torch.empty_like(logits)
    size = logits.numel()
    launch_kernel(
        _back,
        (triton.cdiv(size, _BLOCK),),
        logits,
        logits if grad_low is None else grad_low,
        logits if grad_up is None else grad_up,
        grad,
        size,
        leak,
        LOW=grad_low is not None,
        UP=grad_up is not None,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return grad


@triton.jit
def _forward(logits, low, up, size, leak, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < size
    z = tl.load(logits + at, mask=here, other=0.0).to(tl.float32)
    within = tl.where(z <= 0.0, 0.0, tl.where(z > 1.0, 1.0, z))
    tl.store(low + at, within.to(low.dtype.element_ty), mask=here)
    above = tl.where(z > 1.0, 1.0 + leak * (z - 1.0), within)
    tl.store(up + at, above.to(up.dtype.element_ty), mask=here)


@triton.jit
def _back(
    logits, grad_low, grad_up, grad, size, leak,
    LOW: tl.constexpr, UP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < size
    z = tl.load(logits + at, mask=here, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    if LOW:
        inputs = tl.load(grad_low + at, mask=here, other=0.0).to(tl.float32)
        below = leak * tl.where(inputs > 0.0, 0.0, inputs)
        total += tl.where(z <= 0.0, below, tl.where(z > 1.0, 0.0, inputs))
    if UP:
        inputs = tl.load(grad_up + at, mask=here, other=0.0).to(tl.float32)
        total += tl.where(z > 1.0, leak * inputs, tl.where(z < 0.0, 0.0, inputs))
    tl.store(grad + at, total.to(grad.dtype.element_ty), mask=here)
