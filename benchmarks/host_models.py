"""What a step of the zoo's models costs the host: AMP, and ours by the drop-in.

    python benchmarks/host_models.py [--models NAME ...] [--ways NAME ...] [--mode MODE] [--whole]
        [--rounds N] [--profile] [--json FILE]

The models are those of `narrowcast bench models`, whole, with a batch of one row of 64 tokens or
one picture: the device has next to nothing to do, and a step takes what the host takes to ask for
it. Models of this kind are trained at that speed wherever batches are small. `--profile` adds the
functions in which the host spends its time, `--whole` takes the zoo's own batches: some models have
the host wait for no device even then. Ways take turns, and are compared round by round: a host that
is shared changes its speed within minutes. On a CPU, which computes as well, this says nothing.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from host_functions import hottest
from narrowcast.bench.zoo.built import BuiltModel
from narrowcast.bench.zoo.models import ZOO, build_model
from narrowcast.bench.zoo.ways import AMP, BF16_SPLIT, WAYS, ZooTrial, make_step
from narrowcast.runs.environment import describe_environment

WARM_UP, STEPS, SHOWN = 5, 5, 40
LENGTH = 64


def little(made: BuiltModel) -> BuiltModel:
    """Return a model with the first 64 places of the first row, or the first picture."""

    def cut(given: Any) -> Any:
        if not isinstance(given, Tensor) or not given.dim():
            return given
        # Tokens, labels of places, and rows of vectors; else pictures, and what belongs to one.
        in_places = given.dim() == 3 or (given.dim() == 2 and not given.is_floating_point())
        return given[:1, :LENGTH].contiguous() if in_places else given[:1]

    return replace(made, inputs=tuple(cut(each) for each in made.inputs))


def rounds_ms(
    steps: list[Callable[[], Any]], device: torch.device, *, rounds: int
) -> list[list[float]]:
    """Return what each step takes, round by round, all of them in turn: hosts grow slow at times.

    A round begins with nothing queued.
    """
    found: list[list[float]] = [[] for _ in steps]
    for _ in range(rounds):
        for step, own in zip(steps, found, strict=True):
            _wait(device)
            begin = time.perf_counter()
            for _ in range(STEPS):
                step()
            _wait(device)
            own.append((time.perf_counter() - begin) / STEPS * 1e3)
    return found


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def ready_step(trial: ZooTrial, device: torch.device, *, whole: bool) -> Callable[[], Any]:
    made = build_model(trial.model, device, quick=False)
    made = made if whole else little(made)
    step, _ = make_step(made, trial, device)
    for _ in range(WARM_UP):
        step()
    return step


def measured(
    trials: Sequence[ZooTrial], device: torch.device, *, whole: bool, rounds: int, profiled: bool
) -> list[dict[str, Any]]:
    """Return a row for each trial, of which the first is what others are compared with."""
    steps = [ready_step(trial, device, whole=whole) for trial in trials]
    found = rounds_ms(steps, device, rounds=rounds)
    rows: list[dict[str, Any]] = []
    for trial, step, own in zip(trials, steps, found, strict=True):
        ratios = [theirs / ours for theirs, ours in zip(found[0], own, strict=True)]
        row: dict[str, Any] = {
            "model": trial.model,
            "way": trial.way,
            "mode": trial.mode,
            "ms": round(statistics.median(own), 2),
            "rounds_ms": [round(each, 2) for each in own],
            "times_as_fast": round(statistics.median(ratios), 3),
        }
        rows.append(
            row | ({"host_functions": hottest(step, calls=STEPS, count=SHOWN)} if profiled else {})
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=tuple(ZOO), default=tuple(ZOO))
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), default=(AMP, BF16_SPLIT))
    parser.add_argument("--mode", choices=("eager", "compiled"), default="eager")
    parser.add_argument("--rounds", type=int, default=7, help="how often each way has its turn")
    parser.add_argument("--whole", action="store_true", help="with whole batches")
    parser.add_argument("--profile", action="store_true", help="say where the host is")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    device, rows = torch.device(options.device), list[dict[str, Any]]()
    print(
        f"| model | way | host ms a step | times as fast as {options.ways[0]} |\n|---|---|---|---|"
    )
    for name in options.models:
        for row in measured(
            [ZooTrial(model=name, way=way, mode=options.mode) for way in options.ways],
            device,
            whole=options.whole,
            rounds=options.rounds,
            profiled=options.profile,
        ):
            rows.append(row)
            print(f"| {name} | {row['way']} | {row['ms']} | {row['times_as_fast']} |", flush=True)
        if options.json:
            figures = {
                "environment": describe_environment(),
                "whole": options.whole,
                "rows": rows,
            }
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
