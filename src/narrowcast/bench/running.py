"""A bench from what was asked for to its figures."""

import importlib
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch

from narrowcast.bench.catalogue import Bench
from narrowcast.bench.contenders import Contender, baseline_of
from narrowcast.bench.coordinator import INTERRUPTED, Contest, Result, Tell, hold
from narrowcast.bench.measure.memory import usable_bytes
from narrowcast.bench.measure.results import who_took_part
from narrowcast.bench.worker import SUBJECTS
from narrowcast.hardware import probe
from narrowcast.runs import describe_environment
from narrowcast.workloads import load_recipe


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the command line asked for; None stands for the default of the device."""

    recipe: str
    overrides: tuple[str, ...] = ()
    peers: str | None = None
    policies: str | None = None
    baseline: str | None = None
    repeats: int = 5
    steps: int = 10
    together: int | None = None
    at_once: int = 1
    timeout_seconds: float = 900
    cold: bool = True
    logs: Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What only this bench knows, as plain data."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What came of a bench."""

    results: list[Result]
    baseline: Contender
    data: dict[str, Any]
    """All of it, as plain data."""
    interrupted: bool
    """Whether somebody was still to be measured when it was ended."""


@contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """Let a scheduler's SIGTERM do what Ctrl-C does, inside the block."""
    if threading.current_thread() is not threading.main_thread():
        yield  # where nobody may say what a signal does
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def measure(name: str, asked: Asked, *, tell: Tell) -> Figures:
    """Measure what `asked` names in the bench called `name`."""
    bench = cast(Bench, importlib.import_module(SUBJECTS[name]).BENCH)
    recipe = load_recipe(asked.recipe, asked.overrides).recipe
    hardware = probe(recipe.device)
    device = torch.device(hardware.device)
    contenders = bench.contenders(
        peers=asked.peers, policies=asked.policies, device_type=device.type
    )
    baseline = baseline_of(contenders, asked.baseline)
    job = {
        "bench": name,
        "recipe": asked.recipe,
        "overrides": list(asked.overrides),
        "settings": dict(asked.settings),
    }
    contest = Contest(
        job=job,
        repeats=asked.repeats,
        request={"steps": asked.steps},
        timeout_seconds=asked.timeout_seconds,
        training_bytes=bench.bytes_of(recipe, asked.settings),
        usable_bytes=usable_bytes(device, total_bytes=hardware.memory_bytes or sys.maxsize),
        together=asked.together,
        at_once=asked.at_once,
        cold=asked.cold,
    )
    place = nullcontext(str(asked.logs)) if asked.logs else tempfile.TemporaryDirectory()
    with place as folder, terminated_like_interrupted():
        results = hold(contest, contenders, baseline=baseline, folder=Path(folder), tell=tell)
    interrupted = any(
        result.failure == INTERRUPTED or (not result.failure and len(result.rounds) < asked.repeats)
        for result in results
    )
    data = {
        "environment": describe_environment(),
        "device": hardware.name,
        "repeats": asked.repeats,
        "steps_per_round": asked.steps,
        "cold_caches": asked.cold,
        "measured_at_once": asked.at_once,
        "baseline": baseline.name,
        "interrupted": interrupted,
        **job,
        **bench.assemble(results, baseline),
        **who_took_part(results),
    }
    return Figures(results=results, baseline=baseline, data=data, interrupted=interrupted)
