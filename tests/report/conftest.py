"""Run folders for the report's tests: written as a run writes them, with made-up numbers."""

import importlib.util
import math
import random
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from narrowcast.numerics import cast_loss, plain_format, round_to, snr_db
from narrowcast.report.run_data import RunData, by_kind
from narrowcast.runs import (
    CheckpointRecord,
    EvalRecord,
    ExponentRecord,
    FindingRecord,
    HealthRecord,
    Metric,
    PrecisionRecord,
    Record,
    RunFolder,
    StepRecord,
    TaskInfo,
)
from narrowcast.runs.task_info import BEFORE_TASK_JSON

WHY = "blocks.3.mlp.down: 2 of 65,536 gradients overflowed fp16"


def step(number: int, **changes: Any) -> StepRecord:
    values: dict[str, Any] = {
        "step": number,
        "loss": 2.0,
        "loss_scale": 65536.0,
        "applied": True,
        "skip_reason": "",
        "grad_norm": 1.0,
        "lr": 1e-3,
        "lost_updates": None,
        "items": 4096,
        "seconds": 0.1,
        "peak_bytes": 300 * 2**20,
    }
    return StepRecord(**{**values, **changes})


def module(name: str, **changes: Any) -> dict[str, Any]:
    values = {
        "name": name,
        "kind": "linear",
        "forward": "fp16",
        "grad_input": "fp16",
        "grad_weight": "fp16",
        "params": "fp16",
        "output": "fp16",
        "how": "emulated",
        "reason": "emulated: this CPU has no fp16 products",
        "parameters": 65_536,
        "bytes": {"params": 131_072, "grads": 131_072, "master": 262_144, "moments": 524_288},
    }
    return {**values, **changes}


def gpt_modules(blocks: int) -> list[dict[str, Any]]:
    norm: dict[str, Any] = {
        "kind": "normalisation",
        "forward": "fp32",
        "grad_input": "fp32",
        "grad_weight": "fp32",
        "params": "fp32",
        "output": "fp32",
        "how": "unchanged",
        "reason": "kept fp32: normalisation",
        "parameters": 128,
    }
    modules = [
        module("embed", **{**norm, "kind": "embedding", "parameters": 32_768,
                           "reason": "kept fp32: embedding lookup, no products"})
    ]  # fmt: skip
    for i in range(blocks):
        modules += [
            module(f"blocks.{i}.norm1", **norm),
            module(f"blocks.{i}.attn.qkv", parameters=49_152),
            module(f"blocks.{i}.attn.out", parameters=16_384),
            module(f"blocks.{i}.norm2", **norm),
            module(f"blocks.{i}.mlp.up"),
            module(f"blocks.{i}.mlp.down"),
        ]
    modules += [
        module("norm", **norm),
        module("head", forward="bf16", grad_input="bf16", grad_weight="fp32",
               reason="emulated: asked for by the exception head: bf16", parameters=32_768),
    ]  # fmt: skip
    return modules


def a_plan(modules: list[dict[str, Any]]) -> dict[str, Any]:
    roles = ("params", "grads", "master", "moments")
    return {
        "policy": "fp16",
        "hardware": "CPU, 2 cores",
        "modules": modules,
        "functional": {
            "format": "fp16",
            "how": "emulated",
            "reason": "emulated: this CPU has no fp16 products",
        },
        "bytes": {role: sum(m["bytes"][role] for m in modules) for role in roles},
    }


def settings(steps: int, **changes: Any) -> dict[str, dict[str, Any]]:
    found: dict[str, tuple[Any, str]] = {
        "name": ("quickstart", "quickstart.yaml"),
        "description": (
            "a small language model on English text, two minutes on two cores",
            "quickstart.yaml",
        ),
        "workload": ("lm", "quickstart.yaml"),
        "steps": (steps, "command line"),
        "batch_size": (16, "quickstart.yaml"),
        "seed": (0, "default"),
        "gradient_accumulation_steps": (1, "default"),
        "clip_norm": (1.0, "default"),
        "optimizer.name": ("adamw", "default"),
        "optimizer.lr": (1e-3, "quickstart.yaml"),
        "optimizer.betas": ([0.9, 0.95], "quickstart.yaml"),
        "lr_schedule.warmup": (100, "quickstart.yaml"),
        "precision.policy": ("fp16", "command line"),
        "precision.overrides": ({"head": "bf16"}, "quickstart.yaml"),
        "precision.loss_scale.init_scale": (65536.0, "default"),
        "precision.loss_scale.max_skipped_steps": (50, "default"),
        "eval.every": (100, "quickstart.yaml"),
    }
    found.update({key: (value, "command line") for key, value in changes.items()})
    return {key: {"value": value, "origin": origin} for key, (value, origin) in found.items()}


def a_course(steps: int, *, eval_every: int, seed: int = 0) -> list[Record]:
    """Make up the records of a run that learns, and overflows now and then."""
    chance = random.Random(seed)
    records: list[Record] = []
    scale, calm = 2.0**17, 0
    for n in range(1, steps + 1):
        loss = 1.9 + 3.7 * math.exp(-5 * n / steps) + chance.gauss(0, 0.09)
        overflow = (scale > 2**16 and chance.random() < 0.004) or n in (2, 3)
        warm = min(1.0, n / (0.05 * steps))
        lr = 1e-3 * warm * (0.55 + 0.45 * math.cos(math.pi * n / steps))
        records.append(
            step(
                n,
                loss=loss,
                loss_scale=scale,
                applied=not overflow,
                skip_reason=WHY if overflow else "",
                grad_norm=math.inf if overflow else 0.6 * math.exp(chance.gauss(0, 0.25)),
                lr=lr,
                lost_updates=0.02 + 0.06 * n / steps + chance.random() * 0.01,
                seconds=0.09 + 0.01 * chance.random() + (0.4 if n == 1 else 0),
            )
        )
        calm = 0 if overflow else calm + 1
        scale = scale / 2 if overflow else scale * 2 if calm % max(1, steps // 6) == 0 else scale
        if n % eval_every == 0:
            metrics = {"loss": loss + 0.06, "perplexity": math.exp(loss + 0.06)}
            records.append(EvalRecord(step=n, metrics=metrics))
            records.append(
                CheckpointRecord(step=n, seconds_blocked=0.02, seconds_total=0.2, bytes=2**24)
            )
    records.append(
        FindingRecord(
            step=3,
            since=2,
            module="blocks.3.mlp.down",
            role="grad_weight",
            what="the scale began too high: 2 steps in a row overflowed",
            why="amax 7.1e4 is beyond 65,504, the largest fp16",
            action="scale 131,072 → 32,768",
            advice="begin lower: precision.loss_scale.init_scale=32768",
        )
    )
    return records


def tensor(size: float, *, seed: int = 0) -> torch.Tensor:
    """Draw normal numbers of a standard deviation."""
    return torch.randn(512, generator=torch.Generator().manual_seed(seed)) * size


def a_sample(number: int, tensors: dict[tuple[str, str], tuple[str, torch.Tensor]]) -> HealthRecord:
    """Measure what formats do to tensors, by module and role, as a run would."""
    rows = []
    for (name, role), (target, x) in tensors.items():
        known = plain_format(target)
        lost = cast_loss(x, known)
        small = (x != 0) & (x.abs() < known.smallest_normal)
        exact = target == "fp32"
        rows.append(
            {
                "module": name,
                "role": role,
                "format": target,
                "amax": float(x.abs().max()),
                "amin": float(x[x != 0].abs().min()),
                "overflow": lost.overflow_rate,
                "underflow": lost.flush_rate,
                "subnormal": float(small.double().mean()),
                "nonfinite": lost.nonfinite / lost.elements,
                "snr_db": None if exact else snr_db(x, round_to(x, known, saturate=True)),
            }
        )
    columns = {key: tuple(row[key] for row in rows) for key in rows[0]}
    return HealthRecord(step=number, **columns)


def growing(steps: range, names: list[str]) -> list[HealthRecord]:
    """Sample modules of which the activations of the last grow beyond e4m3."""
    found = []
    for n in steps:
        tensors = {}
        for i, name in enumerate(names):
            grown = 2.0 ** (12 * n / steps[-1]) if i == len(names) - 1 else 1.0
            tensors[name, "input"] = ("e4m3", tensor(grown, seed=i))
            tensors[name, "grad_output"] = ("e5m2", tensor(1e-3, seed=100 + i))
        found.append(a_sample(n, tensors))
    return found


def exponents_of(number: int, name: str, role: str, target: str, x: torch.Tensor) -> ExponentRecord:
    """Count the exponents of a tensor."""
    powers = torch.frexp(x[x != 0]).exponent - 1
    lowest = int(powers.min())
    counts = tuple(torch.bincount(powers - lowest).tolist())
    return ExponentRecord(
        step=number, module=name, role=role, format=target, lowest=lowest, counts=counts
    )


ENVIRONMENT = {
    "started": "2026-01-05T09:30:00+00:00",
    "narrowcast": "0.1.0",
    "commit": None,
    "python": "3.11.9",
    "torch": "2.13.0",
    "platform": "Linux",
    "cpu": "Example CPU",
    "cores": 2,
    "memory_bytes": 8 * 2**30,
    "cuda": None,
    "gpus": [],
}


def write_run(
    path: Path,
    records: Iterable[Record],
    *,
    steps: int,
    plan: dict[str, Any] | None = None,
    task: TaskInfo | None = None,
    **changes: Any,
) -> Path:
    with RunFolder.create(
        path,
        recipe_text="workload: lm\nsteps: 300  # enough to see it learn\n",
        resolved=settings(steps, **changes),
        environment=ENVIRONMENT,
    ) as run:
        if plan is not None:
            run.write_json("plan.json", plan)
        if task is not None:
            run.write_json("task.json", task.to_json())
        for record in records:
            run.write(record)
    return path


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Write a run folder from records; `steps` is what the recipe asked for."""

    def make(records: Iterable[Record], *, folder: str = "run", **rest: Any) -> Path:
        return write_run(tmp_path / folder, records, **rest)

    return make


@pytest.fixture
def run_folder(make_run: Callable[..., Path]) -> Path:
    """A finished run of 300 steps with evaluations, skips, a finding, checkpoints and a plan."""
    return make_run(a_course(300, eval_every=100), steps=300, plan=a_plan(gpt_modules(4)))


CLASSIFIER = TaskInfo(
    unit="series",
    plural="series",
    metrics=(Metric(name="accuracy", better="higher", text=".1%"), Metric(name="loss")),
    loss_parts=("reconstruction", "sparsity"),
)
"""A task that is nothing like a language model: what it counts, how it is judged, its loss."""


@pytest.fixture(scope="session")
def classifier() -> TaskInfo:
    """A task with a plural of its own, a headline that rises, and a loss of two parts."""
    return CLASSIFIER


@pytest.fixture(scope="session")
def classifier_course(course: Callable[..., list[Record]]) -> list[Record]:
    """The records of such a task."""

    def judged(record: Record) -> Record:
        match record:
            case StepRecord():
                sparsity = 0.25 + 0.001 * record.step
                parts = {"reconstruction": record.loss - sparsity, "sparsity": sparsity}
                return replace(record, loss_parts=parts)
            case EvalRecord():
                accuracy = 0.5 + 0.001 * record.step
                return replace(record, metrics={"loss": 2.0, "accuracy": accuracy})
            case _:
                return record

    return [judged(record) for record in course(300, eval_every=100)]


@pytest.fixture(scope="session", name="tensor")
def tensor_fixture() -> Callable[..., torch.Tensor]:
    """Draw normal numbers of a standard deviation."""
    return tensor


@pytest.fixture(scope="session", name="sample")
def sample_fixture() -> Callable[..., HealthRecord]:
    """Measure what formats do to tensors: a step, and format and tensor by module and role."""
    return a_sample


@pytest.fixture(scope="session", name="growing")
def growing_fixture() -> Callable[..., list[HealthRecord]]:
    """Sample modules over steps; the activations of the last one grow beyond e4m3."""
    return growing


@pytest.fixture(scope="session", name="exponents_of")
def exponents_fixture() -> Callable[..., ExponentRecord]:
    """Count the exponents of a tensor."""
    return exponents_of


@pytest.fixture
def healthy_folder(make_run: Callable[..., Path]) -> Path:
    """A run of 300 steps whose blocks.1.mlp.down outgrows e4m3 and is moved to bf16 at step 200."""
    names = ["blocks.0.attn.qkv", "blocks.0.mlp.down", "blocks.1.attn.qkv", "blocks.1.mlp.down"]
    change = PrecisionRecord(
        step=200, module=names[-1], before="fp16", after="bf16", reason="saturated"
    )
    finding = FindingRecord(
        step=200,
        since=150,
        module=names[-1],
        role="input",
        what="saturation",
        why="amax 2,900 is beyond 448, the largest e4m3",
        action="fp16 → bf16",
        advice="keep it with precision.overrides",
    )
    records = [
        *a_course(300, eval_every=100),
        *growing(range(10, 301, 10), names),
        exponents_of(300, names[-1], "input", "e4m3", tensor(2.0**9)),
        exponents_of(300, names[0], "grad_output", "e5m2", tensor(2.0**-14)),
        change,
        finding,
    ]
    return make_run(records, steps=300, folder="healthy", plan=a_plan(gpt_modules(4)))


@pytest.fixture(scope="session", name="step")
def step_fixture() -> Callable[..., StepRecord]:
    """Make a step record: its number, and what differs from an ordinary one."""
    return step


@pytest.fixture(scope="session", name="module")
def module_fixture() -> Callable[..., dict[str, Any]]:
    """Make a module of a plan: its name, and what differs from an ordinary one."""
    return module


@pytest.fixture(scope="session", name="plan_of")
def plan_fixture() -> Callable[[list[dict[str, Any]]], dict[str, Any]]:
    """Make a plan of modules."""
    return a_plan


@pytest.fixture(scope="session", name="gpt_modules")
def gpt_fixture() -> Callable[[int], list[dict[str, Any]]]:
    """Make the modules of a GPT of so many blocks."""
    return gpt_modules


@pytest.fixture(scope="session", name="course")
def course_fixture() -> Callable[..., list[Record]]:
    """Make up the records of a run of so many steps."""
    return a_course


@pytest.fixture(scope="session", name="run_data_of")
def run_data_fixture() -> Callable[..., RunData]:
    """Make the data of a run from its records."""

    def make(
        records: Iterable[Record], *, steps: int, task: TaskInfo = BEFORE_TASK_JSON, **changes: Any
    ) -> RunData:
        return RunData(
            **by_kind(records),
            settings=settings(steps, **changes),
            recipe_text="",
            sessions=(),
            task=task,
        )

    return make


@pytest.fixture(scope="session")
def browser_is_there():
    """Skip, with what to install, where pages cannot be looked at."""
    driver = shutil.which("chromium") and shutil.which("chromedriver")
    needed = {
        "Chromium and its driver (Debian packages chromium and chromium-driver)": driver,
        "selenium (pip install selenium)": importlib.util.find_spec("selenium"),
    }
    missing = [name for name, found in needed.items() if not found]
    if missing:
        pytest.skip(f"needs {' and '.join(missing)}")


@pytest.fixture(scope="session")
def make_watch():
    """The script that makes pictures of the live page for the documentation."""
    script = Path(__file__).parents[2] / "docs" / "images" / "make_watch.py"
    spec = importlib.util.spec_from_file_location("make_watch", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark what looks at pages; what selenium leaves behind is its own affair."""
    marks = [
        pytest.mark.filterwarnings("default::ResourceWarning"),
        pytest.mark.filterwarnings("default::pytest.PytestUnraisableExceptionWarning"),
    ]
    for item in items:
        if "browser_is_there" in getattr(item, "fixturenames", ()):
            for mark in marks:
                item.add_marker(mark)
