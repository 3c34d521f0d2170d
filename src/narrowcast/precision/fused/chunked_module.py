"""The loss of a linear layer that makes its products itself, over chunks of rows.

The layer is called for one chunk at a time, and gone back through at once, with the gradient that
the kernel has written over its logits: never more than a chunk of these is held. Every chunk is a
call of its own, so what the layer does once a call, such as finding a scale, it does for a chunk.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from narrowcast.precision.fused.chunked_loss import (
    LossTerms,
    check_first_derivative_only,
    grad_dtypes,
    reduced,
    scaled,
)
from narrowcast.precision.fused.chunked_pass import even_chunks


def chunked_module_loss(
    hidden: Tensor, head: nn.Linear, targets: Tensor, *, terms: LossTerms
) -> Tensor:
    """Return the loss of (rows, width) states, with what `head` computes of each chunk.

    Gradients are for a sum or mean. The head's logits are bf16 or fp32: there is no lift for fp16.
    """
    grads = torch.is_grad_enabled()
    tensors = (hidden, head.weight, head.bias)
    needs = tuple(grads and t is not None and t.requires_grad for t in tensors)
    if any(needs):
        assert terms.reduction != "none"
        loss: Tensor = _apply(*tensors, targets, head, terms, needs)
        return loss
    losses = []
    for part in _parts(hidden, head, terms):
        losses.append(_row_losses(head(hidden[part]), targets[part], terms, gradient=False))
    return reduced(torch.cat(losses), targets, terms)


def _parts(hidden: Tensor, head: nn.Linear, terms: LossTerms) -> list[slice]:
    rows = len(hidden)
    chunk = terms.chunk_rows or even_chunks(rows, head.out_features, torch.bfloat16)
    return [slice(first, min(first + chunk, rows)) for first in range(0, rows, chunk)]


def _row_losses(logits: Tensor, targets: Tensor, terms: LossTerms, *, gradient: bool) -> Tensor:
    from narrowcast.kernels.cross_entropy import cross_entropy_

    return cross_entropy_(
        logits,
        targets,
        ignore_index=terms.ignore_index,
        label_smoothing=terms.label_smoothing,
        z_loss=terms.z_loss,
        gradient=gradient,
    )


class _ModuleLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        head: nn.Linear,
        terms: LossTerms,
        needs: tuple[bool, ...],
    ) -> Tensor:
        losses, total = [], _Gradients(hidden, weight, bias, needs)
        for part in _parts(hidden, head, terms):
            x = hidden[part].detach().requires_grad_(needs[0])
            # Hooks of activation checkpointing would run all of this again to go back through it.
            with torch.enable_grad(), saved_tensors_hooks(_as_it_is, _as_it_is):
                logits = head(x)
            # The same memory, uncounted: a product keeps its operands, not its result.
            grad = logits.data
            losses.append(_row_losses(grad, targets[part], terms, gradient=True))
            total.add(part, logits, x, grad)
            del logits, grad  # before the next chunk's
        divisor = torch.ones_like(losses[0][0])
        if terms.reduction == "mean":
            divisor = divisor * (targets != terms.ignore_index).sum().clamp(min=1)
        ctx.save_for_backward(*total.sums, divisor)
        ctx.dtypes, ctx.needs = total.dtypes, needs
        return reduced(torch.cat(losses), targets, terms)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        check_first_derivative_only()
        *grads, divisor = ctx.saved_tensors
        return (*scaled(grads, grad_output.float() / divisor, ctx), None, None, None, None)


_apply: Any = _ModuleLoss.apply


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


class _Gradients:
    """The gradients of the summed loss, in fp32, as chunks come in."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: tuple[bool, ...]
    ) -> None:
        self._needs, self._parameters = needs, (weight, bias)
        self.sums = [
            hidden.new_empty(t.shape if needed and t is not None else 0, dtype=torch.float32)
            for t, needed in zip((hidden, weight, bias), needs, strict=True)
        ]
        self.dtypes = grad_dtypes(hidden, weight, bias)

    def add(self, part: slice, logits: Tensor, x: Tensor, grad: Tensor) -> None:
        """Go back through one chunk."""
        tensors = zip((x, *self._parameters), self._needs, strict=True)
        inputs = [t for t, needed in tensors if needed and t is not None]
        result = iter(torch.autograd.grad(logits, inputs, grad))
        if self._needs[0]:
            self.sums[0][part] = next(result)
        for total, needed in zip(self.sums[1:], self._needs[1:], strict=True):
            if needed:
                fresh = next(result)
                total.copy_(fresh) if part.start == 0 else total.add_(fresh)
