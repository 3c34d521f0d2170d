"""Scales that bring a tensor into the range of a format: powers of two, so scaling is exact."""

import math
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from narrowcast.errors import UnsupportedError
from narrowcast.numerics.formats import Format
from narrowcast.numerics.methods import (
    Carrier,
    by_adding,
    get_carrier,
    in_pieces,
    in_row_pieces,
    represents_all,
)
from narrowcast.numerics.rounding import in_blocks, round_to

Per = Literal["tensor", "row", "column", "block"]
"""What shares a scale: everything; the last dimension; the one before it; a run of the last."""


def scale_for(x: Tensor, target: Format, *, per: Per = "tensor", block: int = 128) -> Tensor:
    """Return the largest powers of two that keep `x * scale` within `target`.

    Args:
        x: A floating-point tensor.
        target: The format.
        per: What shares a scale: "tensor", "row", "column" or "block".
        block: Block size for `per="block"`.

    Returns:
        The scales, which broadcast to `x`, in fp32 (fp64 for fp64). 1 if all values are zero or one
        is inf or NaN.
    """
    carrier = get_carrier(x)
    if x.numel() == 0:
        return torch.ones((), dtype=carrier.float_dtype, device=x.device)
    amax = _amax(x.detach(), per=per, block=block).to(carrier.float_dtype)
    scale = _powers_within(amax, target, carrier)
    if per == "block":
        return scale.repeat_interleave(block, -1)[..., : x.shape[-1]]
    return scale


def quantize(x: Tensor, target: Format, *, per: Per = "tensor", block: int = 128) -> Tensor:
    """Scale `x` into `target`, round it, and scale it back.

    Finite values stay finite. inf and NaN stay inf or become NaN; they never saturate. A zero may
    lose its sign. No gradient flows.

    Args:
        x: A floating-point tensor.
        target: The format.
        per: What shares a scale: "tensor", "row", "column" or "block".
        block: Block size for `per="block"`.

    Returns:
        The rounded tensor, in the dtype of `x`.
    """
    x, carrier = x.detach(), get_carrier(x)
    if represents_all(target, x.dtype) or x.numel() == 0:
        return x
    if per == "block":
        blocks = quantize(in_blocks(x, block), target, per="row")
        return blocks.flatten(-2)[..., : x.shape[-1]]
    # On a CPU nothing is lost by looking at the scale, and six passes are won without it.
    if per == "tensor" and x.device.type == "cpu" and not torch.compiler.is_compiling():
        amax = float(_amax(x, per=per, block=block))
        scale = _absorbed_scale(amax, target, carrier=carrier, dtype=x.dtype)
        if scale is not None:
            method = by_adding(target, carrier, limit=None, scale=scale)
            return in_pieces(x, method, scratch=carrier.int_dtype, dtype=x.dtype)
    scales = scale_for(x, target, per=per)
    return in_row_pieces(x, scales, partial(_scaled_round, target=target))


def _powers_within(amax: Tensor, target: Format, carrier: Carrier) -> Tensor:
    """Return the largest power of two by which `amax` stays within `target`, or one."""
    # In integers, as a division would round: the difference of the exponents, and one less where
    # the mantissa of `amax` is the larger; then kept to the exponents of normal numbers.
    bits = amax.view(carrier.int_dtype)
    largest, one = carrier.to_bits(target.largest), carrier.to_bits(1.0)
    larger = (bits & carrier.mantissa_mask) > (largest & carrier.mantissa_mask)
    top = (largest >> carrier.mantissa_bits) + (one >> carrier.mantissa_bits)
    exponent = top - (bits >> carrier.mantissa_bits) - larger.to(carrier.int_dtype)
    exponent = exponent.clamp(1, (carrier.exponent_mask >> carrier.mantissa_bits) - 1)
    power = (exponent << carrier.mantissa_bits).view(carrier.float_dtype)
    return power.where(amax.isfinite() & (amax > 0), 1.0)


def _absorbed_scale(
    amax: float, target: Format, *, carrier: Carrier, dtype: torch.dtype
) -> float | None:
    """Return the scale that `scale_for` would, if `by_adding` can absorb it."""
    if carrier.exponent_bits <= target.exponent_bits:
        return None
    # Scaled back, the smallest normal power must be normal, and there must be room to add above the
    # largest. Near the top of its dtype a value may round to what that cannot hold.
    low = 8 / carrier.largest_power * target.largest / target.smallest_normal
    high = carrier.largest_power / 2.0 ** (carrier.mantissa_bits + 2)
    if not (amax == 0 or low < amax < min(high, torch.finfo(dtype).max / 2)):
        return None
    (fraction, exponent), (reach, top) = math.frexp(amax), math.frexp(target.largest)
    return 1.0 if amax == 0 else 2.0 ** (top - exponent - (fraction > reach))


def _scaled_round(x: Tensor, scale: Tensor, target: Format) -> Tensor:
    """Return `x` scaled, rounded and scaled back, whatever it holds."""
    scaled = x.to(get_carrier(x).float_dtype) * scale
    rounded = round_to(scaled, target, saturate=True).div_(scale)
    # The very largest numbers may round up to what their dtype cannot hold.
    top = (2 - target.epsilon) * 2.0 ** (math.frexp(torch.finfo(x.dtype).max)[1] - 1)
    # Zero times what is not finite is NaN; else the sum changes nothing.
    return rounded.clamp_(-top, top).add_(scaled, alpha=0.0).to(x.dtype)


def _amax(x: Tensor, *, per: Per, block: int) -> Tensor:
    """Return the largest magnitude of whatever shares a scale, NaN if NaN is among it."""
    match per:
        case "tensor":
            low, high = torch.aminmax(x)
            return torch.maximum(high, -low)
        case "row":
            dim = -1
        case "column":
            if x.dim() < 2:
                raise UnsupportedError(
                    f"A scale per column needs at least two dimensions, got {x.dim()}. Write "
                    "per='row' or per='tensor'."
                )
            dim = -2
        case "block":
            dim = -1
            x = in_blocks(x, block)
    # Two reductions read less than one `abs` writes.
    amax = torch.maximum(x.amax(dim, keepdim=True), -x.amin(dim, keepdim=True))
    return amax.squeeze(-1) if per == "block" else amax
