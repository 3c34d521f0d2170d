"""The report of a long run: 10,000 steps, 100 modules, statistics of 600 tensors every 10 steps.

Run: python benchmarks/report_size.py [--json PATH] [--out FOLDER] [--steps N] [--modules N]

The statistics are those of real tensors: normal numbers of many sizes, rounded to their format.
"""

import argparse
import json
import math
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from narrowcast.numerics import BF16, E4M3, E5M2, Format, cast_loss, round_to, snr_db
from narrowcast.report import write_report
from narrowcast.runs import (
    EvalRecord,
    ExponentRecord,
    FindingRecord,
    HealthRecord,
    PrecisionRecord,
    Record,
    RunFolder,
    StepRecord,
    describe_machine,
)

MOST_SECONDS, MOST_BYTES = 5.0, 6_000_000
ROLES = ("input", "weight", "output", "grad_output", "grad_weight", "update")
FORMATS = {"grad_output": E5M2, "grad_weight": BF16, "update": BF16}
SIZES = [2.0**k for k in range(-16, 11)]
"""Standard deviations of the tensors whose statistics are drawn from."""

Statistics = dict[str, float]


def statistics(target: Format, size: float, generator: torch.Generator) -> Statistics:
    x = torch.randn(4096, generator=generator) * size
    lost = cast_loss(x, target)
    subnormal = (x != 0) & (x.abs() < target.smallest_normal)
    return {
        "amax": float(x.abs().max()),
        "amin": float(x[x != 0].abs().min()),
        "overflow": lost.overflow_rate,
        "underflow": lost.flush_rate,
        "subnormal": float(subnormal.double().mean()),
        "nonfinite": 0.0,
        "snr_db": snr_db(x, round_to(x, target, saturate=True)),
    }


def names(modules: int) -> list[str]:
    parts = ("attn.qkv", "attn.out", "mlp.up", "mlp.down")
    found = [f"blocks.{i}.{part}" for i in range(modules) for part in parts]
    return ["embed", *found[: modules - 2], "head"]


def course(steps: int, modules: int) -> Iterator[Record]:
    chance, generator = random.Random(0), torch.Generator().manual_seed(0)
    bank = {
        (target.name, k): [statistics(target, size, generator) for _ in range(4)]
        for target in (E4M3, E5M2, BF16)
        for k, size in enumerate(SIZES)
    }
    sites = [(module, role) for module in names(modules) for role in ROLES]
    begins = [chance.randrange(13, 20) for _ in sites]
    drifts = [chance.choices((0, 3, 7, -7, -14), (90, 4, 3, 2, 1))[0] for _ in sites]
    scale = 65536.0
    for n in range(1, steps + 1):
        skipped = chance.random() < 0.002
        done = n / steps
        yield StepRecord(
            step=n,
            loss=1.9 + 3.7 * math.exp(-5 * done) + chance.gauss(0, 0.08),
            loss_scale=scale,
            applied=not skipped,
            skip_reason="gradients of 3 of 204 weights are inf or NaN, nearest the loss: head"
            * skipped,
            grad_norm=math.inf if skipped else 0.6 * math.exp(chance.gauss(0, 0.25)),
            lr=1e-3 * (0.55 + 0.45 * math.cos(math.pi * done)),
            lost_updates=0.02 * done if n % 10 == 0 else None,
            items=65_536,
            seconds=0.09 + 0.01 * chance.random(),
            peak_bytes=2**34,
        )
        scale = scale / 2 if skipped else min(2.0**18, scale * 2) if n % 1000 == 0 else scale
        if n % 500 == 0:
            yield EvalRecord(step=n, metrics={"loss": 1.95 + 3.7 * math.exp(-5 * done)})
        if n % 10 == 0:
            places = [
                round(b + d * done) + chance.choice((-1, 0, 0, 1))
                for b, d in zip(begins, drifts, strict=True)
            ]
            yield sample(n, sites, places, bank, chance)
        if n % 2500 == 0:
            yield from events(n, sites, chance, generator)


def sample(
    step: int,
    sites: list[tuple[str, str]],
    places: list[int],
    bank: dict[tuple[str, int], list[Statistics]],
    chance: random.Random,
) -> HealthRecord:
    formats = [FORMATS.get(role, E4M3).name for _, role in sites]
    found = [
        chance.choice(bank[name, max(0, min(place, len(SIZES) - 1))])
        for name, place in zip(formats, places, strict=True)
    ]
    columns = {key: tuple(one[key] for one in found) for key in found[0]}
    module, role = zip(*sites, strict=True)
    return HealthRecord(step=step, module=module, role=role, format=tuple(formats), **columns)


def events(
    step: int, sites: list[tuple[str, str]], chance: random.Random, generator: torch.Generator
) -> Iterator[Record]:
    narrow = [site for site in sites if site[1] not in ("grad_weight", "update")]
    for module, role in chance.sample(narrow, 6):
        target = FORMATS.get(role, E4M3)
        x = torch.randn(65_536, generator=generator) * chance.choice(SIZES)
        exponents = torch.frexp(x[x != 0]).exponent - 1
        lowest = int(exponents.min())
        counts = tuple(torch.bincount(exponents - lowest).tolist())
        yield ExponentRecord(
            step=step, module=module, role=role, format=target.name, lowest=lowest, counts=counts
        )
        yield FindingRecord(
            step=step,
            since=step - 400,
            module=module,
            role=role,
            what="saturation",
            why=f"1 % of its elements were beyond {target.largest:g}, the largest {target.name}",
            action=f"{target.name} → bf16",
            advice=f'keep it there with precision.overrides={{"{module}": bf16}}',
        )
        yield PrecisionRecord(
            step=step, module=module, before=target.name, after="bf16", reason="saturation"
        )


def plan(modules: int) -> dict[str, object]:
    rows = [
        {
            "name": name,
            "kind": "linear",
            "forward": "e4m3",
            "grad_input": "e5m2",
            "grad_weight": "e5m2",
            "params": "fp32",
            "output": "bf16",
            "how": "native",
            "reason": "native",
            "parameters": 1 << 20,
            "bytes": {"params": 4 << 20, "grads": 4 << 20, "moments": 8 << 20},
        }
        for name in names(modules)
    ]
    return {"policy": "fp8-tensor", "hardware": "made up", "modules": rows}


def write_run(folder: Path, *, steps: int, modules: int) -> None:
    settings = {"name": "long", "workload": "lm", "steps": steps, "precision.policy": "fp8-tensor"}
    resolved = {key: {"value": value, "origin": "made up"} for key, value in settings.items()}
    with RunFolder.create(
        folder, recipe_text="", resolved=resolved, environment={"cpu": "made up"}
    ) as run:
        run.write_json("plan.json", plan(modules))
        for record in course(steps, modules):
            run.write(record)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--out", type=Path, help="where to keep the run")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--modules", type=int, default=100)
    options = parser.parse_args()
    folder = options.out or Path(tempfile.mkdtemp(prefix="narrowcast-")) / "run"
    write_run(folder, steps=options.steps, modules=options.modules)
    began, ran = time.perf_counter(), time.process_time()
    # In a fresh process, as here, this packs plotly too, as every `narrowcast report` does.
    page = write_report(folder)
    figures = {
        "steps": options.steps,
        "modules": options.modules,
        "records bytes": (folder / "records.jsonl").stat().st_size,
        "page bytes": page.stat().st_size,
        "page seconds": round(time.perf_counter() - began, 2),
        "of them on the processor": round(time.process_time() - ran, 2),
    }
    print("| " + " | ".join(figures) + " |")
    print("|" + "---|" * len(figures))
    print("| " + " | ".join(f"{x:,}" for x in figures.values()) + " |")
    if options.json:
        found = {"environment": describe_machine(), **figures}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    if options.out is None:
        shutil.rmtree(folder.parent)
    return int(figures["page seconds"] > MOST_SECONDS or figures["page bytes"] > MOST_BYTES)


if __name__ == "__main__":
    raise SystemExit(main())
