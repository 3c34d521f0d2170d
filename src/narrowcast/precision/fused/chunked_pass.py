"""A linear layer and its cross-entropy over chunks of rows: a registered op, and its autograd.

The forward pass computes the gradients too: logits of a chunk are replaced by their gradient in
place and multiplied into the fp32 gradients of input and weight. Each chunk after the first reads
and writes the weight's gradient, 8KV bytes for K numbers and V columns, so chunks are few and
large.

A vocabulary that is no multiple of 8, such as GPT-2's 50257, is padded with columns of zeros: a
matrix product over 50257 numbers cannot read them in words of 16 bytes.

Stored gradients are those of the summed loss: of order one, not of order 1/M for a mean over M
rows, which fp16 could not hold. The divisor stays on the device and is applied in fp32.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from narrowcast.errors import UnsupportedError

CHUNK_BYTES = 400 * 2**20
"""The most a chunk of logits takes: 4096 rows of 50304 in 16 bits keep a GPU busy for long."""
_ALIGNED = 64
"""Rows of logits begin at multiples of so many elements: tensor cores want 16 bytes, caches 128."""
_WORD = 8
"""Elements of 16 bits that tensor cores read at once."""
_FP16_LIFT = 2.0**12


def lift(dtype: torch.dtype) -> float:
    """Return the power of two on all gradients of a pass.

    With 2¹², gradients of logits keep their digits in fp16 from 2⁻²⁶ up, and fit up to 15.
    """
    return _FP16_LIFT if dtype == torch.float16 else 1.0


def filled_columns(columns: int) -> int:
    """Return how many columns are multiplied: more where products of so few would be slow."""
    return columns + (-columns % _ALIGNED if columns % _WORD else 0)


def even_chunks(rows: int, columns: int, dtype: torch.dtype) -> int:
    """Return how many rows go at once: as few chunks as fit, of about one size."""
    chunks = -(-rows * columns * dtype.itemsize // CHUNK_BYTES)
    even = -(-rows // chunks)
    return even + -even % 128  # whole tiles of a matrix product


@torch.library.custom_op("narrowcast::linear_cross_entropy", mutates_args=())
def chunked_pass(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    factors: Tensor | None,
    dtype: torch.dtype,
    needs: list[bool],
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    chunk_rows: int | None,
    statistics: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return each row's loss, and the fp32 gradients of their sum that `needs` lists, or empty.

    Gradients of a row are multiplied by its factor, and all by `lift(dtype)`. The last result is
    the entropies of the rows, and where the target has the largest logit, if requested.
    """
    from narrowcast.kernels.cross_entropy import cross_entropy_

    rows, columns = hidden.shape[0], weight.shape[0]
    filled = filled_columns(columns)
    losses, *grads, statistics_rows = _results(hidden, weight, needs, statistics, filled=filled)
    chunk = chunk_rows or even_chunks(rows, filled, dtype)
    # Autocast would cast again what is cast here.
    with torch.autocast(hidden.device.type, enabled=False):
        narrow_weight = _filled_up(weight, filled, dtype)
        narrow_bias = None if bias is None else _filled_up(bias, filled, dtype)
        space = hidden.new_empty((min(chunk, rows), filled + -filled % _ALIGNED), dtype=dtype)
        for first in range(0, rows, chunk):
            part = slice(first, min(first + chunk, rows))
            x = hidden[part].to(dtype)
            logits = _logits(x, narrow_weight, narrow_bias, out=space[: len(x), :filled])
            losses[part] = cross_entropy_(
                logits[:, :columns],
                targets[part],
                ignore_index=ignore_index,
                label_smoothing=label_smoothing,
                z_loss=z_loss,
                gradient=any(needs),
                lift=lift(dtype),
                factors=None if factors is None else factors[part],
                statistics=statistics_rows[:, part] if statistics else None,
            )
            if filled != columns:  # of a row that is ignored, infinite states would be NaN there
                logits[:, columns:] = 0
            if needs[0]:
                _product_into(grads[0][part], logits, narrow_weight, add=False)
            if needs[1]:
                _product_into(grads[1], logits.t(), x, add=first > 0)
            if needs[2]:
                grads[2] += logits.sum(0, dtype=torch.float32)
    return losses, grads[0], grads[1][:columns], grads[2][:columns], statistics_rows


@chunked_pass.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    factors: Tensor | None,
    dtype: torch.dtype,
    needs: list[bool],
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    chunk_rows: int | None,
    statistics: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _results(hidden, weight, needs, statistics, filled=weight.shape[0])


def _results(
    hidden: Tensor, weight: Tensor, needs: list[bool], statistics: bool, *, filled: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    def fp32(*shape: int) -> Tensor:
        return hidden.new_empty(shape, dtype=torch.float32)

    return (
        fp32(hidden.shape[0]),
        fp32(*hidden.shape) if needs[0] else fp32(0),
        fp32(filled, weight.shape[1]) if needs[1] else fp32(0),
        fp32(filled).zero_() if needs[2] else fp32(0),
        fp32(2, hidden.shape[0]) if statistics else fp32(0),
    )


def _filled_up(inputs: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Return a weight or a bias in a format, with zeros after its own rows."""
    if inputs.shape[0] == count:
        return inputs.to(dtype)
    whole = inputs.new_empty((count, *inputs.shape[1:]), dtype=dtype)
    whole[: inputs.shape[0]] = inputs
    whole[inputs.shape[0] :] = 0
    return whole


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None, *, out: Tensor) -> Tensor:
    if x.device.type == "cpu" and x.dtype != torch.float32:
        # Not every CPU multiplies 16 bits (docs/decisions/0005); the bias is added before rounding.
        wide = x.float() @ weight.float().t()
        return out.copy_(wide if bias is None else wide + bias.float())
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


def _product_into(out: Tensor, left: Tensor, right: Tensor, *, add: bool) -> None:
    """Write or add left · right into fp32, summed in fp32."""
    beta = 1 if add else 0
    if left.dtype == torch.float32:
        torch.addmm(out, left, right, beta=beta, out=out)
    elif left.device.type == "cuda":
        torch.ops.aten.addmm.dtype_out(out, left, right, torch.float32, beta=beta, out=out)
    else:
        torch.addmm(out, left.float(), right.float(), beta=beta, out=out)


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
    """Return the loss of (rows, width) states, with products of operands in `dtype`."""
    grads = torch.is_grad_enabled()
    needs = tuple(grads and t is not None and t.requires_grad for t in (hidden, weight, bias))
    if not any(needs):
        losses = _pass(hidden, weight, bias, targets, None, terms, dtype, needs)[0]
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
        losses, *grads, _ = _pass(hidden, weight, bias, targets, None, terms, dtype, needs)
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
    """Losses of single rows: only the backward pass knows what each row's gradient weighs.

    With a frozen head that factor only scales rows of the gradient, so one pass computes both.
    """

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
        ctx.is_head_frozen = needs == (True, False, False)
        now = needs if ctx.is_head_frozen else (False,) * 3
        losses, grad, *_ = _pass(hidden, weight, bias, targets, None, terms, dtype, now)
        if ctx.is_head_frozen:
            ctx.save_for_backward(grad)
        else:
            ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.terms, ctx.dtype = terms, dtype
        ctx.dtypes, ctx.needs = grad_dtypes(hidden, weight, bias), needs
        return losses

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        check_first_derivative_only()
        if ctx.is_head_frozen:
            factor = grad_output.float().unsqueeze(-1) / lift(ctx.dtype)
            return (*scaled([*ctx.saved_tensors] * 3, factor, ctx), None, None, None, None)
        hidden, weight, bias, targets = ctx.saved_tensors
        # The largest weighs one, by a power of two: fp16 holds rows that a loss scale has lifted,
        # and those that it has not.
        largest = grad_output.float().abs().amax().clamp(min=2.0**-100)
        inverse = torch.exp2(-torch.ceil(torch.log2(largest)))
        factors = grad_output.float() * inverse
        terms, dtype, needs = ctx.terms, ctx.dtype, ctx.needs
        _, *grads, _ = _pass(hidden, weight, bias, targets, factors, terms, dtype, needs)
        factor = 1 / (inverse * lift(ctx.dtype))
        return (*scaled(grads, factor, ctx), None, None, None, None)


def chunked_log_probs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities of targets whose gradients will be equal, entropies and top-1.

    Gradients are computed beside the log-probabilities, for their sum. If those that come back are
    not all equal, the gradients are NaN. Entropies and top-1 have none.
    """
    grads = torch.is_grad_enabled()
    needs = tuple(grads and t is not None and t.requires_grad for t in (hidden, weight, bias))
    function: Any = _EqualLogProbs
    result: tuple[Tensor, Tensor, Tensor] = function.apply(
        hidden, weight, bias, targets, dtype, needs
    )
    return result


class _EqualLogProbs(torch.autograd.Function):
    """Log-probabilities that count alike, as in the mean over all tokens."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        dtype: torch.dtype,
        needs: tuple[bool, ...],
    ) -> tuple[Tensor, Tensor, Tensor]:
        terms = LossTerms(-100, 0.0, 0.0, "sum", None)
        losses, *grads, (entropies, firsts) = _pass(
            hidden, weight, bias, targets, None, terms, dtype, needs, statistics=True
        )
        ctx.save_for_backward(*grads)
        ctx.dtypes, ctx.needs, ctx.lift = grad_dtypes(hidden, weight, bias), needs, lift(dtype)
        is_top1 = firsts > 0
        ctx.mark_non_differentiable(entropies, is_top1)
        return -losses, entropies, is_top1

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        check_first_derivative_only()
        first = grad_output[0].float()
        equal = (grad_output == first).all()
        factor = torch.where(equal, first, torch.nan) / -ctx.lift
        return (*scaled(list(ctx.saved_tensors), factor, ctx), None, None, None)


def check_first_derivative_only() -> None:
    """Raise if a backward pass is to be differentiated again."""
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
    *,
    statistics: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    result: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] = chunked_pass(
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
        statistics,
    )
    return result
