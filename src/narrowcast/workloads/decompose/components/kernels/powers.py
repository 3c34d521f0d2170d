"""Means over rows of importances to a power, a launch for each site and one for their sums.

Programs sum tiles of rows, and torch adds up the tiles, always in the same order. All in fp32.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowcast.kernels.launch import launch_kernel

_ROWS = 64
_WIDEST = 64  # columns of a tile: 32 elements for each of 128 threads


def power_means(uppers: Sequence[Tensor], power: float | Tensor, epsilon: float) -> Tensor:
    """Return the means of (max(u, 0) + epsilon)^power, of all sites one after another.

    Each of `uppers` is (seeds, rows, components), contiguous; the result is (seeds, all of them),
    in fp32. A power that is a tensor is read on the device.
    """
    seeds, rows, _ = uppers[0].shape
    blocks = triton.cdiv(rows, _ROWS)
    width = sum(each.shape[-1] for each in uppers)
    sums = torch.empty((blocks, seeds, width), device=uppers[0].device)
    first = 0
    for upper in uppers:
        launch_kernel(
            _sum, _grid(upper),
            upper, *_power(upper, power), sums, first, width, *_sizes(upper, epsilon),
            **_constants(upper, power),
        )  # fmt: skip
        first += upper.shape[-1]
    return sums.sum(0)


def power_means_back(
    grad: Tensor, uppers: Sequence[Tensor], power: float | Tensor, epsilon: float
) -> list[Tensor]:
    """Return the gradients of all sites, given that of the means, of whatever strides."""
    result, first = [], 0
    for upper in uppers:
        out = torch.empty_like(upper)
        launch_kernel(
            _back, _grid(upper),
            upper, *_power(upper, power), grad, out, first, *grad.stride(),
            *_sizes(upper, epsilon), **_constants(upper, power),
        )  # fmt: skip
        result.append(out)
        first += upper.shape[-1]
    return result


def _columns(upper: Tensor) -> int:
    return int(min(max(triton.next_power_of_2(upper.shape[-1]), 16), _WIDEST))


def _grid(upper: Tensor) -> tuple[int, int, int]:
    seeds, rows, count = upper.shape
    return triton.cdiv(count, _columns(upper)), triton.cdiv(rows, _ROWS), seeds


def _power(upper: Tensor, power: float | Tensor) -> tuple[Tensor, float]:
    """Return where a power is and what it is; of the two one is read."""
    return (power, 0.0) if isinstance(power, Tensor) else (upper, power)


def _sizes(upper: Tensor, epsilon: float) -> tuple[float, int, int, float]:
    _, rows, count = upper.shape
    return 1.0 / rows, rows, count, epsilon


def _constants(upper: Tensor, power: float | Tensor) -> dict[str, int]:
    kind = 0 if isinstance(power, Tensor) else {1.0: 1, 2.0: 2}.get(power, 3)
    return {"POWER": kind, "ROWS": _ROWS, "COLUMNS": _columns(upper), "num_warps": 4}


@triton.jit
def _sum(
    upper, powers, power, sums, first, width, share, rows, count, epsilon,
    POWER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column, here, at = _places(rows, count, ROWS, COLUMNS)
    u = tl.load(upper + at, mask=here, other=0.0).to(tl.float32)
    x = tl.where(u < 0.0, 0.0, u) + epsilon
    if POWER == 1:
        value = x
    elif POWER == 2:
        value = x * x
    else:
        value = tl.exp2(_exponent(powers, power, POWER) * tl.log2(x))
    total = tl.sum(tl.where(here, value, 0.0), 0) * share
    line = tl.program_id(1).to(tl.int64) * tl.num_programs(2) + tl.program_id(2)
    tl.store(sums + line * width + first + column, total, mask=column < count)


@triton.jit
def _back(
    upper, powers, power, grad, out, first, g_seed, g_column, share, rows, count, epsilon,
    POWER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column, here, at = _places(rows, count, ROWS, COLUMNS)
    u = tl.load(upper + at, mask=here, other=0.0).to(tl.float32)
    spot = grad + tl.program_id(2).to(tl.int64) * g_seed + (first + column).to(tl.int64) * g_column
    inputs = tl.load(spot, mask=column < count, other=0.0).to(tl.float32) * share
    if POWER == 1:
        slope = tl.full((ROWS, COLUMNS), 1.0, tl.float32)
    elif POWER == 2:
        slope = 2.0 * (u + epsilon)
    else:
        p = _exponent(powers, power, POWER)
        slope = p * tl.exp2((p - 1.0) * tl.log2(tl.where(u < 0.0, 0.0, u) + epsilon))
        slope = tl.where(u == 0.0, tl.where(p < 1.0, 0.0, slope), slope)
    value = tl.where(u < 0.0, 0.0, slope * inputs[None, :])
    tl.store(out + at, value.to(out.dtype.element_ty), mask=here)


@triton.jit
def _places(rows, count, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Columns of a program, which of its numbers there are, and where they lie."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    here = (row < rows)[:, None] & (column < count)[None, :]
    line = tl.program_id(2).to(tl.int64) * rows + row.to(tl.int64)
    return column, here, line[:, None] * count + column[None, :]


@triton.jit
def _exponent(powers, power, POWER: tl.constexpr):
    if POWER == 0:
        return tl.load(powers).to(tl.float32)
    else:
        return power
