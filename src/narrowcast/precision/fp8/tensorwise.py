"""One scale for a whole fp8 matrix: from past steps (delayed), or of the matrix itself."""

from typing import final

import torch
from torch import Tensor

from narrowcast.kernels.fp8 import Quantized, quantize, quantize_into
from narrowcast.numerics import BF16
from narrowcast.precision.fp8.scaling import OWN, Scale


@final
class TensorScaling:
    """One scale for each matrix, in both of its layouts."""

    def quantize(
        self,
        x: Tensor,
        target: torch.dtype,
        *,
        scale: Scale = OWN,
        rowwise: bool = True,
        columnwise: bool = True,
    ) -> Quantized:
        """Return an input or a gradient in fp8; an unwanted layout is empty."""
        return quantize(
            x,
            target,
            scale_inv=scale[0],
            cast_stats=scale[1],
            rowwise=rowwise,
            columnwise=columnwise,
        )

    def quantize_weight(
        self,
        weight: Tensor,
        target: torch.dtype,
        *,
        scale: Scale,
        columnwise: bool,
        into: Quantized | None,
    ) -> Quantized:
        """Return a weight in fp8, in the memory of `into` where that is given."""
        if into is None:
            return self.quantize(weight, target, scale=scale, columnwise=columnwise)
        # In the same memory: a captured step reads from there.
        quantize_into(into, weight, cast_stats=scale[1], by_itself=scale[0] is None)
        return into

    def product(
        self,
        left: Tensor,
        right: Tensor,
        scale_invs: tuple[Tensor, Tensor],
        *,
        dtype: torch.dtype,
        by_weight: bool,
        fast: bool = False,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Return left · rightᵀ + bias, in `dtype` if tensor cores write that, in bf16 elsewhere."""
        return scaled_product(left, right, scale_invs, dtype=dtype, fast=fast, bias=bias)


def scaled_product(
    left: Tensor,
    right: Tensor,
    scale_invs: tuple[Tensor, Tensor],
    *,
    dtype: torch.dtype,
    fast: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """Return left · rightᵀ + bias, both laid out along the dimension that is summed.

    A bias of 16 bits is added inside the product, before it is rounded. Afterwards, 16384 × 4096
    results would be read and written again: by their bytes 64 µs on an H200, where the product from
    1024 takes 160.
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
