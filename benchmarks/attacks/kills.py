"""SIGKILL at a chosen moment, once or several times; then resumed, and equal to the last bit."""

import time
from collections.abc import Callable
from pathlib import Path

from attacks import tiny
from attacks.case import (
    SECONDS,
    Case,
    require_equal,
    resumed_equal,
    steps_of,
    watch_until,
)
from attacks.forks import Command
from attacks.oracle import BAD_INPUT, DONE, Found, Verdict, well_ended

Moment = Callable[[Case, Command, Path], bool]
"""Wait for a moment in a run; False: the run has ended before it came."""
MOST_KILLS = 3


def in_a_step(case: Case) -> Verdict:
    return _kill_and_resume(case, _a_step)


def in_a_checkpoint(case: Case) -> Verdict:
    return _kill_and_resume(case, _a_checkpoint)


def in_the_export(case: Case) -> Verdict:
    return _kill_and_resume(case, _the_export)


def in_the_report(case: Case) -> Verdict:
    return _kill_and_resume(case, _the_report)


def at_any_time(case: Case) -> Verdict:
    return _kill_and_resume(case, _any_time)


def while_it_begins(case: Case) -> Verdict:
    """Kill while the folder is made: it can be resumed, or nothing in it is worth that."""
    recipe = case.turn(tiny.RECIPES)
    straight, run = case.straight(recipe), case.folder / "run"
    command = case.start("train", *tiny.RECIPES[recipe], "--out", run)
    names = ("", "recipe.yaml", "checkpoints", "resolved.json", "environment.json", "task.json")
    name = case.rng.choice(names)
    case.tell(f"{recipe}: killed when {name or 'its folder'} is there")
    watch_until(command, (run / name).exists)
    time.sleep(case.rng.choice((0, 0, 0.001, 0.003)))
    command.kill()
    command.wait(SECONDS)
    if not run.exists():
        return Verdict.FINE
    worth = steps_of(run) > 0
    ended = case.run("resume", run, codes={DONE, BAD_INPUT})
    if ended.code == DONE:
        require_equal(run, straight)
        return Verdict.EQUAL
    if worth:
        raise Found(Verdict.LOST, f"steps were recorded, and cannot be resumed: {ended.err[:300]}")
    return Verdict.REFUSED


def of_any_recipe(case: Case) -> Verdict:
    """Kill a run whose recipe is drawn by chance, after a run of it that is left alone."""
    words = tiny.any_recipe(case.rng)
    case.tell(" ".join(words[1 + len(tiny.SHAPE) + len(tiny.COURSE) :]))
    straight, run = case.folder / "straight", case.folder / "run"
    case.run("train", *words, "--out", straight, codes={DONE})
    command = case.start("train", *words, "--out", run)
    came = _any_time(case, command, run)
    command.kill()
    command.wait(SECONDS)
    if not (run / "records.jsonl").exists():
        return Verdict.FINE
    resumed_equal(case, run, straight)
    return Verdict.EQUAL if came else Verdict.FINE


def _kill_and_resume(case: Case, moment: Moment) -> Verdict:
    recipe = case.turn(tiny.RECIPES)
    straight, run = case.straight(recipe), case.folder / "run"
    kills = case.rng.choice((1, 1, 1, 2, MOST_KILLS))
    case.tell(f"{recipe}, {kills} kills")
    words = ["train", *tiny.RECIPES[recipe], "--out", str(run)]
    killed = 0
    for _ in range(kills):
        command = case.start(*words)
        came = moment(case, command, run)
        command.kill()
        ended = command.wait(SECONDS)
        killed += came
        if not came and ended.code != DONE:
            well_ended(ended, codes={DONE})
        if (run / "resolved.json").exists() and (run / "records.jsonl").exists():
            words = ["resume", str(run)]
        elif run.exists():  # nothing was begun yet
            run.rename(case.folder / f"left {len(case.commands)}")
    if words[0] == "train":
        case.run(*words, codes={DONE})
        require_equal(run, straight)
        return Verdict.FINE
    resumed_equal(case, run, straight)
    return Verdict.EQUAL if killed else Verdict.FINE


def _a_step(case: Case, command: Command, run: Path) -> bool:
    step = case.rng.randint(1, tiny.STEPS - 1)
    case.tell(f"in step {step + 1}")
    came = watch_until(command, lambda: steps_of(run) >= step)
    time.sleep(case.rng.uniform(0, 0.006))
    return came


def _a_checkpoint(case: Case, command: Command, run: Path) -> bool:
    """Wait for a name that is only there while a checkpoint is written or removed."""
    first = case.rng.randint(0, tiny.STEPS - 4)
    case.tell(f"in a checkpoint after step {first}")
    if not watch_until(command, lambda: steps_of(run) >= first):
        return False
    came = watch_until(command, lambda: _beside(run / "checkpoints"))
    time.sleep(case.rng.choice((0, 0, 0.0005, 0.001, 0.002, 0.004)))
    return came


def _the_export(case: Case, command: Command, run: Path) -> bool:
    whole = case.rng.random() < 0.5
    case.tell("after the export" if whole else "in the export")
    weights = run / "model.safetensors"
    return watch_until(command, lambda: weights.exists() or (not whole and _beside(run, weights)))


def _the_report(case: Case, command: Command, run: Path) -> bool:
    """Wait for the weights, and then as long as the first half of a report takes."""
    delay = case.rng.choice((0, 0.01, 0.05, 0.1, 0.2, 0.3, -1))
    case.tell(f"{delay} s into the report" if delay >= 0 else "while the report is written")
    page = run / "report.html"
    if not watch_until(command, (run / "model.safetensors").exists):
        return False
    if delay < 0:
        return watch_until(command, lambda: _beside(run, page))
    time.sleep(delay)
    return command.running()


def _any_time(case: Case, command: Command, run: Path) -> bool:
    delay = case.rng.uniform(0, 1.2)
    case.tell(f"after {delay:.3f} s")
    time.sleep(delay)
    return command.running()


def _beside(folder: Path, target: Path | None = None) -> bool:
    """Say whether something in `folder` is written under another name."""
    prefix = "" if target is None else target.name
    try:
        return any(
            ".tmp-" in path.name and path.name.startswith(prefix) for path in folder.iterdir()
        )
    except OSError:
        return False
