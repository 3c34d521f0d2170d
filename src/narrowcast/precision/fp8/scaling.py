"""How values of an fp8 matrix share scales: what a linear layer asks of each way to scale."""

from typing import Protocol

import torch
from torch import Tensor

from narrowcast.kernels.fp8 import Quantized
from narrowcast.numerics import BlockFormat, Format

Scale = tuple[Tensor | None, Tensor | None]
"""The inverse scale to use and where to count what a cast loses; none: of the matrix itself."""
OWN: Scale = (None, None)


class Scaling(Protocol):
    """Quantises matrices, and multiplies those that it has quantised."""

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
        """Return left · rightᵀ + bias, both laid out along the dimension that is summed.

        `by_weight`: the right one is a weight. `fast` sums keep 14 bits on Hopper; without it,
        partial sums are added up in fp32.
        """


def write_into(stored: Quantized | None, fresh: Quantized) -> Quantized:
    """Return a matrix in the memory of one that is kept: a captured step reads from there."""
    if stored is None:
        return fresh
    for old, new in zip(stored, fresh, strict=True):
        old.data.copy_(new)
    return stored


def torch_dtype(target: Format | BlockFormat) -> torch.dtype:
    """Return the dtype of a format that has one."""
    assert isinstance(target, Format)
    assert target.dtype is not None
    return target.dtype
