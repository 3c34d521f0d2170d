"""How far an output is from the target's: mean squared error, or the divergence of distributions.

Rows of logits are wide, and every term of the loss compares them anew. So the KL divergence keeps
nothing of its forward pass but the two tensors it was given, and works through them in pieces.
"""

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

Divergence = Literal["mse", "kl"]

PIECE = 2**24
"""Logits worked on at once: 64 MiB in fp32, enough to fill a GPU."""


def divergence(output: Tensor, target: Tensor, kind: Divergence) -> Tensor:
    """Return how far `output` is from `target`, one number for every seed.

    `output` is (seeds, copies, rows, width) and `target` (seeds, rows, width). The squared error is
    a mean over all numbers; KL(target || output) a sum over the width and a mean over the rows. The
    target is a constant.
    """
    target = target.detach().unsqueeze(1)
    if kind == "mse":
        return (wide(output) - wide(target)).square().mean((1, 2, 3))
    found: Tensor = _KL.apply(output, target)  # type: ignore[no-untyped-call]
    return found / (output.shape[1] * output.shape[2])


class _KL(torch.autograd.Function):
    """The sum over rows of KL(softmax(target) || softmax(output))."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, target: Tensor) -> Tensor:
        ctx.save_for_backward(output, target)
        total = wide(torch.zeros_like(output[:, 0, 0, 0]))
        for rows in _pieces(output):
            known = wide(target[:, :, rows]).log_softmax(-1)
            made = wide(output[:, :, rows]).log_softmax(-1)
            total = total + (known.exp() * (known - made)).sum((1, 2, 3))
        return total

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        output, target = ctx.saved_tensors
        grad = torch.empty_like(output)
        factor = grad_output[:, None, None, None]
        for rows in _pieces(output):
            made = wide(output[:, :, rows]).softmax(-1)
            grad[:, :, rows] = factor * (made - wide(target[:, :, rows]).softmax(-1))
        return grad, None


def _pieces(output: Tensor) -> Iterator[slice]:
    seeds, copies, rows, width = output.shape
    # What is compiled fuses the arithmetic, and keeps none of it.
    at_once = rows if torch.compiler.is_compiling() else PIECE // (seeds * copies * width)
    at_once = max(at_once, 1)
    return (slice(start, start + at_once) for start in range(0, rows, at_once))


def wide(x: Tensor) -> Tensor:
    """Return `x` in fp32, or wider where it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
