"""One scale for 128 values of an fp8 operand along the dimension that is summed.

Weights have one for 128 × 128. The scales are made in the one read that casts the values: as local
as a scale for each row and more, at the price of products that add up blocks in fp32. Kernels for
it are in cuBLAS for compute capability 9.0.
"""

from typing import final

import torch
from torch import Tensor

from narrowcast.kernels.fp8 import LocallyQuantized
from narrowcast.kernels.fp8_blocks import quantize_blocks
from narrowcast.precision.fp8.local import Fp8LocalLinear


@final
class BlockScales:
    """Blocks of 1 × 128, of weights 128 × 128."""

    def quantize(
        self, x: Tensor, target: torch.dtype, *, rows: bool = True, columns: bool = True
    ) -> LocallyQuantized:
        """Return an input or a gradient in fp8; an unwanted layout is empty."""
        return quantize_blocks(x, target, rows=rows, columns=columns)

    def quantize_weight(
        self, weight: Tensor, target: torch.dtype, *, columns: bool
    ) -> LocallyQuantized:
        """Return a weight in fp8."""
        return quantize_blocks(weight, target, square=True, columns=columns)

    def product(
        self,
        left: Tensor,
        right: Tensor,
        inverses: tuple[Tensor, Tensor],
        *,
        by_weight: bool,
        fast: bool = False,
    ) -> Tensor:
        """Return left · rightᵀ in bf16. Sums are fp32 from block to block, whatever is `fast`."""
        from torch.nn.functional import ScalingType, scaled_mm

        by_line, by_square = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
        result: Tensor = scaled_mm(
            left,
            right.t(),
            inverses[0].t(),
            by_line,
            inverses[1].t(),
            by_square if by_weight else by_line,
            output_dtype=torch.bfloat16,
        )
        return result


class Fp8BlockLinear(Fp8LocalLinear):
    """A linear layer with native fp8 products scaled by blocks, forward and backward."""

    nc_local = BlockScales()
