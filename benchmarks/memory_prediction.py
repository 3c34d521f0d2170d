"""Predicted and measured memory and time of training steps, with other tools beside them.

Run: python benchmarks/memory_prediction.py [--against FILE …] [--only NAME …] [--advice N]
                                            [--rss] [--json PATH]

On a GPU, 14 rows are measured, each in a process of its own: models of the zoo through
`nc.prepare`, in bf16 and fp8, eager and graphed, with activation checkpointing and 8-bit moments.
Without a GPU, tiny models are measured on the CPU, where the peak is that of counted storages.
`--against` compares predictions with the peaks in files of `narrowcast bench models --json`
instead, for the GPU that they name. Beside each row: torch's MemTracker of one eager step on fake
tensors (CPU rows), and accelerate's rule for Adam, four times the fp32 weights. `--advice` takes so
many random recipes that do not fit `memory.limit`, and follows the first advice. `--rss` compares
predictions with the growth of the resident memory of processes that train on a CPU.
"""

import argparse
import ctypes
import gc
import json
import random
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import narrowcast as nc
from narrowcast.bench.zoo.models import ZOO
from narrowcast.hardware import detect_hardware
from narrowcast.hardware.catalog import find_data_sheet, named_hardware
from narrowcast.precision.estimate.dry_run import estimate_step
from narrowcast.precision.estimate.seconds import step_seconds
from narrowcast.precision.plan.plan import make_plan
from narrowcast.runner.fitting import advise, predict
from narrowcast.runs import describe_machine

SPLIT = "bf16, params=bf16, master=split"
FP8 = "fp8-delayed, params=bf16, master=split"
WAYS = {"AMP": "bf16", "bf16": "bf16", "bf16 + split": SPLIT, "fp8-delayed + split": FP8}
"""Policies of the ways of `narrowcast bench models`; torch's AMP is bf16 without fused pieces."""
ROWS = [
    ("llama-348m", SPLIT, "eager", "none"),
    ("llama-348m", SPLIT, "graphed", "none"),
    ("llama-348m", FP8, "graphed", "none"),
    ("llama-348m", SPLIT, "eager", "blocks"),
    ("llama-348m", SPLIT, "eager", "selective"),
    ("llama-348m", f"{SPLIT}, moments=int8", "eager", "none"),
    ("llama-1.3b", SPLIT, "eager", "none"),
    ("llama-1.3b", FP8, "graphed", "none"),
    ("qwen2-0.5b", SPLIT, "eager", "none"),
    ("vit-l", SPLIT, "eager", "none"),
    ("bert-base", SPLIT, "eager", "none"),
    ("resnet-50", "bf16", "eager", "none"),
    ("unet", SPLIT, "eager", "none"),
    ("hyena", FP8, "graphed", "none"),
]
CPU_ROWS = [
    (name, policy, "eager", "none")
    for name in ("llama-348m", "bert-base", "vit-l", "resnet-50", "unet", "lstm", "encoder")
    for policy in ("fp32", SPLIT)
]

LM = ["device=cpu", "steps=2", "eval.every=0", "model.vocab=8192", "data.text=synthetic"]
RSS_ROWS = [
    [*LM, "model.layers=6", "model.width=512", "model.heads=8", "data.length=256", *more]
    for more in (
        ["batch_size=8", "precision.policy=fp32"],
        ["batch_size=2", "precision.policy=fp32", "gradient_accumulation_steps=4"],
        ["batch_size=8", "precision.policy=fp32", "memory.activation_checkpointing=blocks"],
        ["batch_size=16", "precision.policy=fp32", "ema.decay=0.9"],
        ["batch_size=4", "precision.policy=bf16"],
        ["batch_size=4", "precision.policy=bf16, params=bf16, master=split"],
    )
]


class CountedStorages(TorchDispatchMode):
    """The bytes of all storages that are alive, and their peak."""

    def __init__(self, tensors: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live: dict[int, Any] = {}
        self.now = self.peak = 0
        for tensor in tensors:
            self.add(tensor)

    def add(self, tensor: Any) -> None:
        if not isinstance(tensor, Tensor) or tensor.untyped_storage()._cdata in self.live:
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()

        def gone(_: object) -> None:
            self.live.pop(key, None)
            self.now -= size

        self.live[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            self.add(each)
        return result


def predicted(
    name: str,
    policy: str,
    mode: Any,
    checkpointing: Any,
    *,
    hardware: Any,
    quick: bool,
    fuse: Any = "auto",
) -> dict[str, Any]:
    built = ZOO[name].build(torch.device("cpu" if quick else "meta"), quick=quick)
    memory = nc.Memory(activation_checkpointing=checkpointing)
    began = time.process_time()
    plan = make_plan(
        built.model,
        policy,
        hardware=hardware,
        execution=mode,
        memory=memory,
        gemm_rows=16384,
        fuse=fuse,
    )
    step = estimate_step(
        built.model, plan, batch=built.inputs, loss=lambda m, batch: built.loss_fn(m, *batch)
    )
    spent = time.process_time() - began
    row = {
        "allocated": step.memory.allocated,
        "reserved": step.memory.reserved,
        "roles": dict(step.memory.roles),
        "dry_run_cpu_seconds": round(spent, 2),
        "accelerate_bytes": 16 * sum(p.numel() for p in built.model.parameters()),
    }
    gpu = find_data_sheet(hardware)
    if gpu is not None:
        state_bytes = sum(
            plan.bytes.get(role, 0) for role in ("params", "master", "moments", "grads")
        )
        row["ms"] = (
            1e3
            * step_seconds(
                step.ops, gpu, state_bytes=2 * state_bytes, captured=mode == "graphed"
            ).seconds
        )
    return row


def measured(name: str, policy: str, mode: str, checkpointing: Any) -> dict[str, Any]:
    """Train for some steps in this process; return the peak of the last ones."""
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    built = ZOO[name].build(device, quick=not gpu)
    optimizer = torch.optim.AdamW([p for p in built.model.parameters() if p.requires_grad])
    memory = nc.Memory(activation_checkpointing=checkpointing)
    settings: dict[str, Any] = {"policy": policy, "memory": memory, "clip_norm": 1.0}
    counted = CountedStorages((*built.model.parameters(), *built.model.buffers(), *built.inputs))
    run: nc.Prepared

    def step() -> None:
        with run.autocast():
            loss = built.loss_fn(built.model, *built.inputs)
        run.backward(loss)
        del loss
        run.step()

    if not gpu:
        with counted:
            run = nc.prepare(built.model, optimizer, **settings)
            for _ in range(2):
                counted.peak = counted.now
                step()
        return {"allocated": counted.peak}
    run = nc.prepare(built.model, optimizer, execution=mode, **settings)  # type: ignore[arg-type]
    graphed = run.graphed(lambda *inputs: built.loss_fn(built.model, *inputs))
    go = (lambda: graphed(*built.inputs)) if mode == "graphed" else step
    for _ in range(5):
        go()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    for _ in range(10):
        go()
    torch.cuda.synchronize()
    return {
        "ms": 100 * (time.perf_counter() - began),
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
    }


def tracked(name: str) -> int | None:
    """Return what torch's MemTracker says of a plain fp32 step of the tiny model."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            built = ZOO[name].build(torch.device("cpu"), quick=True)
            optimizer = torch.optim.AdamW(built.model.parameters(), foreach=False)
            tracker = MemTracker()
            tracker.track_external(built.model, optimizer, *built.inputs)
            with tracker:
                for _ in range(2):
                    built.loss_fn(built.model, *built.inputs).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            peaks = tracker.get_tracker_snapshot("peak")
        return max(int(each["Total"]) for each in peaks.values())
    except Exception:  # noqa: BLE001  # theirs: a model it cannot track has no figure
        return None


def against(path: Path, only: list[str]) -> list[dict[str, Any]]:
    """Compare with the rows of a file of `bench models`."""
    data = json.loads(path.read_text())
    hardware, commit = named_hardware("h200"), data["environment"]["commit"]
    rows = []
    for row in data["rows"]:
        name, way, mode = row["model"], row["way"], row["mode"]
        if way not in WAYS or name not in ZOO or name == "gpt-406m" or (only and name not in only):
            continue
        if way == "AMP" and mode != "eager":
            continue  # a compiled model casts its weights itself
        fuse = "none" if way == "AMP" else "auto"
        result = predicted(name, WAYS[way], mode, "none", hardware=hardware, quick=False, fuse=fuse)
        peak = {"allocated": row["peak_bytes"], "ms": row["ms"]}
        rows.append(show({"row": [name, way, mode], "commit": commit}, result, peak))
    return rows


def show(row: dict[str, Any], guess: dict[str, Any], peak: dict[str, Any]) -> dict[str, Any]:
    error = {
        key: guess[key] / peak[key] - 1 for key in ("allocated", "reserved", "ms") if key in peak
    }
    text = ", ".join(f"{key} {value:+.1%}" for key, value in error.items())
    print(*row["row"], f"{peak['allocated']:,} bytes:", text, flush=True)
    return {**row, "predicted": guess, "measured": peak, "error": error}


def follow_advice(count: int) -> list[dict[str, Any]]:
    """Follow the first advice of random recipes that do not fit."""
    draw, hardware, rows = random.Random(0), detect_hardware("cpu"), []
    while len(rows) < count:
        settings = {
            "model.layers": draw.choice([1, 2, 3]),
            "model.width": draw.choice([64, 128]),
            "model.heads": 4,
            "data.length": draw.choice([32, 64]),
            "batch_size": draw.choice([4, 8, 12]),
            "precision.policy": draw.choice(["fp32", "bf16"]),
        }
        terms = [f"{key}={value}" for key, value in settings.items()]
        loaded = nc.load_recipe("quickstart", [*terms, "device=cpu"])
        whole = predict(loaded.recipe, hardware).memory
        assert whole is not None
        limit = round(whole.needed * draw.uniform(0.55, 0.95))
        first = next(advise(loaded, hardware, limit=limit, most=1), None)
        peak = None
        if first is not None:
            changed = loaded.with_values(first.settings, origin="advice")
            counted = CountedStorages(())
            with counted:
                run = nc.train(changed.with_values({"steps": 2, "eval.every": 0}, origin="advice"))
                weights = (*run.task.model.parameters(), *run.task.model.buffers())
                # On a CPU the training data lies in the same memory; no prediction has it.
                data = counted.now - sum(each.nbytes for each in weights)
                run.finish(progress=False)
            peak = counted.peak - data
        row = {
            "settings": settings,
            "limit": limit,
            "advice": None if first is None else first.command,
            "measured": peak,
            "fits": peak is not None and peak <= limit,
        }
        print(row, flush=True)
        rows.append(row)
    return rows


def resident(key: str) -> int:
    """Return a size in /proc/self/status."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def growth(terms: list[str]) -> int:
    """Return how much resident memory a run takes at its peak; a small run loads what all need."""
    small = ["model.layers=2", "model.width=64", "batch_size=1", "data.length=64"]
    others = [each for each in terms if each.partition("=")[0] not in ("batch_size", "data.length")]
    for each in ([*others, *small], terms):
        loaded = nc.load_recipe("quickstart", each)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins here
        nc.train(loaded).finish(progress=False)
    return resident("VmHWM") - before


def resident_rows() -> list[dict[str, Any]]:
    rows = []
    for terms in RSS_ROWS:
        loaded = nc.load_recipe("quickstart", terms)
        memory = predict(loaded.recipe, detect_hardware("cpu")).memory
        assert memory is not None
        command = [sys.executable, __file__, "--rss-worker", json.dumps(terms)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode:
            print(*terms, "failed:", ended.stderr.strip().splitlines()[-1], flush=True)
            continue
        measured_bytes = int(ended.stdout.splitlines()[-1])
        error = memory.allocated / measured_bytes - 1
        print(*terms[len(LM) :], f"{measured_bytes:,} bytes: {error:+.1%}", flush=True)
        rows.append(
            {
                "settings": terms,
                "predicted": memory.allocated,
                "measured": measured_bytes,
                "error": error,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--against", type=Path, nargs="*", default=[])
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--advice", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rss", action="store_true")
    parser.add_argument("--rss-worker", help=argparse.SUPPRESS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(measured(*json.loads(options.worker))))
        return
    if options.rss_worker:
        print(growth(json.loads(options.rss_worker)))
        return
    gpu = torch.cuda.is_available()
    result: dict[str, Any] = {"environment": describe_machine(), "rows": []}
    for path in options.against:
        result["rows"] += against(path, options.only)
    hardware = detect_hardware("auto")
    rows = [] if options.against or options.advice or options.rss else ROWS if gpu else CPU_ROWS
    for row in rows:
        if options.only and row[0] not in options.only:
            continue
        guess = predicted(*row, hardware=hardware, quick=not gpu)
        command = [sys.executable, __file__, "--worker", json.dumps(row)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode:
            print(*row, "failed:", ended.stderr.strip().splitlines()[-1], flush=True)
            continue
        peak = json.loads(ended.stdout.splitlines()[-1])
        more = {} if gpu else {"mem_tracker": tracked(row[0])}
        result["rows"].append(show({"row": list(row), **more}, guess, peak))
    if options.advice:
        result["advice"] = follow_advice(options.advice)
    if options.rss:
        result["resident"] = resident_rows()
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
