"""Faults on one of several ranks: whether all ranks skip the same steps, and no weight is touched.

Run: python benchmarks/rank_faults.py [--faults N] [--ranks N] [--seed N] [--json PATH]

Threads are the ranks, so that thousands of steps take minutes. Every second step is spoiled at
random: the rank, the micro-batch, the value (inf, -inf, NaN) and the place are drawn. Places are
the input, the loss, the gradient of an activation, and one shard of a gradient after the backward
pass, which no other rank sees. DDP has no such shard: its ranks hold equal gradients. A step counts
as right if all ranks skip it, their loss scales are equal afterwards, and all weights are the same
as before, bit for bit. Steps in between must be applied by all ranks.
"""

import argparse
import itertools
import json
import math
import random
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import narrowcast as nc
from narrowcast.runs import describe_machine

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.ranks import on_ranks

LAYOUTS = ("DDP", "FSDP2", "HSDP", "two meshes", "partly sharded")
POLICIES = ("fp32", "bf16", "fp16", "bf16, params=bf16, master=split", "fp8-delayed")
OPTIMIZERS = ("AdamW", "fused", "SGD")
PLACES = ("input", "loss", "activation gradient", "gradient shard")
VALUES = (math.inf, -math.inf, math.nan)
MICRO_BATCHES = 2
_building = threading.Lock()  # threads share torch's global generator


class Network(nn.Sequential):
    """Four layers, with a place for a fault in the gradient of an activation."""

    def forward(self, rows: Tensor, factor: float | None = None) -> Tensor:
        hidden: Tensor = self[1](self[0](rows))
        if factor is not None:
            hidden.register_hook(lambda grad: grad * factor)
        return self[3](self[2](hidden)).square().mean()  # type: ignore[no-any-return]


def build(layout: str, ranks: int) -> nn.Module:
    with _building:
        torch.manual_seed(0)
        model = Network(nn.Linear(12, 18), nn.LayerNorm(18), nn.GELU(), nn.Linear(18, 5))
    if layout == "DDP":
        return model
    flat = init_device_mesh("cpu", (ranks,))
    both = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
    meshes = {
        "FSDP2": (flat, flat, flat),
        "HSDP": (both, both, both),
        "two meshes": (both, flat, flat),
        "partly sharded": (flat, None, flat),
    }[layout]
    for layer, mesh in zip((model[0], model[1], model[3]), meshes, strict=True):
        if mesh is not None:
            fully_shard(layer, mesh=mesh)
    return model


def prepare(model: nn.Module, policy: str, optimizer: str) -> nc.Prepared:
    kinds: dict[str, Any] = {"SGD": torch.optim.SGD}
    made = kinds.get(optimizer, torch.optim.AdamW)(model.parameters(), lr=1e-3)
    return nc.prepare(
        model,
        made,
        policy=policy,
        clip_norm=1.0,
        loss_scale=nc.LossScale(growth_interval=2) if policy == "fp16" else None,
        fused_optimizer=True if optimizer == "fused" else None,
        max_skipped_steps=10**6,
    )


def run_cell(
    rank: int, ranks: int, layout: str, policy: str, optimizer: str, faults: list[dict[str, Any]]
) -> list[tuple[Any, ...]]:
    """Train on one rank; return per step what it decided and whether its weights changed."""
    model = build(layout, ranks)
    run = prepare(model, policy, optimizer)
    called = DistributedDataParallel(model) if layout == "DDP" else model
    generator = torch.Generator().manual_seed(rank)
    decided = []
    for step in range(2 * len(faults)):
        fault = faults[step // 2] if step % 2 else None
        mine = fault if fault is not None and fault["rank"] == rank else None
        before = [local(p).clone() for p in model.parameters()]
        for micro_batch in range(MICRO_BATCHES):
            here = mine if mine and mine["micro_batch"] == micro_batch else None
            rows = torch.randn(4, 12, generator=generator)
            if here and here["place"] == "input":
                rows[0, 0] = here["value"]
            with run.autocast():
                in_gradient = here and here["place"] == "activation gradient"
                loss = called(rows, here["value"] if here and in_gradient else None)
                loss = loss / MICRO_BATCHES
            if here and here["place"] == "loss":
                loss = loss * here["value"]
            run.backward(loss)
        if fault is not None and fault["place"] == "gradient shard":
            run.unscale()
            if mine:
                spoil_shard(model, mine)
        outcome = run.step()
        same = all(map(torch.equal, before, [local(p) for p in model.parameters()]))
        decided.append((outcome.applied, outcome.next_scale, same))
    return decided


def spoil_shard(model: nn.Module, fault: dict[str, Any]) -> None:
    shards = [local(p.grad) for p in model.parameters() if p.grad is not None]
    shards = [shard for shard in shards if shard.numel()]
    shard = shards[fault["parameter"] % len(shards)]
    shard.view(-1)[fault["element"] % shard.numel()] = fault["value"]


def local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()


def drawn(generator: random.Random, ranks: int, layout: str) -> dict[str, Any]:
    return {
        "rank": generator.randrange(ranks),
        "micro_batch": generator.randrange(MICRO_BATCHES),
        "place": generator.choice(PLACES[: 3 if layout == "DDP" else 4]),
        "value": generator.choice(VALUES),
        "parameter": generator.randrange(100),
        "element": generator.randrange(1000),
    }


def judge(results: list[list[tuple[Any, ...]]], faults: list[dict[str, Any]]) -> Counter[str]:
    counts: Counter[str] = Counter(faults=len(faults))
    for step, decisions in enumerate(zip(*results, strict=True)):
        applied, scales, same = zip(*decisions, strict=True)
        counts["ranks differ"] += len(set(applied)) > 1 or len(set(scales)) > 1
        if step % 2:
            counts["not skipped"] += any(applied)
            counts["weights touched"] += not all(same)
        else:
            counts["good steps skipped"] += not all(applied)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=10_000)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cells = list(itertools.product(LAYOUTS, POLICIES, OPTIMIZERS))
    generator, rows, began = random.Random(options.seed), [], time.monotonic()
    environment, total = describe_machine(), Counter[str]()
    columns = ("faults", "ranks differ", "not skipped", "weights touched", "good steps skipped")
    print(f"| layout | policy | optimizer | {' | '.join(columns)} |")
    print("|---" * (3 + len(columns)) + "|")
    for layout, policy, optimizer in cells:
        count = -(-options.faults // len(cells))
        faults = [drawn(generator, options.ranks, layout) for _ in range(count)]
        cell = (options.ranks, layout, policy, optimizer, faults)
        results = on_ranks(
            options.ranks, lambda rank, cell=cell: run_cell(rank, *cell), seconds=3600
        )
        counts = judge(results, faults)
        rows.append({"layout": layout, "policy": policy, "optimizer": optimizer, **counts})
        figures = " | ".join(str(counts[name]) for name in columns)
        print(f"| {layout} | {policy} | {optimizer} | {figures} |", flush=True)
        total += counts
        if options.json:
            figures_of_run = {
                "environment": environment,
                "ranks": options.ranks,
                "seed": options.seed,
                "seconds": round(time.monotonic() - began),
                "total": {name: total[name] for name in columns},
                "rows": rows,
            }
            options.json.write_text(json.dumps(figures_of_run, indent=1) + "\n")
    print(f"| all | | | {' | '.join(str(total[name]) for name in columns)} |")
    if any(total[name] for name in columns[1:]):
        sys.exit(1)


if __name__ == "__main__":
    main()
