"""A toy network of every seed: built, trained, checked and frozen, with what is known of it."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, final

import torch
from torch import Generator, Tensor, nn

from narrowcast.errors import CheckpointError, ConfigError
from narrowcast.workloads.decompose.targets.pretrain import Pretraining, Trainable, pretrain


@final
@dataclass(frozen=True, kw_only=True)
class Truth:
    """What the components of a site are known to be.

    `identity`: one component a feature, important where its feature is there and nowhere else.
    `dense`: `size` components that any feature may use, and no others.
    """

    kind: Literal["identity", "dense"]
    size: int
    along: Literal["inputs", "outputs"] | None = None
    """Where a feature is one column of the site's weight, or one row; none: neither."""


class Drawn(Protocol):
    """Samples without end, drawn on the device that uses them."""

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
class ToyPlan:
    """A kind of toy network: how it is made and trained, and what is known of it."""

    name: str
    build: Callable[[int, Generator], nn.Module]
    """Returns the networks of so many seeds, on the generator's device; a `Trainable`."""
    data: Drawn
    pretraining: Pretraining
    check: Callable[[nn.Module, Callable[[int], Tensor]], None]
    """Refuses networks that have not learnt; is given them, and batches to ask them about."""
    sites: Mapping[str, int]
    tied: Mapping[str, str] = field(default_factory=dict)
    truth: Mapping[str, Truth] = field(default_factory=dict)
    probe: Tensor | None = None
    divergence: Literal["mse", "kl"] = "mse"
    length: int = 1
    """Positions of a sample, of which sites see each."""


@final
@dataclass(frozen=True, kw_only=True)
class Toy:
    """A trained toy network of every seed, and what is known of it."""

    name: str
    target: nn.Module
    """Frozen, on its device; takes (seeds, batch, ...) and returns (seeds, batch, outputs)."""
    draw: Callable[[int], Tensor]
    """Returns a batch (seeds, batch, ...), drawn on the device from its own generator."""
    divergence: Literal["mse", "kl"]
    """How outputs are compared."""
    sites: Mapping[str, int]
    """Patterns of the modules to decompose, and how many components each is given."""
    tied: Mapping[str, str]
    """Sites whose weight is that of another, transposed."""
    truth: Mapping[str, Truth]
    """What is known of the components of a site, by its name."""
    probe: Tensor | None
    """(seeds, features, features): each feature alone; none where inputs are no features."""
    pretraining: Pretraining
    length: int
    """Positions of a sample."""


def make_toy(
    plan: ToyPlan,
    *,
    seeds: int,
    seed: int,
    device: torch.device | str,
    trained: Mapping[str, Tensor] | None = None,
) -> Toy:
    """Return the networks of a plan, trained from `seed` and checked; waits for the device.

    Their randomness is their own: the generators of the process stay as they were. `trained` is
    the state of a target that was trained before, which is then not done again. On the meta device
    only shapes count: nothing is trained, and nothing checked.
    """
    device = torch.device(device)
    real = torch.device("cpu") if device.type == "meta" else device
    generator = Generator(real).manual_seed(_own_seed(seed))
    network = plan.build(seeds, generator)

    def own(batch: int) -> Tensor:
        return plan.data.draw(seeds, batch, device=real, generator=generator)

    if trained is not None:
        _load(plan.name, network, trained)
    elif device.type != "meta":
        assert isinstance(network, Trainable)
        pretrain(network, own, plan.pretraining)
    network.requires_grad_(False)
    if device.type != "meta":
        with torch.no_grad():
            try:
                plan.check(network, own)
            except ConfigError as error:
                how = plan.pretraining
                raise ConfigError(
                    f"{error}. It was trained with model.pretrain_steps={how.steps} and "
                    f"model.pretrain_batch_size={how.batch_size}. Write a larger one, or another "
                    "seed."
                ) from error
    probe = None if plan.probe is None else plan.probe.to(device).expand(seeds, -1, -1)
    return Toy(
        name=plan.name,
        target=network.to(device).eval(),
        draw=lambda batch: plan.data.draw(seeds, batch, device=device),
        divergence=plan.divergence,
        sites=plan.sites,
        tied=plan.tied,
        truth=plan.truth,
        probe=probe,
        pretraining=plan.pretraining,
        length=plan.length,
    )


def _own_seed(seed: int) -> int:
    # Not the seed itself: the components of a decomposition begin from that, and would begin with
    # the very numbers that the target began with.
    return int.from_bytes(hashlib.sha256(f"toy target {seed}".encode()).digest()[:7])


def _load(name: str, network: nn.Module, trained: Mapping[str, Tensor]) -> None:
    expected = {key: tuple(value.shape) for key, value in network.state_dict().items()}
    results = {key: tuple(value.shape) for key, value in trained.items()}
    if results != expected:
        differing = sorted({key for key, _ in results.items() ^ expected.items()})
        raise CheckpointError(
            f"The saved weights of target {name} belong to another network: "
            f"{', '.join(differing[:4])} differ. Start a new run."
        )
    network.load_state_dict(dict(trained))
