"""An fp32 number in two parts: a 16-bit weight, and what is kept beside it.

Whoever writes to the weight, by `.data` too, knows of no other part, which then belongs to another
number. So where parts do not fit each other, the weight is taken for all there is. They fit if it
is the nearest to the number that they make.
"""

import torch
from torch import Tensor

from narrowcast.numerics.formats import FP16

_NAN = 0x7FC00000
"""The bits of a NaN whose low half is zero."""


def join_fp32(weight: Tensor, residual: Tensor | None, *, kind: str) -> Tensor:
    """Return the fp32 number that a weight and what a kind of master keeps beside it make."""
    if residual is None:
        return weight.float()
    match kind:
        case "fp32":
            return fitting_master(weight, residual)
        case "split":
            return join(weight, residual)
        case _:
            return weight.float() + fitting_compensation(weight, residual).float()


def nearest(full: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to a weight's format. fp16 saturates: a weight of 70,000 must not become infinite."""
    limit = FP16.largest
    return (full.clamp(-limit, limit) if dtype == torch.float16 else full).to(dtype)


def split(full: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bf16 nearest to each fp32 value, and the 16 signed bits that restore it.

    A number below 2⁻¹³⁴ becomes zero. A NaN stays one: many of them would round to a zero.
    """
    bits = full.view(torch.int32).masked_fill(full.isnan(), _NAN)
    high = (bits + 0x8000) >> 16
    low = bits - (high << 16)
    return high.to(torch.int16).view(torch.bfloat16), low.to(torch.int16)


def join(weight: Tensor, low: Tensor) -> Tensor:
    """Return the fp32 values that `split` took apart; they lie in memory as the weight does.

    torch's fused optimizers walk through weight, gradient and moments by address. Low bits fit
    every finite weight but zero, beside which they would make a NaN as often as a number.
    """
    high = weight.view(torch.int16).to(torch.int32) << 16
    both, alone = (high + low.to(torch.int32)).view(torch.float32), high.view(torch.float32)
    return torch.where(weight == 0, alone, both)


def fitting_master(weight: Tensor, master: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return an fp32 master weight, or the weight itself where it is not the nearest to it."""
    return torch.where(nearest(master, weight.dtype) == weight, master, weight, out=out)


def fitting_compensation(weight: Tensor, error: Tensor) -> Tensor:
    """Return a weight's rounding error, kept in its format, or zero where it is another's."""
    # A little less of it, so that half a spacing does not round to the neighbour.
    nearly = weight.float() + error.float() * (1 - 2.0**-8)
    return torch.where(nearest(nearly, weight.dtype) == weight, error, 0)
