"""The ways to round, each a few in-place passes over a source, a result and a scratch.

Which one applies follows from the carrier. Where its exponents reach beyond the format's, adding
and subtracting 1.5 * 2**k at the right power of two makes the adder itself round, exactly to
nearest-even and down to the last subnormal. Where they do not, the rounding is integer arithmetic
on the bits, or a cast there and back.

`limit` is where to saturate, or None: then overflow becomes an infinity, or NaN without one.
"""

import math

import torch
from torch import Generator, Tensor

from narrowcast.numerics.carriers import Apply, Carrier
from narrowcast.numerics.formats import Format


def overflows(magnitude: Tensor, target: Format) -> Tensor:
    """Say of each finite magnitude whether rounding to nearest takes it beyond `target.largest`."""
    if target.overflow > torch.finfo(magnitude.dtype).max:
        return torch.zeros_like(magnitude, dtype=torch.bool)
    if target.overflow_is_even:
        return magnitude >= target.overflow
    return magnitude > target.overflow


def by_casting(target: Format, *, limit: float | None) -> Apply:
    """Round by a cast to the dtype of `target` and back; the scratch has that dtype."""
    # Without infinity the cast must not see an overflow: torch versions disagree about it.
    bound = target.largest if limit is None and not target.has_infinity else limit

    def apply(source: Tensor, result: Tensor, scratch: Tensor) -> None:
        if bound is None:
            scratch.copy_(source)
        else:
            scratch.copy_(torch.clamp(source, -bound, bound, out=result))
        result.copy_(scratch)
        if limit is None and not target.has_infinity:
            result.masked_fill_(overflows(source.abs(), target), math.nan)

    return apply


def by_adding(
    target: Format, carrier: Carrier, *, limit: float | None, scale: float | None = None
) -> Apply:
    """Round by adding 1.5 * 2**k and taking it away again; the scratch has the carrier's integers.

    With a `scale`, a power of two, `source * scale` is rounded and the result divided by it again,
    at no cost: only the powers move between which the grid coarsens. What is scaled must fit, and a
    zero loses its sign.
    """
    lowest = carrier.to_bits(target.smallest_normal / (scale or 1.0))
    highest = carrier.to_bits(target.largest_power / (scale or 1.0))
    # In the sum, the last bit weighs what the last mantissa bit of `target` weighs at that power;
    # the 1.5 keeps it so for negative numbers.
    factor = 1.5 * 2.0 ** (carrier.mantissa_bits - target.mantissa_bits)

    def apply(source: Tensor, result: Tensor, scratch: Tensor) -> None:
        torch.bitwise_and(source.view(carrier.int_dtype), carrier.exponent_mask, out=scratch)
        power = scratch.clamp_(lowest, highest).view(carrier.float_dtype)
        torch.add(source, power, alpha=factor, out=result)
        result.sub_(power, alpha=factor)
        if scale is not None:
            return
        _fit_range(result, power, target, carrier, limit=limit)
        # A sum that cancels is +0, even where it was a negative number that vanished.
        torch.bitwise_and(source.view(carrier.int_dtype), carrier.sign_mask, out=scratch)
        result.view(carrier.int_dtype).bitwise_or_(scratch)

    return apply


def by_steps(target: Format, carrier: Carrier, *, limit: float | None) -> Apply:
    """Round to a whole number of steps, each as long as the grid's at that power of two.

    One pass less than `by_adding`, but it divides: exact as divisions go, which a compiler may
    replace by an approximation. The scratch has the carrier's integers.
    """
    lowest = carrier.to_bits(target.smallest_normal)
    highest = carrier.to_bits(target.largest_power)

    def apply(source: Tensor, result: Tensor, scratch: Tensor) -> None:
        torch.bitwise_and(source.view(carrier.int_dtype), carrier.exponent_mask, out=scratch)
        power = scratch.clamp_(lowest, highest).view(carrier.float_dtype)
        # What the products are added to; +0 would take the sign of a negative zero away.
        nothing = source.new_full((), -0.0)
        torch.addcdiv(nothing, source, power, value=1 / target.epsilon, out=result)
        torch.addcmul(nothing, result.round_(), power, value=target.epsilon, out=result)
        _fit_range(result, power, target, carrier, limit=limit)

    return apply


def by_bits(target: Format, carrier: Carrier, *, limit: float | None) -> Apply:
    """Round by integer arithmetic, for exponents as wide as the carrier's; scratch: its floats."""
    dropped = carrier.mantissa_bits - target.mantissa_bits

    def apply(source: Tensor, result: Tensor, scratch: Tensor) -> None:
        bits, rounded = source.view(carrier.int_dtype), result.view(carrier.int_dtype)
        # Just under half a step, and the last kept bit: so a tie carries only into odd numbers.
        torch.bitwise_right_shift(bits, dropped, out=rounded)
        rounded.bitwise_and_(1).add_(2 ** (dropped - 1) - 1).add_(bits)
        rounded.bitwise_and_(-(2**dropped))
        _keep_nan(source, result, scratch, limit=limit)

    return apply


def by_chance(
    target: Format, carrier: Carrier, *, limit: float | None, generator: Generator
) -> Apply:
    """Round down, then up by one step with the chance that what was cut off asks for.

    The scratch has the carrier's integers.
    """
    lowest = carrier.to_bits(target.smallest_normal)
    highest = carrier.to_bits(target.largest_power)

    def apply(source: Tensor, result: Tensor, scratch: Tensor) -> None:
        torch.bitwise_and(source.view(carrier.int_dtype), carrier.exponent_mask, out=scratch)
        step = scratch.clamp_(lowest, highest).view(carrier.float_dtype).mul_(target.epsilon)
        # All exact: the step is a power of two, and a fraction has fewer bits than its number.
        steps = torch.abs(source, out=result).div_(step)
        whole = steps.floor()
        fraction = steps.sub_(whole)
        whole.add_(torch.empty_like(whole).uniform_(generator=generator) < fraction)
        torch.copysign(whole.mul_(step), source, out=result)
        _fit_range(result, step, target, carrier, limit=limit)

    return apply


def by_random_bits(
    target: Format, carrier: Carrier, *, limit: float | None, generator: Generator
) -> Apply:
    """Add random bits below the last kept one and cut there; scratch: the carrier's floats."""
    dropped = carrier.mantissa_bits - target.mantissa_bits

    def apply(source: Tensor, result: Tensor, scratch: Tensor) -> None:
        # One 64-bit draw serves four elements: drawing is what takes the time.
        draws = torch.empty(-(-result.numel() // 4), dtype=torch.int64, device=result.device)
        lanes = draws.random_(-(2**63), None, generator=generator).view(torch.int16)
        rounded = result.view(carrier.int_dtype)
        rounded.copy_(lanes[: result.numel()].view(result.shape)).bitwise_and_(2**dropped - 1)
        rounded.add_(source.view(carrier.int_dtype)).bitwise_and_(-(2**dropped))
        _keep_nan(source, result, scratch, limit=limit)

    return apply


def _fit_range(
    result: Tensor, scratch: Tensor, target: Format, carrier: Carrier, *, limit: float | None
) -> None:
    """Settle what lies beyond the largest value; `result` is on the grid continued upwards."""
    if limit is not None:
        result.clamp_(-limit, limit)
    elif target.has_infinity:
        # Lift the first power of two out of range to where the carrier overflows too, and return.
        lift = carrier.largest_power / target.largest_power
        result.mul_(lift).mul_(1 / lift)
    else:
        # Likewise, but only the carrier's infinity is wanted: times zero it is NaN.
        torch.mul(result, carrier.largest_power / target.overflow * 2, out=scratch)
        result.add_(scratch, alpha=0.0)


def _keep_nan(source: Tensor, result: Tensor, scratch: Tensor, *, limit: float | None) -> None:
    """Restore the NaN whose bits a carry has turned into something else, then saturate."""
    # A clamp to -inf leaves NaN alone, and nothing but NaN is above or beside -inf in a maximum.
    torch.maximum(result, torch.clamp(source, max=-math.inf, out=scratch), out=result)
    if limit is not None:
        result.clamp_(-limit, limit)
