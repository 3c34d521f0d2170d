"""What each of several ranks stores and sends per step: predicted from the plan, not measured."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from narrowcast.precision.plan.plan import Plan

Strategy = Literal["ddp", "fsdp", "hsdp"]
FITS = 0.6
"""Part of a GPU's memory for weights, gradients and optimizer state up to which DDP is used."""
_SHARDED = ("params", "grads", "master", "moments", "lookahead", "average")
_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, kw_only=True)
class RankCosts:
    """Predicted memory and traffic of one rank."""

    ranks: int
    strategy: Strategy
    shard: int
    """Ranks that share one copy of the weights; 1 under DDP."""
    bytes: Mapping[str, int] = field(default_factory=dict)
    """Device memory per rank by role, with communication buffers, without activations."""
    traffic: Mapping[str, int] = field(default_factory=dict)
    """Bytes that a rank sends per step, by collective."""

    def seconds(self, *, link_rate: float, network_rate: float, per_node: int) -> float:
        """Return how long the traffic takes if nothing overlaps it; rates are in GB/s per GPU.

        A ring of several machines is as fast as its slowest hop.
        """
        within = {"all-gather": self.shard, "reduce-scatter": self.shard}
        return sum(
            sent / ((link_rate if within.get(name, self.ranks) <= per_node else network_rate) * 1e9)
            for name, sent in self.traffic.items()
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


def choose_strategy(plan: Plan, requested: str, *, ranks: int, per_machine: int) -> Strategy:
    """Return the strategy; `auto` shards what would take most of a GPU, per machine if several."""
    if requested in get_args(Strategy):
        strategy: Strategy = requested  # type: ignore[assignment]
        return strategy
    memory, is_gpu = plan.hardware.memory_bytes, plan.hardware.device.startswith("cuda")
    if not is_gpu or memory is None or sum(plan.bytes.values()) <= FITS * memory:
        return "ddp"
    return "hsdp" if per_machine < ranks else "fsdp"


def rank_costs(
    plan: Plan, *, ranks: int, strategy: Strategy, shard: int | None = None, micro_batches: int = 1
) -> RankCosts:
    """Predict what one of several ranks stores and sends per step.

    Args:
        plan: The plan of the whole model.
        ranks: Number of ranks.
        strategy: `ddp`, `fsdp` or `hsdp`.
        shard: Ranks that share one copy of the weights under `hsdp`.
        micro_batches: Micro-batches per step. FSDP gathers weights in each of them, and reduces
            gradients, which are whole until then, in the last.

    Returns:
        The prediction. Rings are assumed, which send the least.
    """
    weights, grads = plan.bytes.get("params", 0), plan.bytes.get("grads", 0)
    if strategy == "ddp":
        # DDP copies gradients into buckets, which it adds up in their own format.
        stored = {**plan.bytes, "buckets": grads}
        traffic = {"all-reduce": _ring(2 * grads, ranks)}
        return RankCosts(ranks=ranks, strategy=strategy, shard=1, bytes=stored, traffic=traffic)
    size = ranks if strategy == "fsdp" else shard or ranks
    stored = {
        role: math.ceil(n / size) if role in _SHARDED else n for role, n in plan.bytes.items()
    }
    elements = sum(each.parameters for each in plan.modules)
    reduced = elements * _BYTES[plan.policy.reduce]
    # The block that is computed and the next one are whole; so are the gradients of one.
    block = max(_blocks(plan).values(), default=0)
    stored["gathered"] = 2 * block + math.ceil(block * reduced / max(weights, 1))
    if micro_batches > 1:
        stored["accumulated"] = reduced
    traffic = {
        "all-gather": micro_batches * _ring(2 * weights, size),
        "reduce-scatter": _ring(reduced, size),
    }
    if strategy == "hsdp" and ranks > size:
        traffic["all-reduce"] = _ring(2 * math.ceil(reduced / size), ranks // size)
    return RankCosts(ranks=ranks, strategy=strategy, shard=size, bytes=stored, traffic=traffic)


def _ring(total: int, ranks: int) -> int:
    """Return what each rank of a ring sends of `total` bytes."""
    return math.ceil(total * (ranks - 1) / ranks)


def _blocks(plan: Plan) -> dict[str, int]:
    """Return the bytes of weights by block: up to the first number of a name; the rest is one."""
    sizes: dict[str, int] = {}
    for module in plan.modules:
        parts = module.name.split(".")
        numbers = [i for i, part in enumerate(parts) if part.isdecimal()]
        block = ".".join(parts[: numbers[0] + 1]) if numbers else ""
        sizes[block] = sizes.get(block, 0) + module.bytes.get("params", 0)
    return sizes
