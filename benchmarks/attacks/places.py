"""A run folder that moves, goes, or is taken by something else while the run writes to it."""

import shutil
import time
from pathlib import Path

from attacks import tiny
from attacks.case import (
    Case,
    difference_between,
    require_equal,
    resumed_equal,
    steps_of,
    watch_until,
)
from attacks.oracle import BAD_INPUT, DONE, Found, Verdict, well_ended

NOTICED_SECONDS = 60.0
HOW = ("moved", "moved and back", "removed", "another in its place", "parent moved", "emptied")


def while_it_runs(case: Case) -> Verdict:
    """Take the folder away: the run ends with an error, and can be resumed where it is now."""
    how = case.turn(HOW)
    step = case.rng.choice((1, 20, 60, 100))
    case.tell(f"{how} after step {step}")
    parent = case.folder / "runs"
    parent.mkdir()
    run, elsewhere = parent / "run", case.folder / "elsewhere"
    straight = case.straight(tiny.LONG)
    command = case.start("train", *tiny.WORDS[tiny.LONG], "--out", run)
    watch_until(command, lambda: steps_of(run) >= step)
    _take_away(how, run, elsewhere)
    ended = well_ended(command.wait(NOTICED_SECONDS), codes={DONE, BAD_INPUT})
    places = [run, elsewhere, elsewhere / "run"]
    if ended.code == DONE:
        if not any(difference_between(each, straight) is None for each in places if each.exists()):
            raise Found(Verdict.LOST, "done, and no folder has the whole run")
        return Verdict.FINE
    kept = next((each for each in places if (each / "records.jsonl").exists()), None)
    if kept is None:
        return Verdict.REFUSED
    resumed_equal(case, kept, straight)
    return Verdict.EQUAL


def between(case: Case) -> Verdict:
    """Move a run that stopped, and resume it where it is."""
    recipe = case.turn(tiny.RECIPES)
    straight, run = case.straight(recipe), case.stopped(recipe)
    to = case.folder / case.rng.choice(("a b", "ü", "-x", "x" * 200, "{y}", "'q'"))
    case.tell(f"{recipe} moved to {to.name}")
    run.rename(to)
    if case.rng.random() < 0.5:
        run.symlink_to(to)
        case.tell("with a link where it was")
        resumed_equal(case, run, straight)
    else:
        resumed_equal(case, to, straight)
    require_equal(to, straight)
    return Verdict.EQUAL


def _take_away(how: str, run: Path, elsewhere: Path) -> None:
    match how:
        case "moved":
            run.rename(elsewhere)
        case "moved and back":
            run.rename(elsewhere)
            time.sleep(0.3)
            if not run.exists():
                elsewhere.rename(run)
        case "removed":
            shutil.rmtree(run, ignore_errors=True)
        case "another in its place":
            run.rename(elsewhere)
            run.mkdir(exist_ok=True)
        case "parent moved":
            run.parent.rename(elsewhere)
        case "emptied":
            for path in run.iterdir():
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
