"""One scale for 128 values of an fp8 operand along the dimension that is summed.

Weights have one for 128 × 128. The scales are made in the one read that casts the values: as local
as a scale for each row and more, at the price of products that add up blocks in fp32. Kernels for
it are in cuBLAS for compute capability 9.0.
"""

from typing import final

import torch
from torch import Tensor

from narrowcast.kernels.fp8 import Quantized
from narrowcast.kernels.fp8_blocks import quantize_blocks
from narrowcast.precision.fp8.scaling import OWN, Scale, write_into


@final
class BlockScaling:
    """Blocks of 1 × 128, of weights 128 × 128."""

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
        return quantize_blocks(x, target, rowwise=rowwise, columnwise=columnwise)

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
        fresh = quantize_blocks(weight, target, square=True, columnwise=columnwise)
        return write_into(into, fresh)

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
        """Return left · rightᵀ + bias in `dtype`, the product rounded to bf16 before.

        Sums are fp32 from block to block, whatever is `fast`.
        """
        from torch.nn.functional import ScalingType, scaled_mm

        if not left.numel():  # of a batch without rows; torch's CPU leaves the result unwritten
            return left.new_zeros((left.shape[0], right.shape[0]), dtype=dtype)
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
        product = product.to(dtype)
        return product if bias is None else product + bias.to(dtype)
