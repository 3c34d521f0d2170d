"""One scale for each row of an fp8 operand, along the dimension that is summed."""

from typing import final

import torch
from torch import Tensor

from narrowcast.kernels.fp8 import LocallyQuantized
from narrowcast.kernels.fp8_lines import quantize_lines
from narrowcast.precision.fp8.local import Fp8LocalLinear


@final
class RowScales:
    """A row of any length has one scale; weights are scaled as everything else."""

    def quantize(
        self, x: Tensor, target: torch.dtype, *, rows: bool = True, columns: bool = True
    ) -> LocallyQuantized:
        """Return an input or a gradient in fp8; an unwanted layout is empty."""
        return quantize_lines(x, target, rows=rows, columns=columns)

    def quantize_weight(
        self, weight: Tensor, target: torch.dtype, *, columns: bool
    ) -> LocallyQuantized:
        """Return a weight in fp8."""
        return quantize_lines(weight, target, columns=columns)

    def product(
        self,
        left: Tensor,
        right: Tensor,
        inverses: tuple[Tensor, Tensor],
        *,
        by_weight: bool,
        fast: bool = False,
    ) -> Tensor:
        """Return left · rightᵀ in bf16."""
        return torch._scaled_mm(
            left,
            right.t(),
            scale_a=inverses[0][:, None],
            scale_b=inverses[1][None, :],
            out_dtype=torch.bfloat16,
            use_fast_accum=fast,
        )


class Fp8RowLinear(Fp8LocalLinear):
    """A linear layer with native fp8 products scaled by rows, forward and backward."""

    nc_local = RowScales()
