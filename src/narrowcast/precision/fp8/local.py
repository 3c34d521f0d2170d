"""Linear layers whose products run on fp8 tensor cores, with scales of the values at hand.

A scale belongs to a row, or to a block of 128, along the dimension that is summed: an outlier
spoils its line and nothing else, and nothing has to be remembered. As it is and transposed a matrix
has scales, and so codes, of its own. The weight is kept in fp8 in both layouts and made anew only
when it changes; an input is read once for both of its products, and so is a gradient.
"""

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from narrowcast.kernels.fp8 import LocallyQuantized
from narrowcast.numerics import BF16
from narrowcast.precision.fp8.tensorwise import dtype_of, let_autograd_know
from narrowcast.precision.products.operands import ProductFormats, is_narrow


class LocalScales(Protocol):
    """How values share scales, and how matrices with such scales are multiplied."""

    def quantize(
        self, x: Tensor, target: torch.dtype, *, rows: bool = True, columns: bool = True
    ) -> LocallyQuantized:
        """Return an input or a gradient in fp8; an unwanted layout is empty."""

    def quantize_weight(
        self, weight: Tensor, target: torch.dtype, *, columns: bool
    ) -> LocallyQuantized:
        """Return a weight in fp8."""

    def product(
        self,
        left: Tensor,
        right: Tensor,
        inverses: tuple[Tensor, Tensor],
        *,
        by_weight: bool,
        fast: bool = False,
    ) -> Tensor:
        """Return left · rightᵀ in bf16, of matrices with rows; `by_weight`: the right is one."""


class Fp8LocalLinear(nn.Linear):
    """A linear layer with native fp8 products and local scales, forward and backward."""

    nc_formats: ProductFormats
    nc_local: LocalScales
    """Of the class."""
    nc_weight: LocallyQuantized | None = None
    """The weight in fp8."""
    nc_weight_is_of: tuple[int, int, bool] | None = None
    """Which weight, which version of it, and whether to train, as in `Fp8Linear`."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's own name
        """Multiply in this layer's formats; returns the output format's dtype."""
        if not torch.compiler.is_compiling():
            self.nc_refresh()
        made = self.nc_weight
        assert made is not None, "the weight was never quantised; call the model inside compute()"
        rows = input.reshape(-1, input.shape[-1])
        output: Tensor = _apply(rows, self.weight, self.bias, *made, self.nc_formats, self.nc_local)
        return output.view(*input.shape[:-1], self.out_features)

    def nc_refresh(self) -> None:
        """Make the weight in fp8 anew if it has changed."""
        now = (self.weight.data_ptr(), self.weight._version, self.training)
        if now == self.nc_weight_is_of:
            return
        with torch.inference_mode(mode=False), torch.no_grad():  # kept for training too
            self._nc_make()
        let_autograd_know(self.nc_weight, self.nc_weight_is_of, now)
        self.nc_weight_is_of = now

    def _nc_make(self) -> None:
        fresh = self.nc_local.quantize_weight(
            self.weight.detach(),
            dtype_of(self.nc_formats.forward),
            columns=is_narrow(self.nc_formats.grad_input.name),
        )
        if self.nc_weight is None:
            self.nc_weight = fresh
        else:  # in the same memory: a captured step reads from there
            for kept, new in zip(self.nc_weight, fresh, strict=True):
                kept.data.copy_(new)

    def extra_repr(self) -> str:
        """Say the formats where the model is printed."""
        f = self.nc_formats
        return (
            f"{super().extra_repr()}, forward={f.forward.name}, grad_input={f.grad_input.name}, "
            f"grad_weight={f.grad_weight.name}, scaling={f.scaling}, native"
        )


class _Fp8Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        weight_rows: Tensor,
        weight_columns: Tensor,
        rows_inverse: Tensor,
        columns_inverse: Tensor,
        formats: ProductFormats,
        local: LocalScales,
    ) -> Tensor:
        narrow_x = is_narrow(formats.grad_weight.name)
        found = local.quantize(x, dtype_of(formats.forward), columns=narrow_x)
        scales = (found.rows_inverse, rows_inverse)
        output = _product(
            local, found.rows, weight_rows, scales, by_weight=True, fast=formats.fast
        )[: x.shape[0]]
        if bias is not None:
            output = output + bias.to(output.dtype)
        narrow_weight = is_narrow(formats.grad_input.name)
        ctx.save_for_backward(
            found.columns if narrow_x else x,
            found.columns_inverse,
            weight_columns if narrow_weight else weight,
            columns_inverse,
        )
        ctx.formats, ctx.local = formats, local
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.x_dtype, ctx.weight_dtype = x.dtype, weight.dtype
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        formats: ProductFormats = ctx.formats
        local: LocalScales = ctx.local
        x, x_inverse, weight, weight_inverse = ctx.saved_tensors
        to_input, to_weight = formats.grad_input, formats.grad_weight
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        grad_x = grad_weight = grad_bias = found = None
        shared = to_input == to_weight and needs_weight  # one read makes both casts
        if needs_x and is_narrow(to_input.name):
            found = local.quantize(grad, dtype_of(to_input), columns=shared)
            scales = (found.rows_inverse, weight_inverse)
            grad_x = _product(local, found.rows, weight, scales, by_weight=True)
        elif needs_x:
            grad_x = grad.to(BF16.dtype) @ weight.to(BF16.dtype)
        if needs_weight and is_narrow(to_weight.name):
            if not shared or found is None:
                found = local.quantize(grad, dtype_of(to_weight), rows=False)
            scales = (found.columns_inverse, x_inverse)
            grad_weight = _product(local, found.columns, x, scales, by_weight=False)
        elif needs_weight:
            grad_weight = grad.to(BF16.dtype).t() @ x.to(BF16.dtype)
        if ctx.bias_dtype is not None and ctx.needs_input_grad[2]:
            grad_bias = grad.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return (
            None if grad_x is None else grad_x[: grad.shape[0]].to(ctx.x_dtype),
            None if grad_weight is None else grad_weight.to(ctx.weight_dtype),
            grad_bias,
            *[None] * 6,
        )


_apply: Any = _Fp8Product.apply


def _product(
    local: LocalScales,
    left: Tensor,
    right: Tensor,
    inverses: tuple[Tensor, Tensor],
    *,
    by_weight: bool,
    fast: bool = False,
) -> Tensor:
    if not left.numel():  # of a batch without rows; torch's CPU leaves the result unwritten
        return left.new_zeros((left.shape[0], right.shape[0]), dtype=torch.bfloat16)
    return local.product(left, right, inverses, by_weight=by_weight, fast=fast)
