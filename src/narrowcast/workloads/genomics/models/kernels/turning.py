"""What is done to sequences before and after a transform, each in one pass over memory.

`turn_in` gates a sequence, turns letter t by a^t and writes complex numbers in fp32: it reads 4
bytes a letter of two gated 16-bit sequences and writes 8. `turn_out` turns back, takes the real
part, adds the bias and gates: it reads 8 bytes and the gates, and writes 2 or 4. `mix_spectra`
makes of two spectra all that a backward pass needs, reading and writing each once.

A transform that is too long for one pass over memory is cut into `ways` shorter ones: number k + n
of its spectrum is number n / ways of the k-th, whose input is a sum over letters `size / ways`
apart, each turned by an angle of its own (Cooley and Tukey). These sums are made in `turn_in`, and
undone in `turn_out`, from numbers that are there already.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024  # letters of a program, 8 for each of 128 threads
_BLOCK_OF_WAYS = 512  # of one that reads each number several times, and so wants them in its cache


@dataclass(frozen=True)
class Turns:
    """By what letters are turned, for one long transform as several shorter ones."""

    near: Tensor
    """Of letter t of the first short one, for the k-th: exp(−2πi t (k − 1/4) / size), (ways, …)."""
    far: Tensor
    """What it takes from there to the r-th: (ways, ways), of r and k."""

    @classmethod
    def of(cls, size: int, *, ways: int, device: torch.device) -> "Turns":
        """Return the turns for transforms of `size` numbers, cut `ways` ways."""
        short = size // ways
        k = torch.arange(ways, device=device) * 4 - 1
        t = torch.arange(short, device=device)
        r = torch.arange(ways, device=device) * short
        # Whole numbers of 4 · size to a turn, so that no angle is large.
        near, far = (k[:, None] * t) % (4 * size), (r[:, None] * k) % (4 * size)
        return cls(_unit(near, 4 * size), _unit(far, 4 * size))

    @property
    def ways(self) -> int:
        """Into how many short transforms a long one is cut."""
        return self.near.shape[0]

    @property
    def short(self) -> int:
        """Numbers of a short transform."""
        return self.near.shape[1]

    @property
    def block(self) -> int:
        """Letters that a program turns at once."""
        return _BLOCK if self.ways == 1 else _BLOCK_OF_WAYS

    @property
    def blocks(self) -> int:
        """How many sums `turn_out` writes for a sequence."""
        return self.ways * -(-self.short // self.block)


def turn_in(value: Tensor, before: Tensor | None, turns: Turns, *, out: Tensor) -> None:
    """Write value ⊙ before, letter t times a^t, as the inputs of short transforms to `out`.

    Sequences are (rows, channels, length), and `out` is (rows, channels, ways, short).
    """
    rows, channels, length = value.shape
    value, before = _lined_up(value), None if before is None else _lined_up(before)
    second = value if before is None else before
    _turn_in[(rows * channels, triton.cdiv(turns.short, turns.block))](
        value,
        second,
        torch.view_as_real(turns.near),
        torch.view_as_real(turns.far),
        torch.view_as_real(out),
        channels,
        length,
        turns.short,
        *value.stride()[:2],
        *second.stride()[:2],
        GATED=before is not None,
        WAYS=turns.ways,
        BLOCK=turns.block,
        num_warps=4,
    )


def turn_out(
    turned: Tensor,
    turns: Turns,
    *,
    value: Tensor,
    before: Tensor | None,
    bias: Tensor | None,
    gates: tuple[Tensor | None, Tensor | None],
    outs: tuple[Tensor, Tensor | None],
    products: Tensor | None = None,
) -> None:
    """Write gates ⊙ (y + bias ⊙ z) to `outs`, for y the sequence of which `turned` was made.

    z is value ⊙ before. To `products`, (rows, channels, blocks), sums of z ⊙ gates[0] ⊙ gates[1]
    are written for each block of letters, where there is a bias.
    """
    rows, channels, length = value.shape
    given = [_lined_up(value if t is None else t) for t in (value, before, *gates)]
    first, second = outs[0], outs[0] if outs[1] is None else outs[1]
    _turn_out[(rows * channels, triton.cdiv(turns.short, turns.block))](
        torch.view_as_real(turned),
        torch.view_as_real(turns.near),
        torch.view_as_real(turns.far),
        *given,
        first if bias is None else bias,
        first,
        second,
        first if products is None else products,
        channels,
        length,
        turns.short,
        *[step for each in (*given, first, second) for step in each.stride()[:2]],
        *((0, 0) if products is None else products.stride()[:2]),
        GATED=before is not None,
        BIASED=bias is not None,
        FIRST=gates[0] is not None,
        SECOND=outs[1] is not None,
        SUMMED=products is not None,
        WAYS=turns.ways,
        BLOCK=turns.block,
        num_warps=4,
    )


def mix_spectra(
    of_z: Tensor, of_grad: Tensor, of_filter: Tensor, summed: Tensor, *, forward: bool
) -> None:
    """Multiply spectra of gradients by the conjugate of their filter's, in place.

    With `forward`, those of sequences by the filter's too. Add the sum over rows of gradients times
    conjugate sequences to `summed`, (channels, size): the spectra of the gradients of filters.
    """
    rows, channels, size = of_z.flatten(2).shape
    _mix_spectra[(triton.cdiv(size, _BLOCK // 2), channels)](
        *(torch.view_as_real(each) for each in (of_z, of_grad, of_filter, summed)),
        rows,
        size,
        of_z.stride(0),
        of_grad.stride(0),
        FORWARD=forward,
        BLOCK=_BLOCK // 2,
        num_warps=4,
    )


def _lined_up(x: Tensor) -> Tensor:
    """Return a tensor whose letters lie side by side."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _unit(steps: Tensor, of: int) -> Tensor:
    angles = steps.double() * (-2 * math.pi / of)
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)


@triton.jit
def _turn_in(
    value,
    before,
    near,
    far,
    out,
    channels,
    length,
    short,
    value_row,
    value_channel,
    before_row,
    before_channel,
    GATED: tl.constexpr,
    WAYS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    row, channel = line // channels, line % channels
    start = tl.program_id(1) * BLOCK
    value += row * value_row + channel * value_channel
    before += row * before_row + channel * before_channel
    out += line * WAYS * short * 2
    for k in range(WAYS):
        real = tl.zeros([BLOCK], tl.float32)
        imaginary = tl.zeros([BLOCK], tl.float32)
        for r in range(WAYS):
            letter = r * short + start + tl.arange(0, BLOCK)
            # What is past the end of a short one is not written.
            there = letter < length
            z = tl.load(value + letter, mask=there, other=0.0).to(tl.float32)
            if GATED:
                z = z * tl.load(before + letter, mask=there, other=0.0).to(tl.float32)
            real += z * tl.load(far + (r * WAYS + k) * 2)
            imaginary += z * tl.load(far + (r * WAYS + k) * 2 + 1)
        cosine, sine = _complex(near + k * short * 2, start, short, BLOCK)
        turned_real = real * cosine - imaginary * sine
        turned_imaginary = real * sine + imaginary * cosine
        _write(out + k * short * 2, start, short, turned_real, turned_imaginary, BLOCK)


@triton.jit
def _turn_out(
    turned,
    near,
    far,
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
    short,
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
    WAYS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    row, channel = line // channels, line % channels
    start = tl.program_id(1) * BLOCK
    within = start + tl.arange(0, BLOCK)
    turned += line * WAYS * short * 2
    for r in range(WAYS):
        letter = r * short + within
        there = (letter < length) & (within < short)
        y = tl.zeros([BLOCK], tl.float32)
        for k in range(WAYS):
            a, b = _complex(turned + k * short * 2, start, short, BLOCK)
            cosine, sine = _complex(near + k * short * 2, start, short, BLOCK)
            # Back by both turns: times their conjugates, of which the real part is kept.
            real, imaginary = a * cosine + b * sine, b * cosine - a * sine
            y += real * tl.load(far + (r * WAYS + k) * 2)
            y += imaginary * tl.load(far + (r * WAYS + k) * 2 + 1)
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
            block = r * tl.num_programs(1) + tl.program_id(1)
            tl.store(products + at + block, tl.sum(z))


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
    place = 2 * start + tl.arange(0, 2 * BLOCK)
    pairs = tl.load(source + place, mask=place < 2 * size, other=0.0)
    return tl.split(tl.reshape(pairs, [BLOCK, 2]))


@triton.jit
def _write(target, start, size, real, imaginary, BLOCK: tl.constexpr):
    place = 2 * start + tl.arange(0, 2 * BLOCK)
    pairs = tl.reshape(tl.join(real, imaginary), [2 * BLOCK])
    tl.store(target + place, pairs, mask=place < 2 * size)
