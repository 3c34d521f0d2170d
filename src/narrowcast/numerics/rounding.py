"""Rounding a tensor to a format, to nearest-even or stochastically, on any device."""

import math

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from narrowcast.errors import UnsupportedError
from narrowcast.numerics.formats import BF16, E4M3, FP16, BlockFormat, Format
from narrowcast.numerics.methods import (
    SINGLE,
    Apply,
    Carrier,
    by_adding,
    by_bits,
    by_casting,
    by_chance,
    by_random_bits,
    by_steps,
    get_carrier,
    goes_in_pieces,
    in_pieces,
    in_row_pieces,
    largest_shared,
    represents_all,
)


def round_to(x: Tensor, target: Format, *, saturate: bool = False) -> Tensor:
    """Round `x` to the nearest values of `target`, ties to even, and keep its dtype.

    NaN stays NaN. No gradient flows. Like `Tensor.to`, the result shares memory with `x` if nothing
    needs rounding.

    Args:
        x: A floating-point tensor.
        target: The format.
        saturate: Round values out of range, and inf, to the largest value. False: to inf, or NaN if
            the format has no inf. e2m1 always saturates.

    Returns:
        The rounded tensor.
    """
    carrier, limit = get_carrier(x), _limit(x, target, saturate=saturate)
    if represents_all(target, x.dtype):
        return x.detach() if limit is None else x.detach().clamp(-limit, limit)
    if target.dtype is not None and carrier is SINGLE and _casts_faster(x, target):
        if limit is None and target.has_infinity and not goes_in_pieces(x):
            return x.detach().to(target.dtype).to(x.dtype)
        method, scratch = by_casting(target, limit=limit), target.dtype
    elif carrier.exponent_bits > target.exponent_bits:
        method, scratch = _by_arithmetic(target, carrier, limit=limit), carrier.int_dtype
    else:
        method, scratch = by_bits(target, carrier, limit=limit), carrier.float_dtype
    return in_pieces(x, method, scratch=scratch, dtype=x.dtype)


def round_stochastic(
    x: Tensor, target: Format, *, generator: Generator, saturate: bool = False
) -> Tensor:
    """Round `x` up or down to `target` at random, so that the expected value is `x`.

    Values of `target` stay unchanged. Probabilities are exact except for subnormals, where they are
    within 2**-24 (2**-53 for fp64 tensors).

    Args:
        x: A floating-point tensor.
        target: The format.
        generator: Random generator on the device of `x`.
        saturate: As in `round_to`.

    Returns:
        The rounded tensor, in the dtype of `x`.
    """
    carrier, limit = get_carrier(x), _limit(x, target, saturate=saturate)
    if represents_all(target, x.dtype):
        return x.detach() if limit is None else x.detach().clamp(-limit, limit)
    if carrier.exponent_bits > target.exponent_bits:
        method = by_chance(target, carrier, limit=limit, generator=generator)
        return in_pieces(x, method, scratch=carrier.int_dtype, dtype=x.dtype)
    method = by_random_bits(target, carrier, limit=limit, generator=generator)
    return in_pieces(x, method, scratch=carrier.float_dtype, dtype=x.dtype)


def cast(x: Tensor, target: Format, *, saturate: bool) -> Tensor:
    """Convert `x` to the dtype of `target`, with the rounding of `round_to` in every torch version.

    Values out of range are handled before the cast: torch 2.11 casts them to NaN in e4m3, torch
    2.12 and later to 448, inf included.

    Args:
        x: A floating-point tensor.
        target: A format with a torch dtype.
        saturate: As in `round_to`.

    Returns:
        The tensor in the dtype of `target`.

    Raises:
        UnsupportedError: torch has no dtype for the format.
    """
    if target.dtype is None:
        raise UnsupportedError(
            f"torch has no dtype for single {target.name} values. Use round_to, which keeps the "
            "dtype of its input."
        )
    carrier = get_carrier(x)
    # torch casts fp64 by way of fp32 and so would round twice; tf32 has no cast at all.
    if carrier is not SINGLE or target.dtype == torch.float32:
        wide = x.to(carrier.float_dtype)
        return round_to(wide, target, saturate=saturate).to(target.dtype)
    if target.has_infinity and not saturate:
        return x.detach().to(target.dtype)
    if not saturate:
        method = _by_arithmetic(target, SINGLE, limit=None)
        return in_pieces(x, method, scratch=SINGLE.int_dtype, dtype=target.dtype)

    def clamp(source: Tensor, result: Tensor, _: Tensor) -> None:
        torch.clamp(source, -target.largest, target.largest, out=result)

    return in_pieces(x, clamp, scratch=torch.bool, dtype=target.dtype)


def round_blocks(x: Tensor, target: BlockFormat, *, saturate: bool = True) -> Tensor:
    """Round `x` to a block format along its last dimension; the last block may be shorter.

    A block with inf or NaN becomes NaN. e8m0 scales follow the OCP specification, where values up
    to 1.14 times the largest overflow.

    Args:
        x: A floating-point tensor.
        target: The block format.
        saturate: Round values that overflow to the largest value. False: to NaN.

    Returns:
        The rounded tensor, in the dtype of `x`.
    """
    blocks = in_blocks(x.detach().to(get_carrier(x).float_dtype), target.block)
    rounded = in_row_pieces(
        blocks,
        _block_scales(blocks, target),
        lambda rows, scale: round_to(rows / scale, target.element, saturate=saturate).mul_(scale),
    )
    return rounded.flatten(-2)[..., : x.shape[-1]].to(x.dtype)


def in_blocks(x: Tensor, block: int) -> Tensor:
    """Fold the last dimension of `x` into rows of `block`, the last one filled up with zeros."""
    missing = -x.shape[-1] % block
    padded = F.pad(x, (0, missing)) if missing else x
    return padded.reshape(*x.shape[:-1], padded.shape[-1] // block, block)


def _limit(x: Tensor, target: Format, *, saturate: bool) -> float | None:
    return largest_shared(target, x.dtype) if saturate or target.always_saturates else None


def _by_arithmetic(target: Format, carrier: Carrier, *, limit: float | None) -> Apply:
    """Return the faster of two exact methods; a compiler may make the one that divides inexact."""
    method = by_adding if torch.compiler.is_compiling() else by_steps
    return method(target, carrier, limit=limit)


def _casts_faster(x: Tensor, target: Format) -> bool:
    """Return whether a cast there and back beats arithmetic, as measured on CPU and H200."""
    if torch.compiler.is_compiling():
        # The compiler drops a cast whose result is widened again, and the rounding with it.
        return False
    # Eager CUDA kernels pay per byte, and 8-bit values are few bytes.
    return target in (BF16, FP16) or (x.is_cuda and target.bits == 8)


def _block_scales(blocks: Tensor, target: BlockFormat) -> Tensor:
    """Return what each block is divided by, NaN for a block that is not finite."""
    if blocks.numel() == 0:
        return torch.ones_like(blocks[..., :1])
    amax = torch.maximum(blocks.amax(-1, keepdim=True), -blocks.amin(-1, keepdim=True))
    finite = amax.isfinite()
    match target.scale_format:
        case "e8m0":
            carrier = get_carrier(blocks)
            power = amax.view(carrier.int_dtype).bitwise_and(carrier.exponent_mask)
            scale = power.view(carrier.float_dtype) / target.element.largest_power
            # e8m0 holds the powers of two from -127 to 127, and no zero.
            scale = scale.clamp(2.0**-127, 2.0**127)
        case "e4m3":
            # The tensor's own scale spreads its blocks' scales over all of e4m3. By a tensor of one
            # value, as CUDA divides by a number inexactly: it multiplies by the reciprocal.
            reach = amax.new_full((), target.element.largest * E4M3.largest)
            whole = amax.where(finite, 0.0).amax() / reach
            whole = whole.clamp(min=torch.finfo(blocks.dtype).tiny)
            scale = round_to(amax / (whole * target.element.largest), E4M3, saturate=True)
            scale = scale.clamp(min=E4M3.smallest) * whole
    return scale.where(finite, math.nan)


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
    """Return an fp32 master weight, or the weight itself if it is not the nearest to it."""
    return torch.where(nearest(master, weight.dtype) == weight, master, weight, out=out)


def fitting_compensation(weight: Tensor, error: Tensor) -> Tensor:
    """Return a weight's rounding error, kept in its format, or zero if it is another's."""
    # A little less of it, so that half a spacing does not round to the neighbour.
    nearly = weight.float() + error.float() * (1 - 2.0**-8)
    return torch.where(nearest(nearly, weight.dtype) == weight, error, 0)
