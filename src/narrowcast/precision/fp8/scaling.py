"""How values of an fp8 matrix share scales: one per matrix, one per row, or one per block of 128.

`row` and `block` run along the dimension that is summed; weights have blocks of 128 × 128. cuBLAS
has kernels for `block` for compute capability 9.0. With row and block scales a transposed matrix
has different codes.
"""

import torch
from torch import Tensor

from narrowcast.kernels.fp8 import Quantized, quantize, quantize_into
from narrowcast.kernels.fp8_groups import quantize_groups
from narrowcast.numerics import BF16, BlockFormat, Format

Scale = tuple[Tensor | None, Tensor | None]
"""The inverse scale to use and where to count what a cast loses; none: of the matrix itself."""
OWN: Scale = (None, None)


def quantize_scaled(
    x: Tensor,
    target: torch.dtype,
    scaling: str,
    *,
    scale: Scale = OWN,
    rowwise: bool = True,
    columnwise: bool = True,
) -> Quantized:
    """Return an input or a gradient in fp8; an unwanted layout is empty."""
    if scaling in ("row", "block"):
        return quantize_groups(x, target, scaling, rowwise=rowwise, columnwise=columnwise)
    return quantize(
        x, target, scale_inv=scale[0], cast_stats=scale[1], rowwise=rowwise, columnwise=columnwise
    )


def quantize_weight(
    weight: Tensor,
    target: torch.dtype,
    scaling: str,
    *,
    scale: Scale,
    columnwise: bool,
    into: Quantized | None,
) -> Quantized:
    """Return a weight in fp8, in the memory of `into` if that exists: a captured step reads it."""
    if scaling in ("row", "block"):
        groups = "row" if scaling == "row" else "square"
        fresh = quantize_groups(weight, target, groups, columnwise=columnwise)
        if into is None:
            return fresh
        for old, new in zip(into, fresh, strict=True):
            old.data.copy_(new)
    elif into is None:
        return quantize_scaled(weight, target, scaling, scale=scale, columnwise=columnwise)
    else:
        quantize_into(into, weight, cast_stats=scale[1], by_itself=scale[0] is None)
    return into


def torch_dtype(target: Format | BlockFormat) -> torch.dtype:
    """Return the dtype of a format that has one."""
    assert isinstance(target, Format)
    assert target.dtype is not None
    return target.dtype


def scaled_product(
    left: Tensor,
    right: Tensor,
    scale_invs: tuple[Tensor, Tensor],
    scaling: str = "tensor",
    *,
    dtype: torch.dtype,
    by_weight: bool = True,
    fast: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """Return left · rightᵀ + bias, both laid out along the dimension that is summed.

    `by_weight`: the right one is a weight. `fast` sums keep 14 bits on Hopper.
    """
    if scaling in ("row", "block"):
        if not left.numel():  # of a batch without rows; torch's CPU leaves the result unwritten
            return left.new_zeros((left.shape[0], right.shape[0]), dtype=dtype)
        if scaling == "row":
            product = torch._scaled_mm(
                left,
                right.t(),
                scale_a=scale_invs[0][:, None],
                scale_b=scale_invs[1][None, :],
                out_dtype=torch.bfloat16,
                use_fast_accum=fast,
            )
        else:
            product = _block_product(left, right, scale_invs, by_weight=by_weight)
        product = product.to(dtype)
        return product if bias is None else product + bias.to(dtype)
    return _tensor_product(left, right, scale_invs, dtype=dtype, fast=fast, bias=bias)


def _tensor_product(
    left: Tensor,
    right: Tensor,
    scale_invs: tuple[Tensor, Tensor],
    *,
    dtype: torch.dtype,
    fast: bool,
    bias: Tensor | None,
) -> Tensor:
    """Return left · rightᵀ + bias, in `dtype` if tensor cores write that, in bf16 elsewhere.

    A 16-bit bias is added inside the product: afterwards it would take 64 µs for 16384 × 4096
    results on an H200, where the product from 1024 takes 160.
    """
    out_dtype = BF16.dtype if dtype not in (torch.float32, torch.float16) else dtype
    if left.shape[1] == 0:  # of a batch without rows; torch's CPU leaves the result unwritten
        return left.new_zeros((left.shape[0], right.shape[0]), dtype=out_dtype)
    if bias is not None and bias.dtype != out_dtype:
        bias = bias.to(out_dtype)
    inside = out_dtype != torch.float32  # torch takes none beside a wider result
    result: Tensor = torch._scaled_mm(
        left,
        right.t(),
        scale_a=scale_invs[0],
        scale_b=scale_invs[1],
        bias=bias if inside else None,
        out_dtype=out_dtype,
        use_fast_accum=fast,
    )
    return result if inside or bias is None else result + bias


def _block_product(
    left: Tensor, right: Tensor, scale_invs: tuple[Tensor, Tensor], *, by_weight: bool
) -> Tensor:
    from torch.nn.functional import ScalingType, scaled_mm

    by_line, by_square = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    product: Tensor = scaled_mm(
        left,
        right.t(),
        scale_invs[0].t(),
        by_line,
        scale_invs[1].t(),
        by_square if by_weight else by_line,
        output_dtype=torch.bfloat16,
    )
    return product
