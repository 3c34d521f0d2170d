"""Three fp8 linear layers and the gated activation between them, never written in 16 bits.

The backward pass keeps gate and value in 16 bits, and the input and the product in 8, transposed.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from narrowcast.kernels.fp8 import quantize
from narrowcast.kernels.gating.fp8_back import quantize_gated_back
from narrowcast.precision.fp8.linear import Fp8Linear
from narrowcast.precision.fp8.scaling import scaled_product, torch_dtype
from narrowcast.precision.fused.fp8_mlp import layouts_and_scale
from narrowcast.precision.plan.known_modules import GatedMlp
from narrowcast.precision.products.operands import ProductFormats, is_transformed, needs_scale
from narrowcast.precision.swap import Mixin, is_watched


class Fp8GatedMlp(Mixin):
    """A gated MLP whose three layers multiply in fp8, run as one."""

    nc_chain: GatedMlp

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return down(activation(gate(x)) · value(x)) in the formats of the three layers."""
        known = self.nc_chain
        layers: Any = self._modules
        gate, value, down = layers[known.gate], layers[known.value], layers[known.down]
        on = gate.nc_autocast is None or torch.is_autocast_enabled(gate.nc_autocast)
        watched = is_watched(gate, value, down, layers[known.activation_name])
        if len(args) != 1 or kwargs or watched or not on or is_transformed():
            return super().forward(*args, **kwargs)
        (x,) = args
        if not torch.compiler.is_compiling():
            for layer in (gate, value, down):
                layer.nc_refresh()
        rows = x.reshape(-1, x.shape[-1])
        x_scale, gate_back = gate.nc_scales()
        _, value_back = value.nc_scales()
        between, back = down.nc_scales()
        matched = gate.nc_quantized(
            x, rows, scale=x_scale, learns=gate.weight.requires_grad or value.weight.requires_grad
        )
        output: Tensor = _apply(
            rows,
            gate.weight,
            value.weight,
            down.weight,
            *layouts_and_scale(gate),
            *layouts_and_scale(value),
            *layouts_and_scale(down),
            matched.rowwise,
            matched.columnwise,
            matched.scale_inv,
            *between,
            *back,
            *gate_back,
            *value_back,
            known.activation,
            torch.is_grad_enabled() and down.weight.requires_grad,
            gate.nc_formats,
        )
        output = output[: rows.shape[0]]
        if down.bias is not None:
            output = output + down.bias.to(output.dtype)
        return output.view(*x.shape[:-1], down.out_features)


def can_chain(module: nn.Module, known: GatedMlp) -> bool:
    """Return whether a gated MLP can be joined; its first two layers then share a scale."""
    if known.gate == known.value:
        return False  # one layer, whose gradient has one scale
    layers = [module._modules[name] for name in (known.gate, known.value, known.down)]
    if not all(isinstance(each, Fp8Linear) for each in layers):
        return False
    gate, value, down = (cast(Fp8Linear, each) for each in layers)
    formats = gate.nc_formats
    # A bias before the activation has as its gradient the sum of what is never written.
    no_bias = all(cast("Tensor | None", each.bias) is None for each in (gate, value))
    can = (
        no_bias
        and formats == value.nc_formats == down.nc_formats
        and formats.scaling not in ("row", "block")
        and formats.grad_input == formats.grad_weight
        and needs_scale(formats.grad_input.name)
    )
    if not can or gate.nc_history is None or value.nc_history is None:
        return can
    return value.nc_history.reads_with(gate.nc_history)


class _Chain(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate: Tensor,
        value: Tensor,
        down: Tensor,
        gate_rowwise: Tensor,
        gate_columnwise: Tensor,
        gate_scale_inv: Tensor,
        value_rowwise: Tensor,
        value_columnwise: Tensor,
        value_scale_inv: Tensor,
        down_rowwise: Tensor,
        down_columnwise: Tensor,
        down_scale_inv: Tensor,
        x_rowwise: Tensor,
        x_columnwise: Tensor,
        x_scale_inv: Tensor,
        between_scale_inv: Tensor | None,
        between_cast_stats: Tensor | None,
        back_scale_inv: Tensor | None,
        back_cast_stats: Tensor | None,
        gate_back_scale_inv: Tensor | None,
        gate_back_cast_stats: Tensor | None,
        value_back_scale_inv: Tensor | None,
        value_back_cast_stats: Tensor | None,
        activation: str,
        learns: bool,
        formats: ProductFormats,
    ) -> Tensor:
        output, fast = torch_dtype(formats.output), formats.fast
        a, b = (
            scaled_product(x_rowwise, codes, (x_scale_inv, scale), dtype=output, fast=fast)
            for codes, scale in ((gate_rowwise, gate_scale_inv), (value_rowwise, value_scale_inv))
        )
        between = quantize(
            a,
            torch_dtype(formats.forward),
            scale_inv=between_scale_inv,
            cast_stats=between_cast_stats,
            columnwise=learns,
            activation=f"gated_{activation}",
            second=b,
        )
        scales = (between.scale_inv, down_scale_inv)
        result = scaled_product(between.rowwise, down_rowwise, scales, dtype=output, fast=fast)
        ctx.save_for_backward(
            x_columnwise, x_scale_inv, a, b, between.columnwise, between.scale_inv,
            gate_columnwise, gate_scale_inv, value_columnwise, value_scale_inv,
            down_columnwise, down_scale_inv, back_scale_inv, back_cast_stats,
            gate_back_scale_inv, gate_back_cast_stats, value_back_scale_inv, value_back_cast_stats,
        )  # fmt: skip
        ctx.activation, ctx.formats, ctx.rows, ctx.x_dtype = activation, formats, len(x), x.dtype
        ctx.dtypes = gate.dtype, value.dtype, down.dtype
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (
            x, x_scale_inv, a, b, between, between_scale_inv, gate, gate_scale_inv,
            value, value_scale_inv, down, down_scale_inv, scale_inv, cast_stats, *backs,
        ) = ctx.saved_tensors  # fmt: skip
        target, output = torch_dtype(ctx.formats.grad_input), torch_dtype(ctx.formats.output)
        grad_x = grad_gate = grad_value = grad_down = None
        needs_x, needs_gate, needs_value, needs_down = ctx.needs_input_grad[:4]
        result = quantize(
            grad, target, scale_inv=scale_inv, cast_stats=cast_stats, columnwise=needs_down
        )
        if needs_x or needs_gate or needs_value:
            through = scaled_product(
                result.rowwise, down, (result.scale_inv, down_scale_inv), dtype=output
            )
            of_gate, of_value = quantize_gated_back(
                through,
                a,
                b,
                target,
                activation=ctx.activation,
                gate_scale=(backs[0], backs[1]),
                value_scale=(backs[2], backs[3]),
                rowwise=needs_x,
                columnwise=needs_gate or needs_value,
            )
            if needs_x:
                grad_x = scaled_product(
                    of_gate.rowwise, gate, (of_gate.scale_inv, gate_scale_inv), dtype=output
                ) + scaled_product(
                    of_value.rowwise, value, (of_value.scale_inv, value_scale_inv), dtype=output
                )
                grad_x = grad_x[: ctx.rows].to(ctx.x_dtype)
            if needs_gate:
                scales = (of_gate.scale_inv, x_scale_inv)
                grad_gate = scaled_product(of_gate.columnwise, x, scales, dtype=ctx.dtypes[0])
            if needs_value:
                scales = (of_value.scale_inv, x_scale_inv)
                grad_value = scaled_product(of_value.columnwise, x, scales, dtype=ctx.dtypes[1])
        if needs_down:
            scales = (result.scale_inv, between_scale_inv)
            grad_down = scaled_product(result.columnwise, between, scales, dtype=ctx.dtypes[2])
        return grad_x, grad_gate, grad_value, grad_down, *[None] * 23


_apply: Any = _Chain.apply
