"""What FSDP2 costs on one GPU, whether two ranks agree with one, and how long a checkpoint blocks.

Run: python benchmarks/sharded_gpu.py [--parts overhead,checkpoint,agreement] [--json PATH]
                                      [--folder FOLDER] [--small]

- overhead: GPT-350M with `nc.fully_shard` in an NCCL group of one rank, against the same model
  without it. bf16 with split master weights, clipping at 1, eager and with compiled blocks; neither
  is captured as a CUDA graph. Both models are in one process and take turns; seconds are medians by
  device events. `waits` are host synchronisations per step in torch's sync debug mode. Torch's own
  FSDP2 with fp32 weights and bf16 products is beside the eager one, against bf16 autocast.
- agreement: two ranks share the GPU, through gloo, and each trains on half of every batch, with DDP
  and with FSDP2. One process trains on all of it. NCCL refuses two ranks on one GPU.
- checkpoint: how long `save_checkpoint` of the sharded model keeps the loop, in the background and
  not, and the longest step while the thread writes.

The bars: at most 1.03 times the step without sharding, no host synchronisation, losses that agree
to 1e-4 in fp32 and 2e-2 in 16 and 8 bits, and background saves that block at most 50 ms. Exits
with 1 if one is missed. `--small` takes a tiny model, also on a CPU, where the times are no bars.
"""

import argparse
import copy
import functools
import json
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import narrowcast as nc
from narrowcast.bench.timing import step_seconds, synchronize
from narrowcast.runs import describe_machine
from narrowcast.workloads.lm.model import GPT, build_gpt
from narrowcast.workloads.lm.settings import LmModel

POLICY = "bf16, params=bf16, master=split"
VOCAB = 50304
LARGEST_RATIO, LONGEST_BLOCK_MS = 1.03, 50.0
AGREE = {"fp32": 1e-4, "bf16": 2e-2, POLICY: 2e-2, "fp8-delayed": 2e-2}
"""Policies that two ranks train with, and how far their losses may be from one process's."""
ROUNDS, STEPS, WARM_UP, COUNTED = 4, 8, 6, 3
VERSIONS = 64
"""Compiled versions of a block: torch's limit of 8 would leave later models uncompiled."""
TIME_LIMIT = timedelta(seconds=150)
"""For both ranks of the agreement: a collective that hangs is not to cost more."""
Row = dict[str, Any]


@functools.lru_cache(maxsize=1)
def built(layers: int, width: int, length: int, device: str) -> GPT:
    """Return the model before training; its weights are drawn on the host, which takes seconds."""
    settings = LmModel(layers=layers, width=width, heads=max(width // 64, 1))
    return build_gpt(settings, vocab=VOCAB, length=length, seed=0, device=torch.device(device))


class Trained:
    """A GPT that learns one batch of random tokens."""

    def __init__(self, *, layers: int, width: int, rows: int, length: int, device: str) -> None:
        self.model = copy.deepcopy(built(layers, width, length, device))
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(VOCAB, (rows, length + 1), generator=generator).to(device)
        self.batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        self.called: torch.nn.Module = self.model
        self.run: nc.Prepared | None = None

    def prepare(
        self, *, policy: str = POLICY, sharded: bool, compiled: bool = False, replica: bool = False
    ) -> None:
        execution = "compiled" if compiled else None
        if sharded:
            nc.fully_shard(self.model, policy=policy)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.run = nc.prepare(
            self.model, optimizer, policy=policy, clip_norm=1.0, execution=execution
        )
        if replica:
            self.called = DistributedDataParallel(self.model)
            nc.set_reduce_format(self.called, self.run.plan)
        self._compile_blocks(compiled)

    def prepare_torch(self, *, sharded: bool, compiled: bool) -> None:
        """Train with torch alone, with bf16 products and fp32 weights."""
        if sharded:
            formats = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            for block in self.model.blocks:  # type: ignore[union-attr]
                fully_shard(block, mp_policy=formats)
            fully_shard(self.model, mp_policy=formats)
        fused = self.batch[0].is_cuda
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=fused)
        self._compile_blocks(compiled)

    def step(self) -> Tensor:
        if self.run is None:
            return self._torch_step()
        with self.run.autocast():
            loss: Tensor = self.called(*self.batch)
        self.run.step(loss)
        return loss.detach()

    def _torch_step(self) -> Tensor:
        with torch.autocast(self.batch[0].device.type, torch.bfloat16):
            loss: Tensor = self.model(*self.batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()

    def _compile_blocks(self, compiled: bool) -> None:
        for block in self.model.blocks if compiled else ():  # type: ignore[union-attr]
            block.compile()


def in_turns(cases: dict[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    """Return the median seconds of a step of each case, which take turns."""
    for step in cases.values():
        step_seconds(step, WARM_UP, device=device)
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(ROUNDS):
        for name, step in cases.items():
            seconds[name] += step_seconds(step, STEPS, device=device)
    return {name: statistics.median(values) for name, values in seconds.items()}


def count_waits(step: Callable[[], object]) -> float:
    """Return how often a step makes the host wait for the GPU, by torch's sync debug mode."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(COUNTED):
                step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [each for each in caught if "synchronizing CUDA" in str(each.message)]
    for each in waits[:5]:
        print(f"  waits at {each.filename}:{each.lineno}")
    return len(waits) / COUNTED


def measure_overhead(sizes: dict[str, Any], device: torch.device) -> Iterator[Row]:
    for compiled in (False, True):
        cases: dict[str, Trained] = {}
        for name in ("ours", "ours, sharded", *(() if compiled else ("torch", "torch, sharded"))):
            cases[name] = trained = Trained(**sizes)
            sharded = name.endswith("sharded")
            if name.startswith("ours"):
                trained.prepare(sharded=sharded, compiled=compiled)
            else:
                trained.prepare_torch(sharded=sharded, compiled=compiled)
        seconds = in_turns({name: each.step for name, each in cases.items()}, device)
        for name, trained in cases.items():
            plain = seconds[name.removesuffix(", sharded")]
            row: Row = {"step": name, "blocks": "compiled" if compiled else "eager"}
            row |= {"ms": 1e3 * seconds[name], "ratio": seconds[name] / plain}
            if device.type == "cuda":
                row["waits"] = count_waits(trained.step)
            row["passes"] = name != "ours, sharded" or (
                device.type == "cpu" or (row["ratio"] <= LARGEST_RATIO and not row["waits"])
            )
            yield row
        cases.clear()


def losses_of(
    sizes: dict[str, Any], policy: str, *, rank: int | None, strategy: str = ""
) -> list[float]:
    """Return the losses of a few steps, of one process or of one of two ranks."""
    trained = Trained(**sizes)
    if rank is not None:
        first, second = (part.chunk(2)[rank].contiguous() for part in trained.batch)
        trained.batch = first, second
    trained.prepare(policy=policy, sharded=strategy == "fsdp", replica=strategy == "ddp")
    return torch.stack([trained.step() for _ in range(STEPS)]).tolist()


def be_rank(rank: int, folder: str, sizes: dict[str, Any]) -> None:
    where = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2, timeout=TIME_LIMIT)
    done: dict[str, Any] = {}
    for strategy in ("ddp", "fsdp"):
        for policy in AGREE:
            try:
                losses: Any = losses_of(sizes, policy, rank=rank, strategy=strategy)
            except Exception:  # noqa: BLE001  # a row of the table
                losses = traceback.format_exc()
            done[f"{strategy} {policy}"] = losses
            write(done, Path(folder, f"{rank}.json"))
    dist.destroy_process_group()


def measure_agreement(sizes: dict[str, Any]) -> Iterator[Row]:
    alone = {policy: losses_of(sizes, policy, rank=None) for policy in AGREE}
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, f"{rank}.json") for rank in range(2)]
        ranks = torch.multiprocessing.spawn(be_rank, args=(folder, sizes), nprocs=2, join=False)
        try:
            seen, ended, deadline = set[str](), False, time.monotonic() + TIME_LIMIT.seconds
            while not ended and time.monotonic() < deadline:
                ended = ranks.join(timeout=1.0)
                # Replaced in one go, so that they are whole.
                both = [json.loads(each.read_text()) for each in files if each.exists()]
                for case in set.intersection(*map(set, both)) - seen if len(both) == 2 else ():
                    seen.add(case)
                    yield agreement_row(case, alone, [each[case] for each in both])
            if not ended:
                yield {"passes": False, "error": f"no end after {TIME_LIMIT.seconds} s"}
        finally:
            for each in ranks.processes:
                each.kill()


def agreement_row(case: str, alone: dict[str, list[float]], both: list[Any]) -> Row:
    """Compare the mean of two ranks' losses with those of one process."""
    strategy, _, policy = case.partition(" ")
    row: Row = {"ranks": strategy, "policy": policy}
    errors = [each for each in both if isinstance(each, str)]
    if errors:
        return {**row, "passes": False, "error": errors[0]}
    one, bar = alone[policy], AGREE[policy]
    means = [sum(each) / 2 for each in zip(*both, strict=True)]
    worst = max(abs(a - b) for a, b in zip(one, means, strict=True))
    row |= {"first_loss": one[0], "last_loss": one[-1], "largest_gap": worst, "bar": bar}
    return {**row, "passes": worst <= bar and one[-1] < one[0]}


def measure_checkpoint(
    sizes: dict[str, Any], device: torch.device, parent: str | None
) -> Iterator[Row]:
    trained = Trained(**sizes)
    trained.prepare(sharded=True)
    usual = in_turns({"step": trained.step}, device)["step"]
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        for number, background in enumerate((True, True, False)):
            synchronize(device)
            began = time.perf_counter()
            saving = nc.save_checkpoint(
                trained.run, Path(folder, "checkpoint"), background=background
            )
            blocked = time.perf_counter() - began
            slowest = 0.0
            while background and not saving.done:
                slowest = max(slowest, *step_seconds(trained.step, 3, device=device))
            size = saving.wait()
            row: Row = {"save": number + 1, "background": background, "bytes": size}
            row |= {"blocked_ms": 1e3 * blocked, "total_ms": 1e3 * (time.perf_counter() - began)}
            row |= {"usual_step_ms": 1e3 * usual, "slowest_step_ms": 1e3 * slowest}
            in_time = 1e3 * blocked <= LONGEST_BLOCK_MS
            row["passes"] = in_time or not background or device.type == "cpu"
            yield row


def main() -> int:
    """Measure the parts, print their tables, and write JSON if requested."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", default="overhead,checkpoint,agreement")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", help="where checkpoints are written, and removed again")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not options.small:
        raise SystemExit("These bars need a GPU. Write --small to try the script on a CPU.")
    where = {"device": device.type}
    tiny = {"layers": 2, "width": 64, "rows": 4, "length": 32, **where}
    whole = (
        tiny
        if options.small
        else {"layers": 24, "width": 1024, "rows": 16, "length": 1024, **where}
    )
    part = tiny if options.small else {"layers": 4, "width": 512, "rows": 8, "length": 512, **where}
    torch._dynamo.config.recompile_limit = VERSIONS
    figures: dict[str, Any] = {"environment": describe_machine(), "policy": POLICY, "sizes": whole}
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    parts: dict[str, Callable[[], Iterator[Row]]] = {
        "agreement": lambda: measure_agreement(part),
        "overhead": lambda: measure_overhead(whole, device),
        "checkpoint": lambda: measure_checkpoint(whole, device, options.folder),
    }
    passes, began = True, time.monotonic()
    for name in options.parts.split(","):
        print(f"\n{name}\n", flush=True)
        rows = figures[name] = list[Row]()
        try:
            for row in parts[name]():
                show(row, first=not rows)
                rows.append(row)
                write(figures, options.json)
        except Exception:  # noqa: BLE001  # the other parts are worth having
            rows.append({"passes": False, "error": traceback.format_exc()})
            print(rows[-1]["error"])
            write(figures, options.json)
        passes = passes and all(row["passes"] for row in rows)
        print(f"{time.monotonic() - began:.0f} s so far", flush=True)
    dist.destroy_process_group()
    return 0 if passes else 1


def show(row: Row, *, first: bool) -> None:
    """Print a row of a table."""
    if first:
        print("|", " | ".join(row), "|")
        print("|---" * len(row) + "|")
    cells = (f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row.values())
    print("|", " | ".join(cells), "|", flush=True)


def write(figures: dict[str, Any], path: Path | None) -> None:
    """Write what is measured so far."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(figures, indent=1) + "\n")
        partial.replace(path)


if __name__ == "__main__":
    sys.exit(main())
