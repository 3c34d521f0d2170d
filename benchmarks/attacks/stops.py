"""Signals that ask a run to stop, once or twice: it ends in words, and goes on where it was."""

import signal
import time
from pathlib import Path

from attacks import tiny
from attacks.case import (
    FRESH_SECONDS,
    SECONDS,
    Case,
    require_equal,
    resumed_equal,
    steps_of,
    watch_until,
)
from attacks.oracle import DONE, INTERRUPTED, Found, Verdict, well_ended

ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_COMBINATIONS = [(first, second) for first in ASKING for second in (None, *ASKING)]


def once_or_twice(case: Case) -> Verdict:
    recipe = case.turn(tiny.RECIPES)
    straight, run = case.straight(recipe), case.folder / "run"
    first, second = case.turn(_COMBINATIONS)
    step = case.rng.randint(0, tiny.STEPS)
    case.tell(f"{recipe}: {first.name} after step {step}")
    command = case.start("train", *tiny.RECIPES[recipe], "--out", run)
    watch_until(command, lambda: steps_of(run) >= step and (step > 0 or run.exists()))
    time.sleep(case.rng.choice((0, 0.002, 0.01, 0.1)))
    command.send(first)
    before = steps_of(run)
    if second is not None:
        pause = case.rng.choice((0, 0.001, 0.01, 0.1))
        case.tell(f"{second.name} after {pause} s")
        time.sleep(pause)
        command.send(second)
    # The same again means what it meant before the run began, and another one is one more request;
    # before the first step and after the last there is nothing to save, and any means what it did.
    saves = 0 < before < tiny.STEPS and second != first
    # The second one may come when the first has ended the run, and its handlers are gone.
    own = ({-second} if second else set()) if saves else {-first, -(second or first)}
    ended = well_ended(command.wait(SECONDS), codes={DONE, INTERRUPTED, *own})
    if ended.code == DONE:
        require_equal(run, straight, asked_to_stop=True)
        return Verdict.FINE
    if not (run / "records.jsonl").exists():
        return Verdict.FINE
    if saves and _last_saved(run) < before:
        raise Found(Verdict.LOST, f"step {before} was done, and its end saved no checkpoint of it")
    if ended.code == INTERRUPTED and saves and second is None:
        _check_says_how(ended.err, str(run))
    resumed_equal(case, run, straight, asked_to_stop=True)
    return Verdict.EQUAL


def while_it_starts(case: Case) -> Verdict:
    """Stop a process while it imports and builds, which takes seconds: no traceback of ours."""
    number, words = case.turn(ASKING), tiny.RECIPES["tutorial"]
    # Earlier than half a second the interpreter itself may still be starting.
    delay, run = case.rng.uniform(0.5, 5), case.folder / "run"
    case.tell(f"{number.name} {delay:.2f} s after its start")
    command = case.start("train", *words, "--out", run, fresh=True)
    time.sleep(delay)
    command.send(number)
    ended = well_ended(command.wait(FRESH_SECONDS), codes={DONE, INTERRUPTED, -number})
    if ended.code == DONE or not (run / "records.jsonl").exists():
        return Verdict.FINE
    resumed_equal(case, run, case.straight("tutorial"), asked_to_stop=True)
    return Verdict.EQUAL


def _last_saved(run: Path) -> int:
    return max((int(p.name[-6:]) for p in (run / "checkpoints").glob("step-??????")), default=0)


def _check_says_how(said: str, run: str) -> None:
    if f"narrowcast resume {run}" not in said:
        raise Found(Verdict.SILENT, f"interrupted, and does not say how to resume: {said[-200:]}")
