"""The backward pass of a gated activation, cast to fp8 in the same read."""

import torch
import torch.nn.functional as F
from torch import Tensor

from narrowcast.kernels.fp8 import (
    DECIDED,
    LARGEST,
    MULTIPLE,
    Quantized,
    quantize,
)
from narrowcast.kernels.launch import unsupported_reason

Scale = tuple[Tensor | None, Tensor | None]
"""The inverse scale to use and where to count what a cast loses; none: of the matrix itself."""


def quantize_gated_back(
    grad: Tensor,
    gate: Tensor,
    value: Tensor,
    target: torch.dtype,
    *,
    activation: str,
    gate_scale: Scale = (None, None),
    value_scale: Scale = (None, None),
    rowwise: bool = True,
    columnwise: bool = True,
) -> tuple[Quantized, Quantized]:
    """Return the gradients of gate and value in fp8; scales and layouts are as in `quantize`."""
    op = torch.ops.narrowcast.quantize_gated_back_fp8
    call = op if torch.compiler.is_compiling() else _back
    result = call(
        grad, gate, value, target, activation, *gate_scale, *value_scale, rowwise, columnwise
    )
    scales = [
        fresh if scale[0] is None else scale[0]
        for fresh, scale in ((result[2], gate_scale), (result[5], value_scale))
    ]
    return (
        Quantized(result[0], result[1], scales[0], scales[0]),
        Quantized(result[3], result[4], scales[1], scales[1]),
    )


_Six = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _back(
    grad: Tensor,
    gate: Tensor,
    value: Tensor,
    target: torch.dtype,
    activation: str,
    gate_scale_inv: Tensor | None,
    gate_cast_stats: Tensor | None,
    value_scale_inv: Tensor | None,
    value_cast_stats: Tensor | None,
    rowwise: bool,
    columnwise: bool,
) -> _Six:
    scales = (gate_scale_inv, gate_cast_stats), (value_scale_inv, value_cast_stats)
    grad, gate, value = grad.contiguous(), gate.contiguous(), value.contiguous()
    if unsupported_reason(grad.device) or not grad.numel():
        return _plainly(grad, gate, value, target, activation, scales, rowwise, columnwise)
    from narrowcast.kernels.gating.back_tiles import back_into

    made: _Six = _shapes(
        grad, gate, value, target, activation, *scales[0], *scales[1], rowwise, columnwise
    )
    fresh = made[2], made[5]
    # As `.data`, whose writes autograd does not count: it keeps these for the backward pass.
    inputs = [
        (own if scale is None else scale).data
        for own, (scale, _) in zip(fresh, scales, strict=True)
    ]
    noted = [None if stats is None else stats.data for _, stats in scales]
    by_itself = [scale is None or DECIDED.first_use(scale) for scale, _ in scales]
    back_into(
        (made[0], made[3]),
        (made[1], made[4]),
        (grad, gate, value),
        scale_inv=(inputs[0], inputs[1]),
        cast_stats=(noted[0], noted[1]),
        by_itself=(by_itself[0], by_itself[1]),
        largest=LARGEST[target],
        activation=activation,
    )
    return made


def _plainly(
    grad: Tensor,
    gate: Tensor,
    value: Tensor,
    target: torch.dtype,
    activation: str,
    scales: tuple[Scale, Scale],
    rowwise: bool,
    columnwise: bool,
) -> _Six:
    """Do as the kernel does, in a pass for each operation."""
    a, b, down = gate.float(), value.float(), grad.float()
    if activation == "silu":
        gradients = torch.ops.aten.silu_backward(down * b, a), down * F.silu(a)
    else:
        how = "tanh" if activation == "gelu_tanh" else "none"
        through = torch.ops.aten.gelu_backward(down * b, a, approximate=how)
        gradients = through, down * F.gelu(a, approximate=how)
    matches: list[Tensor] = []
    for each, (scale_inv, cast_stats) in zip(gradients, scales, strict=True):
        made = quantize(
            each,
            target,
            scale_inv=scale_inv,
            cast_stats=cast_stats,
            rowwise=rowwise,
            columnwise=columnwise,
        )
        fresh = made.scale_inv if scale_inv is None else made.scale_inv.new_empty(0)
        matches += [made.rowwise, made.columnwise, fresh]
    return matches[0], matches[1], matches[2], matches[3], matches[4], matches[5]


_library = torch.library.Library("narrowcast", "FRAGMENT")
_library.define(
    "quantize_gated_back_fp8(Tensor grad, Tensor gate, Tensor value, ScalarType target, "
    "str activation, Tensor? gate_scale_inv, Tensor? gate_cast_stats, Tensor? value_scale_inv, "
    "Tensor? value_cast_stats, bool rowwise, bool columnwise) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag),
)
_library.impl("quantize_gated_back_fp8", _back, "CompositeExplicitAutograd")


@torch.library.register_fake("narrowcast::quantize_gated_back_fp8")
def _shapes(
    grad: Tensor,
    gate: Tensor,
    value: Tensor,
    target: torch.dtype,
    activation: str,
    gate_scale_inv: Tensor | None,
    gate_cast_stats: Tensor | None,
    value_scale_inv: Tensor | None,
    value_cast_stats: Tensor | None,
    rowwise: bool,
    columnwise: bool,
) -> _Six:
    count, width = gate.shape
    padded = count + -count % MULTIPLE

    def made(scale_inv: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        return (
            gate.new_empty((padded, width) if rowwise else 0, dtype=target),
            gate.new_empty((width, padded) if columnwise else 0, dtype=target),
            gate.new_empty(1 if scale_inv is None else 0, dtype=torch.float32),
        )

    return *made(gate_scale_inv), *made(value_scale_inv)
