"""Linear layers whose products run on fp8 tensor cores, with one scale a matrix.

The weight is kept in fp8 as well, in both layouts, and made anew only when it changes: once a step,
whatever the number of micro-batches. An input is read once to be quantised for the output and,
transposed, for the gradient of the weight; only the latter is kept for the backward pass. The
gradient of the output is read once for both backward products.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from narrowcast.kernels.fp8 import (
    LocallyQuantized,
    Quantized,
    is_trusted,
    quantize,
    quantize_into,
)
from narrowcast.numerics import BF16, BlockFormat, Format
from narrowcast.precision.fp8.delayed import AmaxHistory
from narrowcast.precision.products.operands import ProductFormats, is_narrow

Scale = tuple[Tensor | None, Tensor | None]
"""The inverse scale to use and where to note the largest magnitude; none: of the matrix itself."""


class Fp8Linear(nn.Linear):
    """A linear layer with native fp8 products, forward and backward."""

    nc_formats: ProductFormats
    nc_history: AmaxHistory | None
    nc_weight: Quantized | None = None
    """The weight in fp8."""
    nc_weight_is_of: tuple[int, int, int, bool] | None = None
    """Which weight, which version of it, the scales of which step it was made from, and whether to
    train: between training and evaluation weights may be exchanged through `.data`, uncounted."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's own name
        """Multiply in this layer's formats; returns the output format's dtype."""
        if not torch.compiler.is_compiling():
            self.nc_refresh()
        rows = input.reshape(-1, input.shape[-1])
        output = fp8_product(rows, self, *self.nc_scales())
        return output.view(*input.shape[:-1], self.out_features)

    def nc_scales(self) -> tuple[Scale, Scale]:
        """Return the scales of the input and of the gradient of the output."""
        history = self.nc_history
        if history is None:
            return (None, None), (None, None)
        of_input: Scale = history.inverse("input"), history.notes("input")
        known = torch.compiler.is_compiling() or is_trusted(history.inverse("input"))
        if of_input[1] is None and not known:
            of_input = None, None  # an evaluation before the first step decides nothing for it
        return of_input, (history.inverse("grad_output"), history.notes("grad_output"))

    def nc_refresh(self) -> None:
        """Make the weight in fp8 anew if it has changed.

        In eager mode every call asks; before a compiled forward pass `compute()` does.
        """
        weight = self.weight.detach()
        # A weight that never moves has its scale once and for all.
        history = self.nc_history if self.weight.requires_grad else None
        moves = 0 if history is None else history.moves
        now = (weight.data_ptr(), self.weight._version, moves, self.training)
        if now == self.nc_weight_is_of:
            return
        with torch.inference_mode(mode=False), torch.no_grad():  # kept for training too
            self._nc_make(weight, history)
        let_autograd_know(self.nc_weight, self.nc_weight_is_of, now)
        self.nc_weight_is_of = now

    def _nc_make(self, weight: Tensor, history: AmaxHistory | None) -> None:
        inverse = None if history is None else history.inverse("weight")
        notes = None if history is None else history.notes("weight")
        made, shared = self.nc_weight, self.nc_history and self.nc_history.inverse("weight")
        # Frozen or thawed on the way: its scale is another one from now on.
        if made is None or (made.inverse is shared) != (history is not None):
            both = is_narrow(self.nc_formats.grad_input.name)
            target = dtype_of(self.nc_formats.forward)
            self.nc_weight = quantize(weight, target, inverse=inverse, notes=notes, columns=both)
        else:
            # In the same memory: a captured step reads from there.
            quantize_into(made, weight, notes=notes, by_itself=history is None)

    def extra_repr(self) -> str:
        """Say the formats where the model is printed."""
        f = self.nc_formats
        return (
            f"{super().extra_repr()}, forward={f.forward.name}, grad_input={f.grad_input.name}, "
            f"grad_weight={f.grad_weight.name}, scaling={f.scaling}, native"
        )


def fp8_product(rows: Tensor, layer: Fp8Linear, x_scale: Scale, grad_scale: Scale) -> Tensor:
    """Return a matrix times the layer's weight, with its gradients in the layer's formats."""
    made = layer.nc_weight
    assert made is not None, "the weight was never quantised; call the model inside compute()"
    result: Tensor = _apply(
        rows, layer.weight, layer.bias, *made, *x_scale, *grad_scale, layer.nc_formats
    )
    return result


def let_autograd_know(
    made: Quantized | LocallyQuantized | None, before: tuple[Any, ...] | None, now: tuple[Any, ...]
) -> None:
    """Let a backward pass that has kept an fp8 weight fail, as any would, if it became another."""
    if made is not None and before is not None and before[:-1] != now[:-1]:
        torch.autograd.graph.increment_version([made.rows, made.columns])


class _Fp8Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        weight_rows: Tensor,
        weight_columns: Tensor,
        weight_inverse: Tensor,
        x_inverse: Tensor | None,
        x_notes: Tensor | None,
        grad_inverse: Tensor | None,
        grad_notes: Tensor | None,
        formats: ProductFormats,
    ) -> Tensor:
        narrow_x = is_narrow(formats.grad_weight.name)
        found = quantize(
            x, dtype_of(formats.forward), inverse=x_inverse, notes=x_notes, columns=narrow_x
        )
        output = product(
            found.rows,
            weight_rows,
            (found.inverse, weight_inverse),
            dtype=dtype_of(formats.output),
            fast=formats.fast,
        )[: x.shape[0]]
        if bias is not None:
            output = output + bias.to(output.dtype)
        narrow_weight = is_narrow(formats.grad_input.name)
        ctx.save_for_backward(
            found.columns if narrow_x else x,
            found.inverse,
            weight_columns if narrow_weight else weight,
            weight_inverse,
            grad_inverse,
            grad_notes,
        )
        ctx.formats, ctx.bias_dtype = formats, None if bias is None else bias.dtype
        ctx.x_dtype, ctx.weight_dtype = x.dtype, weight.dtype
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        formats: ProductFormats = ctx.formats
        x, x_inverse, weight, weight_inverse, inverse, notes = ctx.saved_tensors
        to_input, to_weight = formats.grad_input, formats.grad_weight
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        both = to_input == to_weight and is_narrow(to_input.name)
        grad_x = grad_weight = grad_bias = None
        found = None
        if is_narrow(to_input.name):
            found = quantize(
                grad,
                dtype_of(to_input),
                inverse=inverse,
                notes=notes,
                rows=needs_x,
                columns=both and needs_weight,
            )
        if needs_x:
            if found is None:
                grad_x = grad.to(BF16.dtype) @ weight.to(BF16.dtype)
            else:
                scales = (found.inverse, weight_inverse)
                grad_x = product(found.rows, weight, scales, dtype=dtype_of(formats.output))
            grad_x = grad_x[: grad.shape[0]].to(ctx.x_dtype)
        if needs_weight and not is_narrow(to_weight.name):
            grad_weight = grad.to(BF16.dtype).t() @ x.to(BF16.dtype)
        elif needs_weight:
            if not both or found is None:
                # The scale from the past is for the other product's format.
                found = quantize(grad, dtype_of(to_weight), rows=False)
            scales = (found.inverse, x_inverse)
            grad_weight = product(found.columns, x, scales, dtype=ctx.weight_dtype)
        if ctx.bias_dtype is not None and ctx.needs_input_grad[2]:
            grad_bias = grad.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias, *[None] * 8


_apply: Any = _Fp8Product.apply


def product(
    left: Tensor,
    right: Tensor,
    inverses: tuple[Tensor, Tensor],
    *,
    dtype: torch.dtype,
    fast: bool = False,
) -> Tensor:
    """Return left · rightᵀ, both laid out along the dimension that is summed.

    `fast` sums keep 14 bits on Hopper; without it, partial sums are added up in fp32.
    """
    out_dtype = BF16.dtype if dtype not in (torch.float32, torch.float16) else dtype
    if left.shape[1] == 0:  # of a batch without rows; torch's CPU leaves the result unwritten
        return left.new_zeros((left.shape[0], right.shape[0]), dtype=out_dtype)
    return torch._scaled_mm(
        left,
        right.t(),
        scale_a=inverses[0],
        scale_b=inverses[1],
        out_dtype=out_dtype,
        use_fast_accum=fast,
    )


def dtype_of(target: Format | BlockFormat) -> torch.dtype:
    """Return the dtype of a format that has one."""
    assert isinstance(target, Format)
    assert target.dtype is not None
    return target.dtype
