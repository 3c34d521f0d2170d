"""Depthwise convolution of three taps from positions first to channels first; deterministic."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowcast.kernels.launch import Launcher

TAPS = 3
_LENGTH, _CHANNELS = 64, 64  # of a program's tile, which turns in shared memory


def short_forward(x: Tensor, weight: Tensor, bias: Tensor, left: int) -> Tensor:
    """Return (rows, channels, length) of (rows, length, channels); `left` taps look back."""
    rows, length, channels = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = x.new_empty((rows, channels, length))
    _launch_forward(
        (rows, -(-length // _LENGTH), -(-channels // _CHANNELS)),
        (x, weight, bias, out),
        (length, channels, *x.stride()[:2], left),
        (_LENGTH, _CHANNELS),
        num_warps=4,
    )
    return out


def short_backward(
    grad: Tensor, x: Tensor, weight: Tensor, left: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the sequences, the taps and the bias."""
    rows, length, channels = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    grad = grad if grad.stride(-1) == 1 or length == 1 else grad.contiguous()
    to_x = x.new_empty((rows, length, channels))
    blocks = -(-length // _LENGTH)
    sums = torch.empty((rows * blocks, TAPS + 1, channels), device=x.device)
    _launch_backward(
        (rows, blocks, -(-channels // _CHANNELS)),
        (grad, x, weight, to_x, sums),
        (length, channels, *x.stride()[:2], *grad.stride()[:2], left),
        (_LENGTH, _CHANNELS),
        num_warps=8,
    )
    summed = sums.sum(0)
    return to_x, summed[:TAPS].t().to(weight.dtype), summed[TAPS].to(weight.dtype)


@triton.jit
def _forward(
    x,
    weight,
    bias,
    out,
    length,
    channels,
    x_row,
    x_position,
    left,
    LENGTH: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    position = tl.program_id(1) * LENGTH + tl.arange(0, LENGTH)
    channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < channels
    total = tl.zeros([LENGTH, CHANNELS], tl.float32)
    total += tl.load(bias + channel, mask=known, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(3):
        location = position - left + tap
        inside = ((location >= 0) & (location < length))[:, None] & known[None, :]
        at = row * x_row + location.to(tl.int64)[:, None] * x_position + channel[None, :]
        seen = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        total += seen * tl.load(weight + channel * 3 + tap, mask=known, other=0.0)[None, :]
    at = (row * channels + channel.to(tl.int64)[None, :]) * length + position[:, None]
    inside = (position < length)[:, None] & known[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    grad,
    x,
    weight,
    to_x,
    sums,
    length,
    channels,
    x_row,
    x_position,
    grad_row,
    grad_channel,
    left,
    LENGTH: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    position = tl.program_id(1) * LENGTH + tl.arange(0, LENGTH)
    channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < channels
    here = (position < length)[:, None] & known[None, :]
    at = row * x_row + position.to(tl.int64)[:, None] * x_position + channel[None, :]
    seen = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
    total = tl.zeros([LENGTH, CHANNELS], tl.float32)
    line = sums + (row * tl.num_programs(1) + tl.program_id(1)) * 4 * channels + channel
    for tap in tl.static_range(3):
        location = position + left - tap
        inside = ((location >= 0) & (location < length))[:, None] & here
        at = row * grad_row + channel.to(tl.int64)[None, :] * grad_channel + location[:, None]
        inputs = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        total += inputs * tl.load(weight + channel * 3 + tap, mask=known, other=0.0)[None, :]
        tl.store(line + tap * channels, tl.sum(inputs * seen, axis=0), mask=known)
        if tap == left:
            tl.store(line + 3 * channels, tl.sum(inputs, axis=0), mask=known)
    at = (row * length + position.to(tl.int64)[:, None]) * channels + channel[None, :]
    tl.store(to_x + at, total.to(to_x.dtype.element_ty), mask=here)


_launch_forward, _launch_backward = Launcher(_forward), Launcher(_backward)
