"""The memory of a card as a budget: when to act as it fills, and what to change so that a run fits.

Thresholds are shares of the card: 10, 12 and 14 of 16 GB.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from narrowcast.errors import RecipeError, UnsupportedError

MIB = 2**20

Pressure = Literal["fine", "warning", "cleanup", "emergency"]
SHARES: tuple[tuple[Pressure, float], ...] = (
    ("emergency", 14 / 16),
    ("cleanup", 12 / 16),
    ("warning", 10 / 16),
)
"""From which share of the card each begins: save at once, free caches, say so."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """The memory of one device."""

    total_bytes: int
    used_bytes: int = 0
    """What is taken already, by others and by what the driver keeps."""

    def __post_init__(self) -> None:
        if not 0 <= self.used_bytes <= self.total_bytes or self.total_bytes <= 0:
            raise RecipeError(
                f"a card of {self.total_bytes} bytes with {self.used_bytes} used was given; "
                "write a positive total and a use within it"
            )

    @property
    def pressure(self) -> Pressure:
        """How full it is."""
        return pressure(self.used_bytes, total_bytes=self.total_bytes)


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What a run keeps on the card."""

    weights_bytes: int
    gradients_bytes: int
    moments_bytes: int
    activation_bytes_per_item: int
    """In fp32, for one item of a batch."""
    batch: int
    overhead_bytes: int = 1000 * MIB
    """Libraries, workspaces, fragments."""

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise RecipeError(f"batch={self.batch} trains nothing; write at least 1")

    @property
    def base_bytes(self) -> int:
        """What is kept whatever the batch."""
        kept = self.weights_bytes + self.gradients_bytes + self.moments_bytes
        return kept + self.overhead_bytes

    @property
    def whole_bytes(self) -> int:
        """What is needed at the height of a step."""
        return self.base_bytes + self.batch * self.activation_bytes_per_item

    @classmethod
    def of_adam(
        cls, parameters: int, *, batch: int, activation_bytes_per_item: int | None = None
    ) -> "Demand":
        """Return the demand of so many fp32 parameters with Adam: weights, gradients, two moments.

        Where activations are not known, they are guessed by size: 200, 400 or 600 MiB an item.
        """
        if activation_bytes_per_item is None:
            size = 200 if parameters < 500e6 else 400 if parameters < 3e9 else 600
            activation_bytes_per_item = size * MIB
        return cls(
            weights_bytes=4 * parameters,
            gradients_bytes=4 * parameters,
            moments_bytes=8 * parameters,
            activation_bytes_per_item=activation_bytes_per_item,
            batch=batch,
        )


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """How to fit a run on a card; what is False need not change."""

    fits: bool
    """Whether it fits as asked, without anything below."""
    batch: int
    """Items at once."""
    accumulation: int
    """Batches of that size for one step: together they are at least what was asked for."""
    mixed_precision: bool
    checkpointing: bool
    needed_bytes: int
    """With all of it."""
    available_bytes: int
    reasons: tuple[str, ...]

    @property
    def possible(self) -> bool:
        """Whether it fits with all of it."""
        return self.needed_bytes <= self.available_bytes


def card(device: torch.device | None = None) -> Card:
    """Return the memory of a GPU as its driver tells it; waits for nothing."""
    if not torch.cuda.is_available():
        raise UnsupportedError(
            "a card's memory was asked for and there is no GPU; "
            "write Card(total_bytes=..., used_bytes=...)"
        )
    free, total = torch.cuda.mem_get_info(device)
    return Card(total_bytes=total, used_bytes=total - free)


def pressure(used_bytes: int, *, total_bytes: int) -> Pressure:
    """Return what a use of memory calls for."""
    share = used_bytes / total_bytes
    return next((name for name, least in SHARES if share >= least), "fine")


def recommend(card: Card, demand: Demand, *, reserve_bytes: int = 500 * MIB) -> Recommendation:
    """Return what to change so that a demand fits: precision, then checkpointing, then the batch.

    Mixed precision halves activations; checkpointing keeps the root of what layers keep, taken as a
    quarter. Both are estimates: measure before relying on them.
    """
    available = card.total_bytes - card.used_bytes - reserve_bytes
    item, reasons = demand.activation_bytes_per_item, []
    fits = demand.whole_bytes <= available
    saving = demand.batch * item // 2
    mixed = not fits and saving > 100 * MIB
    if mixed:
        item //= 2
        reasons.append(f"mixed precision saves {_mib(saving)} of activations")
    short = demand.base_bytes + demand.batch * item - available
    checkpointing = short > 500 * MIB
    if checkpointing:
        item //= 4
        reasons.append(f"still {_mib(short)} short: checkpointing keeps a quarter of activations")
    room = max(available - demand.base_bytes, 0)
    batch = demand.batch if item == 0 else max(1, min(demand.batch, room // item))
    accumulation = -(-demand.batch // batch)
    if accumulation > 1:
        reasons.append(f"{batch} of {demand.batch} items fit at once: accumulate {accumulation}")
    needed = demand.base_bytes + batch * item
    if needed > available:
        reasons.append(
            f"{_mib(needed)} are needed and {_mib(available)} there: weights, gradients and "
            "moments have to be fewer, narrower, or elsewhere"
        )
    return Recommendation(
        fits=fits,
        batch=batch,
        accumulation=accumulation,
        mixed_precision=mixed,
        checkpointing=checkpointing,
        needed_bytes=needed,
        available_bytes=available,
        reasons=tuple(reasons),
    )


def cleanup_due(step: int, state: Pressure, *, interval: int = 10) -> bool:
    """Say whether caches are freed after this step: now and then while memory is short."""
    return state == "emergency" or (state == "cleanup" and step % interval == 0)


def _mib(count: int) -> str:
    return f"{count / MIB:,.0f} MiB"
