"""One scale for each row of an fp8 operand, along the dimension that is summed.

An outlier spoils its row and nothing else, and nothing has to be remembered. As it is and
transposed a matrix has scales, and so codes, of its own.
"""

from typing import final

import torch
from torch import Tensor

from narrowcast.kernels.fp8 import Quantized
from narrowcast.kernels.fp8_rows import quantize_lines
from narrowcast.precision.fp8.scaling import OWN, Scale, write_into


@final
class RowScaling:
    """A row of any length has one scale; weights are scaled as everything else."""

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
        return quantize_lines(x, target, rowwise=rowwise, columnwise=columnwise)

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
        return write_into(into, quantize_lines(weight, target, columnwise=columnwise))

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
        """Return left · rightᵀ + bias in `dtype`, the product rounded to bf16 before."""
        if not left.numel():  # of a batch without rows; torch's CPU leaves the result unwritten
            return left.new_zeros((left.shape[0], right.shape[0]), dtype=dtype)
        product = torch._scaled_mm(
            left,
            right.t(),
            scale_a=scale_invs[0][:, None],
            scale_b=scale_invs[1][None, :],
            out_dtype=torch.bfloat16,
            use_fast_accum=fast,
        )
        product = product.to(dtype)
        return product if bias is None else product + bias.to(dtype)
