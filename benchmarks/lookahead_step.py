"""What the point ahead and the read-outs cost: a whole step of GPT-124M beside a plain one.

Run: python benchmarks/lookahead_step.py [--rounds 9] [--steps 12] [--json OUT] [--quick]

A GPT of this package learns random tokens, 16 windows of 1024, in bf16 with weights of bf16, split
masters and the fused AdamW: as `nc.prepare` has it, with `lookahead=nc.Lookahead()` in each
storage, and through `nc.hybrid` with its averages as in a run of 2,000 steps. All are in one
process and take turns; a turn is the mean of its steps by device events, and told are the least and
the median turn. Steps are launched kernel by kernel, and then replayed as CUDA graphs where the
update is what matters. The update alone is timed with the host ahead of the device. The peak is
what a way allocates more than there was before it, in its first steps.
`--quick` takes a tiny model on a CPU.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import narrowcast as nc
from device_time import queued_seconds
from narrowcast.bench.timing import step_seconds
from narrowcast.precision.step.cuda_graph import GraphedStep, unsupported_reason
from narrowcast.precision.step.outcome import Outcome
from narrowcast.precision.step.prepared import Prepared
from narrowcast.runs import describe_machine
from narrowcast.workloads.lm.model import build_gpt
from narrowcast.workloads.lm.settings import LmModel

POLICY = "bf16, params=bf16, master=split"
BAR = 1.02
PLANNED = 2000
"""Steps of the run that averages are planned for: with these they move every third step."""
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lookahead, fp32": {"lookahead": nc.Lookahead()},
    "lookahead, bf16": {"lookahead": nc.Lookahead(storage="bf16")},
}
HYBRID = {"hybrid, conservative": "conservative", "hybrid, balanced": "balanced"}


class Trained:
    """A model that learns one batch of random tokens, by one of the ways."""

    def __init__(self, way: str, *, device: torch.device, quick: bool) -> None:
        layers, width, heads, vocab, length, rows = (
            (2, 64, 2, 256, 32, 4) if quick else (12, 768, 12, 50304, 1024, 16)
        )
        settings = LmModel(layers=layers, width=width, heads=heads)
        self.model = build_gpt(settings, vocab=vocab, length=length, seed=0, device=device)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        settings_of_step = {"policy": POLICY, "clip_norm": 1.0, "fused_optimizer": True}
        self.run: Prepared | nc.HybridRun
        if way in HYBRID:
            self.run = nc.hybrid(
                self.model, optimizer, steps=PLANNED, preset=HYBRID[way], **settings_of_step
            )
            self.prepared = self.run.prepared
        else:
            self.run = nc.prepare(self.model, optimizer, **settings_of_step, **WAYS[way])
            self.prepared = self.run
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(vocab, (rows, length + 1), generator=generator).to(device)
        self.batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        self.graphed: GraphedStep | None = None

    def loss(self) -> Tensor:
        with self.run.autocast():
            loss: Tensor = self.model(*self.batch)
        return loss

    def step(self) -> None:
        self.run.step(self.loss())

    def capture(self) -> None:
        self.graphed = GraphedStep(self.prepared.engine)

    def captured_step(self) -> None:
        """Take a step that is a CUDA graph, once it is warm."""
        assert self.graphed is not None
        self.graphed([self.batch], None, passes=self.passes, launch=self.launch)

    def passes(self, batches: Sequence[Any]) -> Tensor:
        with self.run.autocast():
            loss: Tensor = self.model(*batches[0])
        self.prepared.backward(loss)
        return loss.detach()

    def launch(self, batches: Sequence[Any], between: object) -> tuple[Outcome, Tensor]:
        loss = self.passes(batches)
        return self.prepared.step(), loss

    def updating(self) -> Callable[[], object]:
        """Return the update alone, of gradients that stay."""
        self.prepared.backward(self.loss())
        weights = self.prepared.engine.weights
        present = weights.with_gradients()
        factor = torch.ones((), device=weights.device)
        finite = torch.ones((), dtype=torch.bool, device=weights.device)
        return lambda: weights.update(present, factor=factor, finite=finite, metered=False)


def turns(
    steps: dict[str, Callable[[], object]], *, rounds: int, count: int, device: torch.device
) -> dict[str, list[float]]:
    """Return the milliseconds of a step in each round; in each, everyone has a turn."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            for _ in range(3):  # clocks and allocator settle
                step()
            seconds = step_seconds(step, count, device=device)
            found[name].append(1e3 * sum(seconds) / count)
    return found


def update_turns(
    trained: dict[str, Trained], *, rounds: int, device: torch.device
) -> dict[str, list[float]]:
    """Return the milliseconds of the update alone in each round, on the device."""
    updates = {name: each.updating() for name, each in trained.items()}
    found: dict[str, list[float]] = {name: [] for name in updates}
    for update in updates.values():
        update()
    for _ in range(rounds):
        for name, update in updates.items():
            if device.type == "cuda":
                seconds, _ = queued_seconds(update, 3, device=device)
            else:
                seconds = step_seconds(update, 3, device=device)
            found[name].append(1e3 * statistics.median(seconds))
    return found


def opened(way: str, *, device: torch.device, quick: bool) -> tuple[Trained, int]:
    """Return a way after its first steps, and the bytes it took at most; 0 where nobody counts."""
    before = 0
    if device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    trained = Trained(way, device=device, quick=quick)
    for _ in range(4):
        trained.step()
    peak = torch.cuda.max_memory_allocated() - before if device.type == "cuda" else 0
    return trained, peak


def told(times: dict[str, list[float]], *, title: str) -> dict[str, Any]:
    """Print a table of times, and return it."""
    print(f"\n{title:34}{'least ms':>10}{'of plain':>10}{'median ms':>11}{'of plain':>10}")
    base = times["plain"]
    rows = {}
    for name, found in times.items():
        rows[name] = {
            "least_ms": min(found), "median_ms": statistics.median(found), "rounds_ms": found,
            "least_of_plain": min(found) / min(base),
            # Of each round with its own plain turn: what drifts, drifts for both.
            "median_of_plain": statistics.median(a / b for a, b in zip(found, base, strict=True)),
        }  # fmt: skip
        row = rows[name]
        print(f"{name:34}{row['least_ms']:10.3f}{row['least_of_plain']:10.4f}"
              f"{row['median_ms']:11.3f}{row['median_of_plain']:10.4f}", flush=True)  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=12, help="in a turn")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="a tiny model, on a CPU")
    args = parser.parse_args()
    device = torch.device("cpu" if args.quick else "cuda", None if args.quick else 0)
    began = time.perf_counter()
    trained, figures, peaks = dict[str, Trained](), dict[str, Any](), dict[str, int]()
    for way in (*WAYS, *HYBRID):
        trained[way], peaks[way] = opened(way, device=device, quick=args.quick)
    first = trained["plain"]
    weights = sum(p.numel() for p in first.model.parameters())
    print(f"{weights:,} weights, {first.batch[0].numel():,} tokens; {first.prepared.update_path}")
    steps = {way: each.step for way, each in trained.items()}
    figures["steps"] = told(
        turns(steps, rounds=args.rounds, count=args.steps, device=device), title="a whole step"
    )
    if not (why := unsupported_reason(first.prepared.engine)):
        for way in WAYS:
            trained[way].capture()
        replayed = {way: trained[way].captured_step for way in WAYS}
        for step in replayed.values():
            for _ in range(6):
                step()
        figures["captured steps"] = told(
            turns(replayed, rounds=args.rounds, count=args.steps, device=device),
            title="a captured step",
        )
        for way in WAYS:
            trained[way].graphed = None
        gc.collect()
    else:
        print(f"\nno captured steps: {why}")
    figures["updates"] = told(
        update_turns({way: trained[way] for way in WAYS}, rounds=args.rounds, device=device),
        title="the update alone",
    )
    if device.type == "cuda":
        print(
            "\npeak: " + ", ".join(f"{way} {size / 2**30:.2f} GiB" for way, size in peaks.items())
        )
    ratios = {way: figures["steps"][way]["median_of_plain"] for way in list(WAYS)[1:]}
    holds = all(ratio <= BAR for ratio in ratios.values())
    print(f"\nbar of {BAR}: {'holds' if holds else 'fails'} ({time.perf_counter() - began:.0f} s)")
    if args.json:
        environment = describe_machine()
        report = {
            "environment": environment, "policy": POLICY, "weights": weights,
            "tokens": first.batch[0].numel(), "bar": BAR, "holds": holds, "peak_bytes": peaks,
            **figures,
        }  # fmt: skip
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
