"""The loss of a linear layer over chunks of rows, as autograd sees it.

The forward pass computes the gradients too, while the logits are there; the backward pass only
multiplies them by the gradient that comes in. Kept in between are the gradients of the summed loss:
of order one, not of order 1/M for a mean over M rows, which fp16 could not hold. What divides them
stays on the device and is applied in fp32.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from narrowcast.errors import UnsupportedError
from narrowcast.precision.fused.chunked_pass import chunked_pass, lift


@dataclass(frozen=True)
class LossTerms:
    """What a row's loss is made of, how rows are put together, and how many go at once."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    reduction: str
    chunk_rows: int | None


def chunked_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    terms: LossTerms,
    dtype: torch.dtype,
) -> Tensor:
    """Return the loss of (rows, width) states, with products of operands in `dtype`.

    Where nothing needs a gradient none is computed. Gradients have the dtypes autograd expects.
    """
    grads = torch.is_grad_enabled()
    needs = tuple(grads and t is not None and t.requires_grad for t in (hidden, weight, bias))
    if not any(needs):
        losses, *_ = _pass(hidden, weight, bias, targets, None, terms, dtype, needs)
        return reduced(losses, targets, terms)
    function: Any = _RowLosses if terms.reduction == "none" else _TotalLoss
    loss: Tensor = function.apply(hidden, weight, bias, targets, terms, dtype, needs)
    return loss


def reduced(losses: Tensor, targets: Tensor, terms: LossTerms) -> Tensor:
    """Put rows' losses together; a mean is over the rows that are not ignored."""
    match terms.reduction:
        case "none":
            return losses
        case "sum":
            return losses.sum()
        case _:
            return losses.sum() / (targets != terms.ignore_index).sum()


class _TotalLoss(torch.autograd.Function):
    """A sum or mean, whose gradients are computed beside it, but for one factor."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        terms: LossTerms,
        dtype: torch.dtype,
        needs: tuple[bool, ...],
    ) -> Tensor:
        losses, *grads = _pass(hidden, weight, bias, targets, None, terms, dtype, needs)
        divisor = torch.full_like(losses[0], lift(dtype))
        if terms.reduction == "mean":
            # Where every row is ignored the loss is 0/0, and torch's gradients are zero.
            divisor = divisor * (targets != terms.ignore_index).sum().clamp(min=1)
        ctx.save_for_backward(*grads, divisor)
        ctx.dtypes, ctx.needs = grad_dtypes(hidden, weight, bias), needs
        return reduced(losses, targets, terms)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        check_first_derivative_only()
        *grads, divisor = ctx.saved_tensors
        factor = grad_output.float() / divisor
        return (*scaled(grads, factor, ctx), None, None, None, None)


class _RowLosses(torch.autograd.Function):
    """Losses of single rows: only the backward pass knows what each row's gradient weighs."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        terms: LossTerms,
        dtype: torch.dtype,
        needs: tuple[bool, ...],
    ) -> Tensor:
        losses, *_ = _pass(hidden, weight, bias, targets, None, terms, dtype, (False,) * 3)
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.terms, ctx.dtype = terms, dtype
        ctx.dtypes, ctx.needs = grad_dtypes(hidden, weight, bias), needs
        return losses

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        check_first_derivative_only()
        hidden, weight, bias, targets = ctx.saved_tensors
        # The largest weighs one, by a power of two: fp16 holds rows that a loss scale has lifted,
        # and those that it has not.
        largest = grad_output.float().abs().amax().clamp(min=2.0**-100)
        inverse = torch.exp2(-torch.ceil(torch.log2(largest)))
        factors = grad_output.float() * inverse
        _, *grads = _pass(hidden, weight, bias, targets, factors, ctx.terms, ctx.dtype, ctx.needs)
        factor = 1 / (inverse * lift(ctx.dtype))
        return (*scaled(grads, factor, ctx), None, None, None, None)


def check_first_derivative_only() -> None:
    """Refuse a backward pass that is to be differentiated again."""
    # Autograd itself would take these gradients for constants, and say nothing. A compiled backward
    # pass refuses by itself.
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise UnsupportedError(
            "linear_cross_entropy with chunk_rows has no second derivative, but create_graph=True "
            "needs one. Write F.cross_entropy(head(hidden).float(), targets)."
        )


def grad_dtypes(*tensors: Tensor | None) -> tuple[torch.dtype | None, ...]:
    """Return the dtype in which autograd takes each tensor's gradient."""
    # The compiler cannot trace `grad_dtype`; its gradients have the dtype of the weight anyway.
    requested = not torch.compiler.is_compiling()
    return tuple(
        None if t is None else (t.grad_dtype if requested and t.is_leaf else None) or t.dtype
        for t in tensors
    )


def scaled(grads: list[Tensor], factor: Tensor, ctx: Any) -> list[Tensor | None]:
    """Return fp32 gradients times a factor: in place where dtype and graph let it be."""
    compiling = torch.compiler.is_compiling()
    # Whether this pass may come again, as AOTAutograd itself asks it.
    again = compiling or torch._C._autograd._get_current_graph_task_keep_graph()
    matches: list[Tensor | None] = []
    for grad, dtype, needed in zip(grads, ctx.dtypes, ctx.needs, strict=True):
        if not needed:
            matches.append(None)
        elif compiling:
            matches.append((grad * factor).to(dtype))
        else:
            out = torch.empty_like(grad, dtype=dtype) if again or dtype != grad.dtype else grad
            matches.append(torch.mul(grad, factor, out=out))
    return matches


def _pass(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    factors: Tensor | None,
    terms: LossTerms,
    dtype: torch.dtype,
    needs: tuple[bool, ...],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    result: tuple[Tensor, Tensor, Tensor, Tensor] = chunked_pass(
        hidden,
        weight,
        bias,
        targets,
        factors,
        dtype,
        list(needs),
        terms.ignore_index,
        terms.label_smoothing,
        terms.z_loss,
        terms.chunk_rows,
    )
    return result
