"""Divergence of an output from the target's, mean squared error or KL, without wide temporaries."""

from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from narrowcast.kernels.launch import unsupported_reason

Divergence = Literal["mse", "kl"]

PIECE = 2**24
"""Logits worked on at once without a kernel: 64 MiB in fp32."""


def divergence(output: Tensor, target: Tensor, kind: Divergence) -> Tensor:
    """Return the divergence of `output` from `target` per seed; the target is a constant.

    `output` is (seeds, copies, rows, width) and `target` (seeds, rows, width). The squared error is
    a mean over all numbers; KL(target || output) a sum over the width and a mean over the rows.
    """
    target = target.detach()
    if kind == "mse":
        return _squares(output, target).mean((1, 2, 3))
    function: Any = _KernelKL if _has_kernel(output, target) else _KL
    result: Tensor = function.apply(output, target)
    return result / (output.shape[1] * output.shape[2])


def squared_errors(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean squared error of every copy, (seeds, copies)."""
    return _squares(output, target.detach()).mean((2, 3))


def wide(x: Tensor) -> Tensor:
    """Return `x` in fp32, or wider where it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _squares(output: Tensor, target: Tensor) -> Tensor:
    # torch's own takes one launch each way, and arithmetic by autograd six.
    known = wide(target.unsqueeze(1)).expand_as(output)
    return F.mse_loss(wide(output), known, reduction="none")


def _has_kernel(*tensors: Tensor) -> bool:
    # What is compiled fuses the arithmetic by itself.
    if torch.compiler.is_compiling() or unsupported_reason(tensors[0].device):
        return False
    return all(each.dtype in (torch.float32, torch.bfloat16, torch.float16) for each in tensors)


class _KernelKL(torch.autograd.Function):
    """The sum over rows of KL(softmax(target) || softmax(output)), a kernel each way."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, target: Tensor) -> Tensor:
        from narrowcast.kernels.kl_divergence import kl_rows

        output, target = output.contiguous(), target.contiguous()
        losses, wholes = kl_rows(output, target)
        ctx.save_for_backward(output, target, wholes)
        return losses.sum((1, 2))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        from narrowcast.kernels.kl_divergence import kl_rows_grad

        output, target, wholes = ctx.saved_tensors
        return kl_rows_grad(output, target, wholes, grad_output), None


class _KL(torch.autograd.Function):
    """The same in plain torch, a piece at a time."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, target: Tensor) -> Tensor:
        ctx.save_for_backward(output, target)
        total = wide(torch.zeros_like(output[:, 0, 0, 0]))
        for rows in _pieces(output):
            known = wide(target[:, None, rows]).log_softmax(-1)
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
            grad[:, :, rows] = factor * (made - wide(target[:, None, rows]).softmax(-1))
        return grad, None


def _pieces(output: Tensor) -> Iterator[slice]:
    seeds, copies, rows, width = output.shape
    at_once = rows if torch.compiler.is_compiling() else PIECE // (seeds * copies * width)
    at_once = max(at_once, 1)
    return (slice(start, start + at_once) for start in range(0, rows, at_once))
