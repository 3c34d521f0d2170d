"""Linear layers whose products run on fp8 tensor cores, with scales of any kind.

The fp8 weight is stored in both layouts and updated only when it changes, once per step. The
backward pass keeps only the transposed fp8 input.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowcast.errors import UnsupportedError
from narrowcast.kernels.fp8 import Quantized
from narrowcast.numerics import BF16
from narrowcast.precision.fp8.delayed import AmaxHistory
from narrowcast.precision.fp8.scaling import (
    OWN,
    Scale,
    quantize_scaled,
    quantize_weight,
    scaled_product,
    torch_dtype,
)
from narrowcast.precision.fp8.shared_inputs import Wanted, quantized_input
from narrowcast.precision.products import differentiable
from narrowcast.precision.products.autocast import autocast_off
from narrowcast.precision.products.differentiable import OperandScales
from narrowcast.precision.products.emulated import linear_product
from narrowcast.precision.products.operands import ProductFormats, is_transformed, needs_scale
from narrowcast.precision.swap import Mixin


class Fp8Linear(Mixin, nn.Linear):
    """A linear layer with native fp8 products, forward and backward."""

    nc_formats: ProductFormats
    nc_history: AmaxHistory | None = None
    """What delayed scales come from; only with them."""
    nc_weight: Quantized | None = None
    """The weight in fp8."""
    nc_weight_key: tuple[int, int, int, bool] | None = None
    """Weight, its version, step of the scales, and training mode: between training and evaluation
    weights may be exchanged through `.data`, which counts no version."""
    nc_autocast: str | None = None
    """The device type whose autocast is on around this layer, if one is: off, it is an island."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's own name
        """Multiply in this layer's formats; returns the output format's dtype."""
        if self.nc_autocast is not None and not torch.is_autocast_enabled(self.nc_autocast):
            return F.linear(input, self.weight, self.bias)
        if is_transformed():  # kernels know no transforms; emulated products have the same values
            formats, history = self.nc_formats, self.nc_history
            output = linear_product(input, self.weight, self.bias, formats=formats, history=history)
            return output.to(torch_dtype(formats.output))
        if not torch.compiler.is_compiling():
            self.nc_refresh()
        made = self.nc_weight
        assert made is not None, "the weight was never quantised; call the model inside autocast()"
        weight = self.weight
        rows = input if input.dim() == 2 else input.reshape(-1, input.shape[-1])
        x_scale, grad_scale = self.nc_scales()
        result = self.nc_quantized(input, rows, scale=x_scale, learns=weight.requires_grad)
        formats = self.nc_formats
        product: Tensor = _apply(
            rows, weight, self.bias, *_once(made), *_once(result), *grad_scale, formats
        )
        return product if rows is input else product.view(*input.shape[:-1], self.out_features)

    def nc_quantized(
        self, inputs: Tensor, rows: Tensor, *, scale: Scale, learns: bool
    ) -> Quantized:
        """Return the rows in fp8, transposed as well if a weight `learns` from them."""
        formats, learns = self.nc_formats, learns and torch.is_grad_enabled()
        return quantized_input(
            inputs,
            rows,
            wanted=Wanted(
                torch_dtype(formats.forward),
                formats.scaling,
                learns and needs_scale(formats.grad_weight.name),
            ),
            scale=scale,
            history=self.nc_history,
        )

    def nc_scales(self) -> tuple[Scale, Scale]:
        """Return the scales of the input and of the gradient of the output."""
        history = self.nc_history
        if history is None:
            return OWN, OWN
        of_input: Scale = history.scale_inv("input"), history.cast_stats("input")
        decided = torch.compiler.is_compiling() or history.is_decided("input")
        if of_input[1] is None and not decided:
            of_input = OWN  # an evaluation before the first step decides nothing for it
        return of_input, (history.scale_inv("grad_output"), history.cast_stats("grad_output"))

    def nc_refresh(self) -> None:
        """Make the fp8 weight again if it has changed: in every eager call, or in `autocast()`."""
        weight = self.weight
        # A weight that never moves has its scale once and for all.
        history = self.nc_history if weight.requires_grad else None
        moves = 0 if history is None else history.moves
        before = self.nc_weight_key
        now = weight.data_ptr(), weight._version, moves, self.training
        if now == before:
            return
        weight = weight.detach()
        with torch.inference_mode(mode=False), torch.no_grad():  # kept for training too
            made = self.nc_weight = self._nc_made(weight, history)
        if before is not None and before[:-1] != now[:-1]:
            # A backward pass that has kept an fp8 weight must fail, as any would, if it is another.
            torch.autograd.graph.increment_version([made.rowwise, made.columnwise])
        self.nc_weight_key = now

    def _nc_made(self, weight: Tensor, history: AmaxHistory | None) -> Quantized:
        scale = OWN
        if history is not None:
            scale = history.scale_inv("weight"), history.cast_stats("weight")
        made, shared = self.nc_weight, self.nc_history and self.nc_history.scale_inv("weight")
        if made is not None and (made.scale_inv is shared) != (history is not None):
            made = None  # frozen or thawed on the way: its scale is another one from now on
        return quantize_weight(
            weight,
            torch_dtype(self.nc_formats.forward),
            self.nc_formats.scaling,
            scale=scale,
            columnwise=needs_scale(self.nc_formats.grad_input.name),
            into=made,
        )

    def extra_repr(self) -> str:
        """Return the formats for `print(model)`."""
        return f"{super().extra_repr()}, {self.nc_formats}, native"


def _once(made: Quantized) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return a matrix with a scale of both layouts only once: a compiler takes no tensor twice."""
    rowwise, columnwise, scale_inv, other = made
    return rowwise, columnwise, scale_inv, None if other is scale_inv else other


def _first(rows: Tensor, count: int) -> Tensor:
    """Return the first so many rows; a view costs the host more than to look whether it is all."""
    whole = not torch.compiler.is_compiling() and rows.shape[0] == count
    return rows if whole else rows[:count]


def _in(dtype: torch.dtype, x: Tensor) -> Tensor:
    """Return a tensor in a dtype; torch takes the host as long to find that it is so already."""
    return x if x.dtype == dtype else x.to(dtype)


class _Fp8Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        weight_rowwise: Tensor,
        weight_columnwise: Tensor,
        weight_rowwise_scale_inv: Tensor,
        weight_columnwise_scale_inv: Tensor | None,
        x_rowwise: Tensor,
        x_columnwise: Tensor,
        x_rowwise_scale_inv: Tensor,
        x_columnwise_scale_inv: Tensor | None,
        grad_scale_inv: Tensor | None,
        grad_cast_stats: Tensor | None,
        formats: ProductFormats,
    ) -> Tensor:
        fp8_x, fp8_weight = (
            needs_scale(formats.grad_weight.name),
            needs_scale(formats.grad_input.name),
        )
        output = scaled_product(
            x_rowwise,
            weight_rowwise,
            (x_rowwise_scale_inv, weight_rowwise_scale_inv),
            formats.scaling,
            dtype=torch_dtype(formats.output),
            fast=formats.fast,
            bias=bias,
        )
        if output.shape[0] != x.shape[0] and not torch.compiler.is_compiling():
            # Not as a view: torch forbids writes in place to one that is made in here.
            output = output.resize_(x.shape[0], output.shape[1])
        output = _first(output, x.shape[0])
        ctx.save_for_backward(
            x_columnwise if fp8_x else x,
            x_rowwise_scale_inv if x_columnwise_scale_inv is None else x_columnwise_scale_inv,
            weight_columnwise if fp8_weight else weight,
            weight_rowwise_scale_inv
            if weight_columnwise_scale_inv is None
            else weight_columnwise_scale_inv,
            grad_scale_inv,
            grad_cast_stats,
        )
        ctx.formats, ctx.bias_dtype = formats, None if bias is None else bias.dtype
        ctx.x_dtype, ctx.weight_dtype = x.dtype, weight.dtype
        if not torch.compiler.is_compiling():
            ctx.weight = weight  # for second derivatives
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return _Fp8Product.second(ctx, grad)
        return _Fp8Product.gradients(ctx, grad)

    @staticmethod
    def second(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return gradients, of which that of the input can be differentiated again.

        That of the weight raises instead, since only fp8 codes of the input were kept.
        """
        with torch.no_grad():
            _, grad_weight, *rest = _Fp8Product.gradients(ctx, grad)
        grad_x = None
        if ctx.needs_input_grad[0]:
            formats: ProductFormats = ctx.formats
            matrix = ctx.weight.float()
            if formats.one_rounding:
                matrix = differentiable.forward_weight(matrix, formats, None)
            with autocast_off(grad.device.type), torch._C.DisableTorchFunction():
                grad_x, *_ = differentiable.gradients(
                    grad,
                    grad,
                    matrix,
                    formats=formats,
                    scales=OperandScales(),
                    needs=(True, False, False),
                )
            assert grad_x is not None
            grad_x = grad_x.to(ctx.x_dtype)
        if grad_weight is not None:
            grad_weight = _final(grad_weight, grad, ctx.weight)
        return grad_x, grad_weight, *rest

    @staticmethod
    def gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients, by fp8 products."""
        formats: ProductFormats = ctx.formats
        x, x_scale_inv, weight, weight_scale_inv, scale_inv, cast_stats = ctx.saved_tensors
        to_input, to_weight = formats.grad_input, formats.grad_weight
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        grad_x = grad_weight = grad_bias = matched = None
        both = to_input == to_weight and needs_weight  # one read makes both casts
        # What is met is remembered even where no product needs it.
        if needs_scale(to_input.name) and (needs_x or both or cast_stats is not None):
            matched = quantize_scaled(
                grad,
                torch_dtype(to_input),
                formats.scaling,
                scale=(scale_inv, cast_stats),
                rowwise=needs_x,
                columnwise=both,
            )
        if needs_x:
            if matched is None:
                grad_x = grad.to(BF16.dtype) @ weight.to(BF16.dtype)
            else:
                scales = (matched.rowwise_scale_inv, weight_scale_inv)
                dtype = torch_dtype(formats.output)
                grad_x = scaled_product(
                    matched.rowwise, weight, scales, formats.scaling, dtype=dtype
                )
            grad_x = _in(ctx.x_dtype, _first(grad_x, grad.shape[0]))
        if needs_weight and not needs_scale(to_weight.name):
            grad_weight = grad.to(BF16.dtype).t() @ x.to(BF16.dtype)
        elif needs_weight:
            if not both or matched is None:
                # The scale from the past is for the other product's format.
                matched = quantize_scaled(
                    grad, torch_dtype(to_weight), formats.scaling, rowwise=False
                )
            scales = (matched.columnwise_scale_inv, x_scale_inv)
            grad_weight = scaled_product(
                matched.columnwise,
                x,
                scales,
                formats.scaling,
                dtype=ctx.weight_dtype,
                by_weight=False,
            )
        if ctx.bias_dtype is not None and ctx.needs_input_grad[2]:
            # Torch adds up in fp32 whatever it gives; from fp32 a pass more would narrow it.
            summed = grad.dtype if ctx.bias_dtype == grad.dtype else torch.float32
            grad_bias = _in(ctx.bias_dtype, grad.sum(0, dtype=summed))
        return grad_x, grad_weight, grad_bias, *[None] * 11


class _Final(torch.autograd.Function):
    """A weight gradient that cannot be differentiated again."""

    @staticmethod
    def forward(ctx: Any, grad_weight: Tensor, *_: Tensor) -> Tensor:
        return grad_weight.view_as(grad_weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        raise UnsupportedError(
            "fp8 layers do not support second derivatives of the weight gradient, because their "
            "inputs are not stored in full. Use bf16 for this layer (`name: bf16`), or "
            "emulate=true."
        )


_apply: Any = _Fp8Product.apply
_final: Any = _Final.apply
