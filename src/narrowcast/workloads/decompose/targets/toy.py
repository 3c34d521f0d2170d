"""Toy networks of every seed at once: data, layers, training, checks, and the known components.

Toys are checked first: the decomposition of a network with zero outputs has perfect losses.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol, final, runtime_checkable

import torch
from torch import Generator, Tensor, nn

from narrowcast.errors import ConfigError

PROBE = 0.75
"""Size of a probed feature: inside every range, off its ends."""
TOLERANCE = 0.25
"""Tolerance around the wanted 0.75 of a feature; learnt ones fall short by 0.03 to 0.14."""
MOST_NAMED = 8


@final
@dataclass(frozen=True, kw_only=True)
class Truth:
    """The known components of a site: one per feature (`identity`), or `size` shared (`dense`)."""

    kind: Literal["identity", "dense"]
    size: int
    along: Literal["inputs", "outputs"] | None = None
    """Whether a feature is one column of the site's weight, or one row; None: neither."""


class Drawn(Protocol):
    """Samples drawn on the device that uses them, so that a CUDA graph draws new ones."""

    def draw(
        self,
        seeds: int,
        batch: int,
        *,
        device: torch.device | str,
        generator: Generator | None = None,
    ) -> Tensor:
        """Return (seeds, batch, ...) from the generator, or from the device's own."""
        ...


@final
@dataclass(frozen=True, kw_only=True)
class SparseFeatures:
    """Features that are each present with one probability, and then uniform over a range."""

    features: int
    probability: float
    low: float = 0.0
    high: float = 1.0

    def draw(
        self,
        seeds: int,
        batch: int,
        *,
        device: torch.device | str,
        generator: Generator | None = None,
    ) -> Tensor:
        shape = (seeds, batch, self.features)
        # One draw decides both: whether it is below the probability, and where below.
        share = torch.rand(shape, device=device, generator=generator).div_(self.probability)
        present = share < 1
        if (self.low, self.high) != (0.0, 1.0):
            share = share.mul_(self.high - self.low).add_(self.low)
        return share.mul_(present)

    def probe(self, *, device: torch.device | str) -> Tensor:
        """Return (features, features): each feature alone."""
        return PROBE * torch.eye(self.features, device=device)


@final
class SeededLinear(nn.Module):
    """`nn.Linear` per seed, with weights of zero; the first dimension of the input is the seed."""

    def __init__(
        self,
        seeds: int,
        d_in: int,
        d_out: int,
        *,
        bias: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.seeds, self.d_in, self.d_out = seeds, d_in, d_out
        self.weight = nn.Parameter(torch.zeros(seeds, d_out, d_in, device=device))
        self.bias = nn.Parameter(torch.zeros(seeds, d_out, device=device)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(1, -2)  # (seeds, rows, d_in)
        if self.bias is None:
            product = torch.bmm(rows, self.weight.mT)
        else:
            product = torch.baddbmm(self.bias[:, None], rows, self.weight.mT)
        return product.view(*x.shape[:-1], self.d_out)


@final
@dataclass(frozen=True, kw_only=True)
class Pretraining:
    """Settings of a toy's training by AdamW, on batches drawn anew."""

    steps: int
    batch_size: int
    lr: float
    schedule: Literal["constant", "cosine"] = "constant"
    weight_decay: float = 0.01


@runtime_checkable
class Trainable(Protocol):
    """Networks of all seeds that can be trained together."""

    def learnt(self) -> list[nn.Parameter]:
        """Return the parameters that are trained."""
        ...

    def loss(self, x: Tensor) -> Tensor:
        """Return the loss of each seed (seeds,) on a batch."""
        ...

    def settle(self) -> None:
        """Update what follows from the trained parameters."""
        ...


def pretrain(network: Trainable, draw: Callable[[int], Tensor], how: Pretraining) -> None:
    """Train, drawing a batch of a given size for every step; nothing waits for the device."""
    optimizer = torch.optim.AdamW(
        network.learnt(), lr=how.lr, weight_decay=how.weight_decay, fused=True
    )
    (group,) = optimizer.param_groups
    for step in range(how.steps):
        if how.schedule == "cosine":
            group["lr"] = how.lr * (1 + math.cos(math.pi * step / how.steps)) / 2
        optimizer.zero_grad()
        # The sum: no seed's gradient touches another's.
        network.loss(draw(how.batch_size)).sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    network.settle()


def check_features(
    name: str, *, inputs: Tensor, wanted: Tensor, tolerance: float = TOLERANCE
) -> None:
    """Raise unless the outputs (seeds, features, features) of single features are as wanted."""
    wrong = (~((inputs - wanted).abs() <= tolerance)).any(dim=2).sum(dim=1)
    if not wrong.any():
        return
    dead = (inputs == 0).all(dim=2).all(dim=1) | ~inputs.isfinite().all(dim=2).all(dim=1)
    if dead.any():
        fact = f"{_seeds(dead)}: all outputs are 0, inf or NaN"
    else:
        fact = (
            f"{_seeds(wrong > 0)}: the outputs for up to {int(wrong.max())} of {wanted.shape[1]} "
            f"features are wrong by more than {tolerance:g}"
        )
    raise ConfigError(f"model.toy={name} did not learn its task. {fact}")


def check_accuracy(name: str, *, accuracy: Tensor, least: float) -> None:
    """Raise for networks of a lower accuracy; waits for the device."""
    wrong = ~(accuracy >= least)
    if wrong.any():
        raise ConfigError(
            f"model.toy={name} did not learn its task. {_seeds(wrong)}: accuracy must be at least "
            f"{least:.0%}, got {float(accuracy.min()):.0%}"
        )


def _seeds(wrong: Tensor) -> str:
    which = wrong.nonzero().flatten().tolist()
    named = ", ".join(str(seed) for seed in which[:MOST_NAMED])
    more = f" and {len(which) - MOST_NAMED} more" if len(which) > MOST_NAMED else ""
    return f"seed{'s' if len(which) > 1 else ''} {named}{more} of {len(wrong)} (counted from 0)"


@dataclass(frozen=True, kw_only=True, eq=False)
class ToyPlan:
    """A kind of toy network: how it is made and trained, and what is known of it."""

    name: str
    build: Callable[[int, Generator], nn.Module]
    """Returns the networks of so many seeds, on the generator's device; a `Trainable`."""
    data: Drawn
    pretraining: Pretraining
    check: Callable[[nn.Module, Callable[[int], Tensor]], None]
    """Raises for networks that did not learn, from batches that the function draws."""
    sites: Mapping[str, int]
    """Patterns of the modules to decompose, and their numbers of components."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Sites whose weight is that of another, transposed."""
    truth: Mapping[str, Truth] = field(default_factory=dict)
    probe: Tensor | None = None
    """(seeds, features, features): each feature alone; None if inputs are not features."""
    divergence: Literal["mse", "kl"] = "mse"
    length: int = 1
    """Positions per sample."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Toy(ToyPlan):
    """Trained and frozen toy networks of every seed, to decompose."""

    target: nn.Module
    """Takes (seeds, batch, ...) and returns (seeds, batch, outputs)."""
    draw: Callable[[int], Tensor]
    """Returns a batch (seeds, batch, ...), drawn on the device from its own generator."""
    digest: str
    output: ClassVar[None] = None
    batch_dim: ClassVar[int] = 1
    unit: ClassVar[str] = "sample"

    def train_data(self, batch_size: int) -> Sequence[int]:
        """Return numbers of one batch; the samples are drawn in the loss."""
        return range(batch_size)

    def shown(self, inputs: Tensor) -> Tensor:
        return self.draw(inputs.shape[0])

    def judged_on(self, number: int, count: int) -> Tensor:
        return self.draw(count)


def make_toy(
    plan: ToyPlan, *, seeds: int, seed: int, device: torch.device | str, trained: bool = True
) -> Toy:
    """Train and check the networks of a plan, with their own generator; not on the meta device."""
    device = torch.device(device)
    real = torch.device("cpu") if device.type == "meta" else device
    # Not the seed itself: the components of a decomposition begin from that, and would begin with
    # the very numbers that the target began with.
    own_seed = int.from_bytes(hashlib.sha256(f"toy target {seed}".encode()).digest()[:7])
    generator = Generator(real).manual_seed(own_seed)
    network = plan.build(seeds, generator)

    def own(batch: int) -> Tensor:
        return plan.data.draw(seeds, batch, device=real, generator=generator)

    if trained and device.type != "meta":
        assert isinstance(network, Trainable)
        how = plan.pretraining
        pretrain(network, own, how)
        try:
            with torch.no_grad():
                plan.check(network, own)
        except ConfigError as error:
            raise ConfigError(
                f"{error}. It was trained with model.pretrain_steps={how.steps} and "
                f"model.pretrain_batch_size={how.batch_size}. Write a larger one, or another seed."
            ) from error
    probe = None if plan.probe is None else plan.probe.to(device).expand(seeds, -1, -1)
    return Toy(
        **vars(plan) | {"probe": probe},
        target=network.requires_grad_(False).to(device).eval(),
        draw=lambda batch: plan.data.draw(seeds, batch, device=device),
        digest=f"{plan.name}, drawn from seed {seed}",
    )
