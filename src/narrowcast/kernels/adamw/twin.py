"""The fused optimizer in plain torch, bit for bit except for fused multiply-adds of a GPU.

If a weight differs from its master, it was written to since, and the weight counts. 8-bit moments
have one fp32 scale per 256 elements: sign · (code / 127)² · scale and (code / 255)⁴ · scale,
rounded stochastically.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from narrowcast.numerics.rounding import (
    fitting_compensation,
    join_fp32,
    nearest,
    split,
)

BLOCK = 256
"""Elements of 8-bit moments that share a scale."""
SMALLEST_SCALE = 2.0**-90
"""No smaller scale is kept: its inverse times 255⁴, and itself over 255⁴, are normal numbers."""
HEADROOM = 1 + 2.0**-18
"""A scale is this much larger than the largest of its block, so that no rounding leads beyond."""
MULTIPLIERS = (0xC2B2AE35, 0xD35A2D97)
"""Hash multipliers: of 180 pairs, those with the least correlation up to 4096 places apart."""
LARGEST = {torch.float16: 65504.0, torch.bfloat16: 3.3895313892515355e38}


@dataclass(frozen=True, kw_only=True)
class Hyper:
    """The settings of a parameter group."""

    lr: float | Tensor
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decoupled: bool
    """AdamW's weight decay; False: Adam's, which is added to the gradient."""

    def row(self) -> list[float]:
        """Return the group's row in the kernel's table; a learning rate on a device is 0 there."""
        logs = [math.log(beta) if beta > 0 else -math.inf for beta in self.betas]
        lr = 0.0 if isinstance(self.lr, Tensor) else float(self.lr)
        return [lr, *self.betas, self.eps, self.weight_decay, *logs, float(self.decoupled)]


@dataclass(frozen=True, kw_only=True)
class Ahead:
    """How weights with leads follow the optimizer, which is at the sum of a weight and its lead."""

    back: float
    """How many leads the answer, which is an average of where the optimizer was, is behind."""
    left: float
    """What becomes the lead of the way from the answer to where the optimizer gets."""


AT_HOME = Ahead(back=0.0, left=0.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Weight:
    """A weight and what is stored of it; all of them lie in memory alike."""

    weight: Tensor
    master: str
    """How digits beyond the weight's own are kept; "none" for a weight in fp32."""
    residual: Tensor | None
    """The fp32 copy, the low bits, or the compensation."""
    first: Tensor
    second: Tensor
    first_scale: Tensor | None
    second_scale: Tensor | None
    step: Tensor
    group: int
    average: Tensor | None = None
    """The average of what is kept of the weight, in fp32; it moves with the weight."""
    lead: Tensor | None = None
    """From the weight to where the optimizer is, in fp32 or bf16."""

    @property
    def moments(self) -> str:
        return {torch.float32: "fp32", torch.bfloat16: "bf16"}.get(self.first.dtype, "int8")

    @property
    def make(self) -> tuple[torch.dtype, str, str, bool, str]:
        """What must agree between weights that one launch updates."""
        lead = "none"
        if self.lead is not None:
            lead = "bf16" if self.lead.dtype == torch.bfloat16 else "fp32"
        return self.weight.dtype, self.master, self.moments, self.average is not None, lead

    @property
    def tensors(self) -> list[Tensor]:
        """All that has as many elements as the weight."""
        maybe = [self.weight, self.residual, self.first, self.second, self.average, self.lead]
        return [tensor for tensor in maybe if tensor is not None]


class AdamTwin:
    """As `AdamKernel`, in plain torch. Looks at `finite`, so it is for the CPU and for tests."""

    def __init__(
        self,
        weights: Sequence[Weight],
        *,
        share: float = 0.0,
        ahead: Ahead = AT_HOME,
        before: int = 0,
    ) -> None:
        self.weights, self._share, self._before = list(weights), share, before
        self._ahead = ahead
        self._groups: Sequence[Hyper] = []
        self._counts = torch.zeros(2, dtype=torch.int64)

    def write_hyper(self, groups: Sequence[Hyper], *, ahead: Ahead | None = None) -> None:
        self._groups, self._ahead = groups, ahead or self._ahead

    def step(
        self,
        gradients: Sequence[Tensor | None],
        *,
        factor: Tensor | None,
        finite: Tensor | None,
        metered: bool,
    ) -> Tensor | None:
        """As `AdamKernel.step`."""
        device = self.weights[0].weight.device
        due = torch.zeros((), dtype=torch.int64, device=device)
        lost = torch.zeros_like(due)
        if finite is None or bool(finite):
            for i, (w, g) in enumerate(zip(self.weights, gradients, strict=True)):
                if g is None:
                    continue
                one = factor if factor is None or factor.dim() == 0 else factor[i]
                w.step.add_(1)
                hyper, location = self._groups[w.group], self._before + i
                same = _update(w, g, one, hyper, ahead=self._ahead, location=location)
                if w.average is not None:
                    average = _flat(w.average)
                    average += self._share * (_full(w) - average)
                moving = _flat(g) != 0
                due += moving.sum()
                lost += (moving & same).sum()
        self._counts = torch.stack([lost, due])
        return lost_fraction(self._counts) if metered else None

    def counts(self) -> Tensor:
        """As `AdamKernel.counts`."""
        return self._counts


def lost_fraction(counts: Tensor) -> Tensor:
    """Return lost over due updates, from how many there are of both."""
    return counts[0] / counts[1].clamp(min=1)


def encode(values: Tensor, random: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Return the codes and scales of a flat tensor of moments, rounded by 16 random bits each."""
    blocks = _in_blocks(values)
    # From 1 to 2, in steps of 2**-16; they stand for the middles of these steps.
    chance, middle = _in_blocks(random).float() * 2.0**-16 + 1, 1 - 2.0**-17
    scale = blocks.abs().amax(1, keepdim=True).clamp(min=SMALLEST_SCALE) * HEADROOM
    if signed:
        x = blocks.abs() * (127.0**2 / scale)
        lower = _floor(x.sqrt(), least=0)
        width = 2 * lower + 1
        up = chance * width + (lower * lower - x - width * middle) < 0
        code = torch.where(blocks < 0, -(lower + up), lower + up).to(torch.int8)
    else:
        x = blocks * (255.0**4 / scale)
        # A second moment of zero under a first that is not would be an update of m / eps.
        lower = _floor(blocks.sqrt().sqrt() * (255.0 / scale.sqrt().sqrt()), least=1)
        square = lower * lower
        width = (2 * lower + 1) * (2 * square + 2 * lower + 1)
        up = chance * width + (square * square - x - width * middle) < 0
        code = (lower + up).to(torch.uint8)
    return code.flatten()[: values.numel()], scale.flatten()


def decode(codes: Tensor, scales: Tensor, *, times: float = 1.0) -> Tensor:
    """Return the moments that `encode` kept, or so many times them, as a flat fp32 tensor."""
    code = _in_blocks(codes.flatten()).float()
    if codes.dtype == torch.int8:
        values = code * code.abs() * (scales * (1 / 127**2) * times)[:, None]
    else:
        square = code * code
        values = square * square * (scales * (1 / 255**4) * times)[:, None]
    return values.flatten()[: codes.numel()]


def random_bits(count: int, *, step: float, position: int, device: torch.device) -> Tensor:
    """Return 32 random bits per element, as int64. Use bits 7 and up: the lowest are poor."""
    seed = mix(torch.tensor((int(step) * 0x9E3779B9) & 0xFFFFFFFF) ^ mix(torch.tensor(position)))
    spread, stir = MULTIPLIERS
    x = (torch.arange(count, device=device) * spread + seed) & 0xFFFFFFFF
    x = x ^ (x >> 13)
    return (x * stir) & 0xFFFFFFFF


def mix(x: Tensor) -> Tensor:
    """Return MurmurHash3's finaliser of 32-bit numbers, held in int64."""
    x = x ^ (x >> 16)
    x = (x * 0x85EBCA6B) & 0xFFFFFFFF
    x = x ^ (x >> 13)
    x = (x * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ (x >> 16)


def _update(
    w: Weight, gradient: Tensor, factor: Tensor | None, h: Hyper, *, ahead: Ahead, location: int
) -> Tensor:
    """Update one weight; return where what is stored of it, lead included, is what it was."""
    step, lr = float(w.step), float(h.lr)
    (beta1, beta2), device = h.betas, w.weight.device
    random = torch.zeros((), dtype=torch.int64, device=device)
    if w.moments != "fp32" or w.master == "stochastic":
        random = random_bits(w.weight.numel(), step=step, position=location, device=device)
    old = _full(w)
    start = old if w.lead is None else old + _flat(w.lead).float()
    g = _flat(gradient).float()
    if factor is not None:
        g = g * factor
    m, v = read_moments(w, times=h.betas)
    if h.weight_decay and not h.decoupled:
        g = g + h.weight_decay * start
    new = start - lr * h.weight_decay * start if h.weight_decay and h.decoupled else start
    m = m + (1 - beta1) * g
    v = v + ((1 - beta2) * g) * g
    scale = 1 / math.sqrt(1 - beta2**step)
    new = new - (lr / (1 - beta1**step)) * m * (1 / (v.sqrt() * scale + h.eps))
    _keep_moments(w, m, v, random)
    other = mix(random ^ 0x9E3779B9) >> 16
    if w.lead is None:
        return _keep_weight(w, old, new, other)
    lead = _flat(w.lead)
    answer = old - ahead.back * lead.float()
    lead.copy_(ahead.left * (new - answer))
    _keep_weight(w, old, new - lead.float(), other)
    same: Tensor = new == start
    return same


def _full(w: Weight) -> Tensor:
    extra = None if w.residual is None else _flat(w.residual)
    return join_fp32(_flat(w.weight), extra, kind=w.master)


def _keep_weight(w: Weight, old: Tensor, new: Tensor, random: Tensor) -> Tensor:
    stored, dtype = _flat(w.weight), w.weight.dtype
    if w.residual is not None:
        extra = _flat(w.residual)
    match w.master:
        case "fp32":
            extra.copy_(new)
            stored.copy_(nearest(new, dtype))
            return new == old
        case "split":
            high, low = split(new)
            stored.copy_(high)
            extra.copy_(low)
            return new == old
        case "kahan":
            saved = nearest(new, dtype)
            still = nearest(new - saved.float(), dtype)
            same = (saved == stored) & (still == fitting_compensation(stored, extra))
            extra.copy_(still)
        case _:
            stochastic = w.master == "stochastic"
            saved = randomly(new, random, dtype) if stochastic else nearest(new, dtype)
            same = saved == stored
    stored.copy_(saved)
    return same


def read_moments(w: Weight, *, times: tuple[float, float] = (1.0, 1.0)) -> tuple[Tensor, Tensor]:
    """Return both moments, or so many times them, in fp32, flat, in the order of memory."""
    one, other = times
    if w.first_scale is None or w.second_scale is None:
        return one * _flat(w.first).float(), other * _flat(w.second).float()
    return (
        decode(_flat(w.first), w.first_scale, times=one),
        decode(_flat(w.second), w.second_scale, times=other),
    )


def _keep_moments(w: Weight, m: Tensor, v: Tensor, random: Tensor) -> None:
    stored = [m, v]
    if w.first_scale is not None and w.second_scale is not None:
        stored[0], first_scale = encode(m, (random >> 7) & 0xFFFF, signed=True)
        stored[1], second_scale = encode(v, random >> 16, signed=False)
        w.first_scale.copy_(first_scale)
        w.second_scale.copy_(second_scale)
    elif w.first.dtype == torch.bfloat16:
        stored = [
            randomly(m, (random >> 7) & 0xFFFF, torch.bfloat16),
            randomly(v, random >> 16, torch.bfloat16),
        ]
    _flat(w.first).copy_(stored[0])
    _flat(w.second).copy_(stored[1])


def randomly(x: Tensor, random: Tensor, dtype: torch.dtype) -> Tensor:
    """Round up or down by chance, given 16 random bits for each, so that the expectation is `x`."""
    if dtype == torch.float32:
        return x
    limit = LARGEST[dtype]
    x = x.clamp(-limit, limit)
    bits = x.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    if dtype == torch.bfloat16:
        high = torch.where(x == x, (bits + random) >> 16, 0x7FC0)
        return high.to(torch.int16).view(torch.bfloat16)
    normal = ((bits + (random >> 3)) & 0xFFFFE000).to(torch.int32).view(torch.float32)
    steps = x * 2.0**24  # of 2**-24, the spacing below 2**-14
    up = (random.float() + 0.5) * (1 / 65536) < steps - steps.floor()
    subnormal = (steps.floor() + up) * 2.0**-24
    return torch.where(x.abs() < 2.0**-14, subnormal, normal).to(dtype)


def _floor(x: Tensor, *, least: int) -> Tensor:
    return x.floor().clamp(min=least)


def _flat(tensor: Tensor) -> Tensor:
    """Return the elements in the order of memory, as a view."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _in_blocks(values: Tensor) -> Tensor:
    missing = -values.numel() % BLOCK
    return torch.nn.functional.pad(values, (0, missing)).view(-1, BLOCK)
