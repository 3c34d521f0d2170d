"""Every file of a run spoilt in every way, and then the run resumed, reported or compared."""

import json
import re
import shutil
from pathlib import Path

from attacks import spoil
from attacks.case import (
    Case,
    contents,
    copied,
    require_equal,
    require_untouched,
    resumed_equal,
)
from attacks.forks import Ended
from attacks.oracle import BAD_INPUT, DONE, Found, Verdict, refused

CHECKPOINT_FILES = ("state.json", "tensors.safetensors")
FILES = (
    "recipe.yaml",
    "resolved.json",
    "environment.json",
    "task.json",
    "plan.json",
    ".lock",
    *(f"newest/{name}" for name in CHECKPOINT_FILES),
    *(f"newest/{name}" for name in CHECKPOINT_FILES),  # twice: most depends on them
    *(f"older/{name}" for name in CHECKPOINT_FILES),
)
RESULTS = ("model.safetensors", "report.html")
NOT_NEEDED = ("environment.json", *RESULTS, *(f"older/{name}" for name in CHECKPOINT_FILES))
"""Files a run can go on without; to refuse it for them is to lose it."""
STRAY = ("step-000099.tmp-1", "step-000099.tmp-removed", "notes.txt", "step-000099", "step-x")


def then_resumed(case: Case) -> Verdict:
    finished = case.rng.random() < 0.4
    name = case.turn((*FILES, *RESULTS) if finished else FILES)
    return _resume(case, name, finished=finished)


def records_then_resumed(case: Case) -> Verdict:
    return _resume(case, "records.jsonl", finished=case.rng.random() < 0.2)


def then_reported(case: Case) -> Verdict:
    """Make the report again: it is made or refused; nothing else in the folder changes."""
    name = case.turn((*FILES, "records.jsonl", "records.jsonl"))
    run, straight = _base(case, finished=case.rng.random() < 0.5)
    way = _spoil(case, run, name, straight)
    before = contents(run)
    ended = case.run("report", run, codes={DONE, BAD_INPUT})
    _require_same(run, before, but=() if refused(ended) else ("report.html",), way=way)
    return Verdict.REFUSED if refused(ended) else Verdict.FINE


def then_compared(case: Case) -> Verdict:
    """Compare a spoilt run with a good one; nothing in the folder changes."""
    name = case.turn((*FILES, "records.jsonl", "records.jsonl"))
    run, straight = _base(case, finished=case.rng.random() < 0.5)
    way = _spoil(case, run, name, straight)
    before = contents(run)
    words = [run, straight] if case.rng.random() < 0.5 else [straight, run]
    extra = case.rng.choice(((), ("--json",), ("--html", "page.html")))
    ended = case.run("compare", *words, *extra, codes={DONE, BAD_INPUT})
    _require_same(run, before, but=(), way=way)
    return Verdict.REFUSED if refused(ended) else Verdict.FINE


def folder_then_resumed(case: Case) -> Verdict:
    """Put stray names among the checkpoints, or take some away; the run goes on."""
    run, straight = _base(case, finished=False)
    what = case.turn((*STRAY, "no newest", "no checkpoints", "linked older", "linked checkpoints"))
    checkpoints = run / "checkpoints"
    case.tell(f"checkpoints: {what}")
    match what:
        case "no newest":
            shutil.rmtree(_checkpoint(run, "newest"))
        case "no checkpoints":
            shutil.rmtree(checkpoints)
        case "linked older":
            _linked(_checkpoint(run, "older"), case.folder / "elsewhere")
        case "linked checkpoints":
            _linked(checkpoints, case.folder / "elsewhere")
        case _ if case.rng.random() < 0.5:
            (checkpoints / what).mkdir()
        case _:
            (checkpoints / what).write_text("stray")
    before = contents(run)
    ended = case.run("resume", run, codes={DONE, BAD_INPUT})
    if not refused(ended):
        require_equal(run, straight)
        return Verdict.EQUAL
    require_untouched(run, before)
    return _advice_is_good(case, run, straight, ended)


def _resume(case: Case, name: str, *, finished: bool) -> Verdict:
    run, straight = _base(case, finished=finished)
    way = _spoil(case, run, name, straight)
    before = contents(run)
    may_change = name == "resolved.json" and _only_what_may_change(run, straight)
    ended = case.run("resume", run, codes={DONE, BAD_INPUT})
    if not refused(ended):
        if may_change:
            return Verdict.FINE
        require_equal(run, straight)
        return Verdict.EQUAL
    require_untouched(run, before)
    special = way in spoil.SPECIAL
    if name in NOT_NEEDED and not special:
        raise Found(Verdict.LOST, f"refused for {name}, which it does not need: {ended.err[:300]}")
    if name == "resolved.json" and not special:
        resumed_equal(case, run, straight, "--accept", "settings")
        return Verdict.EQUAL
    if name.startswith("newest/"):
        return _advice_is_good(case, run, straight, ended)
    return Verdict.REFUSED


def _only_what_may_change(run: Path, straight: Path) -> bool:
    """Say whether a spoilt resolved.json asks for nothing but what a continued run may be given."""
    from narrowcast.runner.changes import MAY_CHANGE

    was = json.loads((straight / "resolved.json").read_text())
    try:
        now = json.loads((run / "resolved.json").read_text())
        changed = {key for key in was if was[key]["value"] != now[key]["value"]}
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return False
    return bool(changed) and changed <= set(MAY_CHANGE)


def _advice_is_good(case: Case, run: Path, straight: Path, ended: Ended) -> Verdict:
    """Do what a refusal says to do, and check that it helps."""
    if advised := re.search(r"Remove (\S+) to resume from", ended.err):
        doomed = Path(advised[1])
        if not doomed.is_relative_to(run):
            raise Found(Verdict.LOST, f"advised to remove {doomed}")
        if doomed.is_dir() and not doomed.is_symlink():
            shutil.rmtree(doomed)
        else:
            doomed.unlink()
        resumed_equal(case, run, straight)
        return Verdict.EQUAL
    raise Found(Verdict.LOST, f"an older checkpoint is whole, and not offered: {ended.err[:300]}")


def _base(case: Case, *, finished: bool) -> tuple[Path, Path]:
    recipe = case.rng.choice(("bf16", "fp16", "tutorial"))
    straight = case.straight(recipe)
    case.tell(f"{'finished' if finished else 'stopped'} {recipe}")
    run = copied(straight, case.folder / "run") if finished else case.stopped(recipe)
    return run, straight


def _spoil(case: Case, run: Path, name: str, straight: Path) -> spoil.Spoil:
    """Spoil a file of a run by a way that is drawn, or by the same file of another run."""
    way = case.rng.choice(spoil.ways(name))
    case.tell(f"{name}: {way.__name__.replace('_', ' ')}")
    path, other = _path(run, name), straight
    if way is spoil.swap:
        others = [recipe for recipe in ("bf16", "fp16", "tutorial") if recipe not in straight.name]
        other = _path(case.straight(case.rng.choice(others)), name)
    way(path, case.rng, other)
    return way


def _path(run: Path, name: str) -> Path:
    which, slash, file = name.partition("/")
    return _checkpoint(run, which) / file if slash else run / name


def _checkpoint(run: Path, which: str) -> Path:
    found = sorted((run / "checkpoints").glob("step-*"))
    return found[-1] if which == "newest" else found[-2]


def _linked(path: Path, elsewhere: Path) -> None:
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def _require_same(
    run: Path, before: dict[str, str], *, but: tuple[str, ...], way: spoil.Spoil
) -> None:
    after = contents(run)
    changed = [
        name
        for name in {**before, **after}
        if before.get(name) != after.get(name) and name not in but
    ]
    if changed:
        shown = ", ".join(sorted(changed)[:5])
        raise Found(Verdict.LOST, f"after {way.__name__}, reading changed the folder: {shown}")
