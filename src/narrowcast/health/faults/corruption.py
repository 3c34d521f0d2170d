"""One number of a tensor replaced by one that does not belong there."""

import math

import torch
from torch import Tensor

_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16}
"""Whole numbers of the size of a floating-point dtype, by bytes."""
_EXPONENT_END = {
    torch.float64: 62,
    torch.float32: 30,
    torch.bfloat16: 14,
    torch.float16: 14,
}
"""Where the highest bit of the exponent is."""


def corrupted(tensor: Tensor, value: str, *, index: int) -> Tensor:
    """Return a copy with one number replaced; gradients pass through it as if nothing had been.

    `value` is `inf`, `nan`, `large` (half of the largest number of the dtype) or `bit-flip` (of the
    highest bit of the exponent: numbers below 1 become huge, those from 2 up become tiny).
    """
    copy = tensor.clone()
    corrupt(copy.data, value, spot=unravel(copy, index))  # autograd is not to know
    return copy


def unravel(tensor: Tensor, index: int) -> tuple[int, ...]:
    """Return where a number is; `index` counts through the tensor, and round again."""
    location = torch.unravel_index(torch.tensor(index % tensor.numel()), tensor.shape)
    return tuple(int(i) for i in location)


def corrupt(tensor: Tensor, value: str, *, spot: tuple[int, ...]) -> None:
    """Replace one number where it lies."""
    match value:
        case "inf":
            tensor[spot] = math.inf
        case "nan":
            tensor[spot] = math.nan
        case "large":
            tensor[spot] = torch.finfo(tensor.dtype).max / 2
        case _:
            number = tensor[spot].detach().clone()
            bits = number.view(_BITS[number.dtype.itemsize])
            bits.bitwise_xor_(1 << _EXPONENT_END[number.dtype])
            tensor[spot] = number
