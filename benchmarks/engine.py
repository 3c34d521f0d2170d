"""What the engine costs: ratios from one run, each against plain torch in the same minute.

Run: python benchmarks/engine.py [--json PATH] [--repeats N]

The bars are those of the engine: fp32 policy ≤ 1.03 × a plain loop; emulated bf16 and fp16 ≤ 1.6 ×,
e4m3 ≤ 2.0 × the fp32 step; e4m3 rounding ≤ 3 × a native fp16 cast; `--help` < 0.5 s.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

import narrowcast as nc
from narrowcast.numerics import E4M3, FP16, cast, cast_counts, round_to
from narrowcast.precision.gradients.check import check_norms, gradient_norms
from narrowcast.precision.gradients.loss_scale import LossScale, RunningScale
from narrowcast.runs import describe_machine
from narrowcast.training.setup import prepare_recipe
from narrowcast.workloads import build_task, load_recipe

Row = dict[str, object]


def medians(cases: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Time the cases in turn, so that a slow minute is slow for all of them; median seconds."""
    for case in cases.values():
        case()
        case()
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name, case in cases.items():
            start = time.perf_counter()
            case()
            times[name].append(time.perf_counter() - start)
    return {name: sorted(values)[len(values) // 2] for name, values in times.items()}


def quickstart_step(policy: str | None, *, batch_size: int | None = None) -> Callable[[], object]:
    """Return one training step of the quickstart model: ours, or for None plain torch's."""
    words = [f"precision.policy={policy or 'fp32'}", "precision.emulate=null"]
    recipe = load_recipe("quickstart", words).recipe
    task = build_task(recipe, device=torch.device("cpu"))
    size = batch_size or recipe.batch_size
    batch = task.train_data.__getitems__(list(range(size)))
    if policy is None:
        options = recipe.optimizer
        optimizer = torch.optim.AdamW(
            task.model.parameters(),
            lr=options.lr,
            betas=options.betas,
            weight_decay=options.weight_decay,
            fused=True,
        )

        def plain() -> None:
            loss = task.loss(task.model, batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(task.model.parameters(), recipe.clip_norm or 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return plain
    planned = nc.plan(task.model, recipe.precision.policy, hardware=nc.detect_hardware("cpu"))
    run = prepare_recipe(recipe, task, plan=planned)

    def ours() -> None:
        with run.autocast():
            loss = task.loss(task.model, batch)
        run.step(loss)

    return ours


def bench_training_step(repeats: int) -> list[Row]:
    policies = ["fp32", "tf32", "bf16", "fp16", "fp8-tensor", "fp8-row", "bf16-pure", "aggressive"]
    cases = {"plain torch": quickstart_step(None), **{p: quickstart_step(p) for p in policies}}
    seconds = medians(cases, repeats)
    bars = {"fp32": 1.03, "bf16": 1.6, "fp16": 1.6, "fp8-tensor": 2.0}
    rows: list[Row] = []
    for name, value in seconds.items():
        base = seconds["plain torch"] if name in ("plain torch", "fp32") else seconds["fp32"]
        rows.append(
            {
                "step": name,
                "ms": round(value * 1e3, 2),
                "against": "plain torch" if base is seconds["plain torch"] else "fp32 policy",
                "ratio": round(value / base, 3),
                "bar": bars.get(name, ""),
            }
        )
    return rows


def bench_batch_sizes(repeats: int) -> list[Row]:
    """Step of fp16 against fp32 by batch size (the seed's table, emulated on this CPU)."""
    rows: list[Row] = []
    for size in (8, 16, 32, 64):
        seconds = medians(
            {p: quickstart_step(p, batch_size=size) for p in ("fp32", "fp16")}, max(3, repeats // 4)
        )
        rows.append(
            {
                "batch": size,
                "fp32 ms": round(seconds["fp32"] * 1e3, 1),
                "fp16 ms": round(seconds["fp16"] * 1e3, 1),
                "ratio": round(seconds["fp16"] / seconds["fp32"], 3),
            }
        )
    return rows


def bench_conversion(repeats: int) -> list[Row]:
    x = torch.randn(16 * 2**20)
    cases: dict[str, Callable[[], object]] = {
        "native fp16 cast": lambda: x.half(),
        "fp16 cast, saturating": lambda: cast(x, FP16, saturate=True),
        "e4m3 rounding": lambda: round_to(x, E4M3, saturate=True),
        "e4m3 cast, saturating": lambda: cast(x, E4M3, saturate=True),
    }
    seconds = medians(cases, repeats)
    base = seconds["native fp16 cast"]
    bars = {"e4m3 rounding": 3.0}
    return [
        {
            "16M floats": name,
            "ms": round(value * 1e3, 1),
            "× native fp16 cast": round(value / base, 2),
            "bar": bars.get(name, ""),
        }
        for name, value in seconds.items()
    ]


def bench_gradients(repeats: int) -> list[Row]:
    """Gradient scaling, overflow detection and clipping, against torch's own."""
    gradients = [torch.randn(512, 512) for _ in range(16)]
    parameters = [torch.nn.Parameter(torch.zeros_like(g)) for g in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    inverse = torch.tensor(2.0**-16)
    found_inf = torch.zeros(1)
    one = torch.ones(())
    cases: dict[str, Callable[[], object]] = {
        "torch: unscale and check (GradScaler's kernel)": lambda: (
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, one)
        ),
        "ours: check and norm": lambda: check_norms(gradient_norms(gradients), inverse),
        "ours: unscale": lambda: torch._foreach_mul_(gradients, one),
        "torch: clip_grad_norm_": lambda: torch.nn.utils.clip_grad_norm_(parameters, 1e9),
    }
    seconds = medians(cases, repeats)
    base = next(iter(seconds.values()))
    return [
        {"4M gradients": name, "ms": round(value * 1e3, 2), "ratio": round(value / base, 2)}
        for name, value in seconds.items()
    ]


def bench_scale_updates(repeats: int) -> list[Row]:
    scale = RunningScale(LossScale(), torch.device("cpu"))
    finite = torch.tensor(True)
    value, tracker = torch.tensor(65536.0), torch.tensor(0, dtype=torch.int32)
    found = torch.zeros(1)
    cases: dict[str, Callable[[], object]] = {
        "torch: _amp_update_scale_": lambda: [
            torch._amp_update_scale_(value, tracker, found, 2.0, 0.5, 2000) for _ in range(1000)
        ],
        "ours: RunningScale.update": lambda: [scale.update(finite) for _ in range(1000)],
    }
    seconds = medians(cases, max(3, repeats // 2))
    return [{"update": name, "µs": round(value * 1e3, 1)} for name, value in seconds.items()]


def bench_safety(repeats: int) -> list[Row]:
    x = torch.randn(4 * 2**20)
    cases: dict[str, Callable[[], object]] = {
        "torch: isfinite().all()": lambda: x.isfinite().all(),
        "ours: cast_counts to fp16 (non-finite, overflow, flushed)": lambda: cast_counts(x, FP16),
    }
    seconds = medians(cases, repeats)
    return [{"4M floats": name, "ms": round(value * 1e3, 2)} for name, value in seconds.items()]


def bench_memory() -> list[Row]:
    """Bytes by role, as held after a step: measured on the tensors, and planned."""
    rows: list[Row] = []
    policies = [
        "fp32",
        "bf16",
        "fp16, params=fp16, master=fp32",
        "bf16, params=bf16, master=split",
        "bf16, params=bf16, master=stochastic",
        "bf16-pure",
    ]
    for policy in policies:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 1024))
        run = nc.prepare(model, torch.optim.AdamW(model.parameters()), policy=policy)
        with run.autocast():
            loss = F.mse_loss(model(torch.randn(8, 1024)), torch.zeros(8, 1024))
        run.step(loss)
        held = run.stats().bytes
        planned = dict(run.plan.bytes)
        row: Row = {"policy": policy}
        row |= {role: f"{size / 2**20:.1f}" for role, size in held.items()}
        row["MiB in all"] = round(sum(held.values()) / 2**20, 1)
        row["planned"] = round(sum(planned.values()) / 2**20, 1)
        rows.append(row)
    return rows


def bench_help(repeats: int) -> list[Row]:
    def show_help() -> None:
        command = [sys.executable, "-m", "narrowcast", "--help"]
        subprocess.run(command, check=True, capture_output=True)

    seconds = medians({"narrowcast --help": show_help}, max(3, repeats // 4))
    return [{"command": k, "seconds": round(v, 3), "bar": 0.5} for k, v in seconds.items()]


def show(title: str, rows: list[Row]) -> None:
    """Print rows as a Markdown table."""
    print(f"\n### {title}\n")
    columns = list(rows[0])
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))
    for row in rows:
        print("| " + " | ".join(str(row[c]) for c in columns) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--repeats", type=int, default=21)
    options = parser.parse_args()
    n = options.repeats
    tables = {
        # First, while no earlier case has left the allocator warm memory of some sizes.
        "Conversion": bench_conversion(n),
        "Training step, quickstart model": bench_training_step(n),
        "Training step by batch size": bench_batch_sizes(n),
        "Gradient scaling and overflow detection": bench_gradients(n),
        "Scale updates (1,000)": bench_scale_updates(n),
        "Safety checks": bench_safety(n),
        "Memory by role": bench_memory(),
        "Start": bench_help(n),
    }
    for title, rows in tables.items():
        show(title, rows)
    if options.json:
        figures = {"environment": describe_machine(), "tables": tables}
        options.json.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
