"""One run: a method trains a task for a budget, and its read-outs are judged at marks."""

from __future__ import annotations

import json
import math
import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybrid_studies.library import KINDS, Library
from hybrid_studies.methods import Flat, Jumps, Way
from hybrid_studies.readouts import HALF_LIVES, Bank, Lawa
from hybrid_studies.tasks import Task
from narrowcast.errors import DivergedError
from narrowcast.runs import describe_machine


@dataclass(frozen=True, kw_only=True)
class Run:
    """What makes a run this run and no other."""

    task: str
    way: Way
    lr: float
    seed: int
    share: float = 1.0
    """Of the task's N: the budget, which the schedule and the read-outs are planned for."""
    reported: bool = True
    """Whether the report part is looked at."""

    @property
    def key(self) -> str:
        return f"{self.task}/{self.way.name}/lr{self.lr:.4g}/x{self.share:g}/seed{self.seed}"


def train(task: Task, run: Run, *, half_lives: Sequence[float] = HALF_LIVES) -> dict[str, Any]:
    """Return what every read-out scores, at the stops of a plan of N and at the end."""
    plan = round(run.share * task.steps)
    flat = Flat(task, seed=run.seed)
    method = KINDS[run.way.kind](flat, run.way, lr=run.lr, plan=plan)
    batches = task.train(torch.Generator().manual_seed(10_000 + run.seed))
    bank, lawa = Bank(half_lives, plan=plan), Lawa(plan=plan)
    followed = method.can_be_followed and task.banked
    extra = None
    if followed and "y" in method.answers() and not run.reported:
        extra = Bank(half_lives, plan=plan)
    stops = {round(stop * plan): stop for stop in task.stops if run.reported and run.share == 1}
    marks: dict[str, Any] = {}
    chosen_for: dict[str, float] = {}
    seconds = upkeep = 0.0
    # What the host does on a GPU says little: the clock, and the device is waited for at marks.
    clock = time.perf_counter if task.device == "cuda" else time.process_time
    for step in range(1, plan + 1):
        began = clock()
        try:
            method.step(next(batches))
        except DivergedError:  # the library gives up where a plain optimizer goes on with NaN
            lost = {"now": [math.inf, math.inf]}
            marks |= {name: lost for each in stops.values() if (name := f"{each:g}") not in marks}
            marks["end"] = lost
            break
        if task.device == "cuda" and (step in stops or step == plan):
            torch.cuda.synchronize()
        between = clock()
        if followed:
            answers = method.answers()
            bank.add(answers["now"])
            lawa.add(answers["now"])
            if extra is not None:
                extra.add(answers["y"])
        seconds += between - began
        upkeep += clock() - between
        if step in stops or step == plan:
            found = method.answers()
            if followed:
                found |= bank.answers() | (lawa.answers() if run.way.schedule == "constant" else {})
            if extra is not None:
                found |= {f"y-{name}": each for name, each in extra.answers().items()}
            name = "end" if step == plan else f"{stops[step]:g}"
            if isinstance(method, Library):
                chosen_for[name] = round(method.chosen_for, 3)
            marks[name] = judged(
                flat, found, reported=run.reported, bank=tuple(bank.answers()) if followed else ()
            )
    result = {
        "task": run.task, "way": run.way.name, "lr": run.lr, "seed": run.seed, "share": run.share,
        "steps": plan, "spent": round(method.spent, 2), "seconds": round(seconds, 3),
        "upkeep_seconds": round(upkeep, 3), "marks": marks,
    }  # fmt: skip
    if isinstance(method, Jumps) or run.way.constants.get("preset") == "aggressive":
        result |= {"offered": method.offered, "accepted": method.accepted}
    if isinstance(method, Library):
        result |= {"chosen": method.chosen, "chosen_for": chosen_for}
    return result


def judged(
    flat: Flat, found: dict[str, Tensor], *, reported: bool, bank: Sequence[str]
) -> dict[str, list[float | None]]:
    """Return the loss of every read-out on the selection part, and on the report part of some.

    Those are the weights as they are, the best of them and the bank on the selection part, and
    averages of checkpoints: what the rows of the table ask for, as the report part is large.
    """
    selection = {name: flat.loss(flat.task.selection, each) for name, each in found.items()}
    best = min(("now", *bank), key=lambda name: round(selection[name], 6))
    asked = {"now", "lawa", best} if reported else set()
    return {
        name: [
            round(selection[name], 6),
            round(flat.loss(flat.task.report, each), 6) if name in asked else None,
        ]
        for name, each in found.items()
    }


class Runs:
    """Finished runs, kept in a JSON file, so that a study can be made in slices."""

    def __init__(self, path: Path, *, minutes: float, jobs: int = 1) -> None:
        self.path, self.until, self.jobs = path, time.monotonic() + 60 * minutes, jobs
        self.done: dict[str, Any] = {}
        if path.exists():
            self.done = json.loads(path.read_text())["runs"]

    def get(self, task: Task, run: Run, **more: Any) -> dict[str, Any]:
        """Return the result of a run, trained now if it was not before."""
        return self.all(task, [run], **more)[0]

    def all(self, task: Task, wanted: Sequence[Run], **more: Any) -> list[dict[str, Any]]:
        """Return the results of runs; those that are missing are trained, `jobs` at once."""
        missing = [run for run in wanted if run.key not in self.done]
        if missing and time.monotonic() > self.until:
            raise TimeoutError
        if self.jobs == 1 or len(missing) < 2:
            for run in missing:
                self.keep(run.key, train(task, run, **more))
        else:
            task.make()  # what it keeps for later, the workers have too
            # Forked: a task holds functions, which do not travel, and its data need not.
            with multiprocessing.get_context("fork").Pool(
                self.jobs, initializer=INHERITED.update, initargs=({"task": task, **more},)
            ) as pool:
                for key, found in pool.imap_unordered(inherited, missing):
                    self.keep(key, found)
        return [self.done[run.key] for run in wanted]

    def keep(self, key: str, found: dict[str, Any]) -> None:
        """Write a result down and say it."""
        self.done[key] = found
        self.write()
        scores = " ".join(
            f"{name} {selection:.4f}/{report or 0:.4f}"
            for name, (selection, report) in found["marks"]["end"].items()
        )
        print(f"{key}: {scores} ({found['seconds']:.1f} s)", flush=True)

    def write(self, **more: Any) -> None:
        """Write what there is; a break in the middle loses nothing that was there."""
        environment = describe_machine()
        head = json.dumps({"environment": environment, **more}, indent=1)[:-2]
        # One run a line: hundreds of them, and each is read as a whole.
        lines = (f"  {json.dumps(key)}: {json.dumps(run)}" for key, run in self.done.items())
        beside = self.path.with_suffix(".part")
        beside.write_text(head + ',\n "runs": {\n' + ",\n".join(lines) + "\n }\n}\n")
        beside.replace(self.path)


INHERITED: dict[str, Any] = {}
"""Of a worker process: the task and how it is read out."""


def inherited(run: Run) -> tuple[str, dict[str, Any]]:
    return run.key, train(run=run, **INHERITED)
