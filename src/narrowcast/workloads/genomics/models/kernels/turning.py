"""Passes before and after an FFT, each reading and writing memory once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowcast.kernels.launch import Launcher

_BLOCK = 1024  # letters of a program, 8 for each of 128 threads


def turn_in(value: Tensor, before: Tensor | None, turns: Tensor, *, out: Tensor) -> None:
    """Write value ⊙ before times a^t, padded with zeros, to `out`: (rows, channels, size)."""
    rows, channels, length = value.shape
    value, before = _lined_up(value), None if before is None else _lined_up(before)
    second = value if before is None else before
    size = len(turns)
    _launch_in(
        (rows * channels, -(-size // _BLOCK), 1),
        (value, second, torch.view_as_real(turns), torch.view_as_real(out)),
        (channels, length, size, *value.stride()[:2], *second.stride()[:2]),
        (before is not None, _BLOCK),
        num_warps=4,
    )


def turn_out(
    turned: Tensor,
    turns: Tensor,
    *,
    value: Tensor,
    before: Tensor | None,
    bias: Tensor | None,
    gates: tuple[Tensor | None, Tensor | None],
    outs: tuple[Tensor, Tensor | None],
    products: Tensor | None = None,
) -> None:
    """Write gates ⊙ (y + bias ⊙ z) to `outs`, where y is the real part of `turned` times a^-t.

    z is value ⊙ before. `products`, (rows, channels, blocks), gets block sums of
    z ⊙ gates[0] ⊙ gates[1], for the gradient of the bias.
    """
    rows, channels, length = value.shape
    inputs = [_lined_up(value if t is None else t) for t in (value, before, *gates)]
    first, second = outs[0], outs[0] if outs[1] is None else outs[1]
    _launch_out(
        (rows * channels, block_count(length), 1),
        (
            torch.view_as_real(turned),
            torch.view_as_real(turns),
            *inputs,
            first if bias is None else bias,
            first,
            second,
            first if products is None else products,
        ),
        (
            channels,
            length,
            len(turns),
            *[step for each in (*inputs, first, second) for step in each.stride()[:2]],
            *((0, 0) if products is None else products.stride()[:2]),
        ),
        (
            before is not None,
            bias is not None,
            gates[0] is not None,
            outs[1] is not None,
            products is not None,
            _BLOCK,
        ),
        num_warps=4,
    )


def block_count(length: int) -> int:
    """Return how many block sums `turn_out` writes per sequence."""
    return -(-length // _BLOCK)


def mix_spectra(
    of_z: Tensor, of_grad: Tensor, of_filter: Tensor, summed: Tensor, *, forward: bool
) -> None:
    """Multiply gradient spectra by the conjugate filter spectrum in place; add to `summed`."""
    rows, channels, size = of_z.shape
    _launch_mix(
        (-(-size // (_BLOCK // 2)), channels, 1),
        tuple([torch.view_as_real(each) for each in (of_z, of_grad, of_filter, summed)]),
        (rows, size, of_z.stride(0), of_grad.stride(0)),
        (forward, _BLOCK // 2),
        num_warps=4,
    )


def _lined_up(x: Tensor) -> Tensor:
    """Return a tensor with contiguous letters."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


@triton.jit
def _turn_in(
    value,
    before,
    turns,
    out,
    channels,
    length,
    size,
    value_row,
    value_channel,
    before_row,
    before_channel,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    row, channel = line // channels, line % channels
    start = tl.program_id(1) * BLOCK
    letter = start + tl.arange(0, BLOCK)
    there = letter < length
    at = row * value_row + channel * value_channel
    z = tl.load(value + at + letter, mask=there, other=0.0).to(tl.float32)
    if GATED:
        at = row * before_row + channel * before_channel
        z = z * tl.load(before + at + letter, mask=there, other=0.0).to(tl.float32)
    cosine, sine = _complex(turns, start, size, BLOCK)
    _write(out + line * size * 2, start, size, z * cosine, z * sine, BLOCK)


@triton.jit
def _turn_out(
    turned,
    turns,
    value,
    before,
    first_gate,
    second_gate,
    bias,
    first,
    second,
    products,
    channels,
    length,
    size,
    value_row,
    value_channel,
    before_row,
    before_channel,
    first_gate_row,
    first_gate_channel,
    second_gate_row,
    second_gate_channel,
    first_row,
    first_channel,
    second_row,
    second_channel,
    products_row,
    products_channel,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    SUMMED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    row, channel = line // channels, line % channels
    start = tl.program_id(1) * BLOCK
    letter = start + tl.arange(0, BLOCK)
    there = letter < length
    real, imaginary = _complex(turned + line * size * 2, start, size, BLOCK)
    cosine, sine = _complex(turns, start, size, BLOCK)
    y = real * cosine + imaginary * sine
    if BIASED:
        at = row * value_row + channel * value_channel
        z = tl.load(value + at + letter, mask=there, other=0.0).to(tl.float32)
        if GATED:
            at = row * before_row + channel * before_channel
            z = z * tl.load(before + at + letter, mask=there, other=0.0).to(tl.float32)
        y = y + tl.load(bias + channel).to(tl.float32) * z
    one = y
    if FIRST:
        at = row * first_gate_row + channel * first_gate_channel
        gate = tl.load(first_gate + at + letter, mask=there, other=0.0).to(tl.float32)
        one = y * gate
    at = row * first_row + channel * first_channel
    tl.store(first + at + letter, one.to(first.dtype.element_ty), mask=there)
    if SECOND or SUMMED:
        at = row * second_gate_row + channel * second_gate_channel
        other = tl.load(second_gate + at + letter, mask=there, other=0.0).to(tl.float32)
    if SECOND:
        at = row * second_row + channel * second_channel
        tl.store(second + at + letter, (y * other).to(second.dtype.element_ty), mask=there)
    if SUMMED:
        z = z * other
        if FIRST:
            z = z * gate
        at = row * products_row + channel * products_channel
        tl.store(products + at + tl.program_id(1), tl.sum(z))


@triton.jit
def _mix_spectra(
    of_z,
    of_grad,
    of_filter,
    summed,
    rows,
    size,
    z_row,
    grad_row,
    FORWARD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    start = tl.program_id(0) * BLOCK
    line = tl.program_id(1).to(tl.int64) * size * 2
    real, imaginary = _complex(of_filter + line, start, size, BLOCK)
    sum_real, sum_imaginary = _complex(summed + line, start, size, BLOCK)
    z, grad = of_z + line, of_grad + line
    row = 0  # a range would not do for the interpreter
    while row < rows:
        a, b = _complex(z, start, size, BLOCK)
        c, d = _complex(grad, start, size, BLOCK)
        sum_real += c * a + d * b
        sum_imaginary += d * a - c * b
        if FORWARD:
            _write(z, start, size, a * real - b * imaginary, a * imaginary + b * real, BLOCK)
        _write(grad, start, size, c * real + d * imaginary, d * real - c * imaginary, BLOCK)
        z += z_row * 2
        grad += grad_row * 2
        row += 1
    _write(summed + line, start, size, sum_real, sum_imaginary, BLOCK)


@triton.jit
def _complex(source, start, size, BLOCK: tl.constexpr):
    """Real and imaginary parts of neighbours in memory"""
    location = 2 * start + tl.arange(0, 2 * BLOCK)
    pairs = tl.load(source + location, mask=location < 2 * size, other=0.0)
    return tl.split(tl.reshape(pairs, [BLOCK, 2]))


@triton.jit
def _write(target, start, size, real, imaginary, BLOCK: tl.constexpr):
    position = 2 * start + tl.arange(0, 2 * BLOCK)
    pairs = tl.reshape(tl.join(real, imaginary), [2 * BLOCK])
    tl.store(target + position, pairs, mask=position < 2 * size)


_launch_in, _launch_out = Launcher(_turn_in), Launcher(_turn_out)
_launch_mix = Launcher(_mix_spectra)
