"""Several commands on one folder or one name at once: one writes, the others are told."""

from pathlib import Path

from attacks import tiny
from attacks.case import (
    SECONDS,
    STOPPED_AFTER,
    Case,
    require_equal,
    steps_of,
    watch_until,
)
from attacks.oracle import BAD_INPUT, DONE, Found, Verdict, refused, well_ended


def at_once(case: Case) -> Verdict:
    recipe = case.rng.choice(("bf16", "fp16", "phases", "tutorial"))
    ways = (_two_resumes, _same_out, _same_name, _resume_of_a_running, _readers_of_a_running)
    way = case.turn(ways)
    case.tell(f"{recipe}: {way.__name__.strip('_').replace('_', ' ')}")
    return way(case, recipe)


def _two_resumes(case: Case, recipe: str) -> Verdict:
    straight, run = case.straight(recipe), case.stopped(recipe)
    commands = [case.start("resume", run) for _ in range(case.rng.choice((2, 3)))]
    ended = [well_ended(each.wait(SECONDS), codes={DONE, BAD_INPUT}) for each in commands]
    _require_one(run, straight, [each.code for each in ended])
    return Verdict.REFUSED if any(map(refused, ended)) else Verdict.FINE


def _same_out(case: Case, recipe: str) -> Verdict:
    straight, run = case.straight(recipe), case.folder / "run"
    words = ("train", *tiny.RECIPES[recipe], "--out", run)
    commands = [case.start(*words) for _ in range(case.rng.choice((2, 3)))]
    ended = [well_ended(each.wait(SECONDS), codes={DONE, BAD_INPUT}) for each in commands]
    if [each.code for each in ended].count(DONE) > 1:
        raise Found(Verdict.SILENT, "two runs in one folder, and both say they are done")
    _require_one(run, straight, [each.code for each in ended])
    return Verdict.REFUSED


def _same_name(case: Case, recipe: str) -> Verdict:
    """Begin runs of one recipe without a folder: each takes the next free name."""
    straight = case.straight(recipe)
    many = case.rng.choice((2, 3))
    commands = [case.start("train", *tiny.RECIPES[recipe]) for _ in range(many)]
    for each in commands:
        well_ended(each.wait(SECONDS), codes={DONE})
    folders = sorted((case.folder / "runs").iterdir())
    if len(folders) != many:
        raise Found(Verdict.LOST, f"{many} runs, and {len(folders)} folders")
    for folder in folders:
        require_equal(folder, straight)
    return Verdict.FINE


def _resume_of_a_running(case: Case, recipe: str) -> Verdict:
    straight, run = case.straight(recipe), case.folder / "run"
    first = case.start("train", *tiny.RECIPES[recipe], "--out", run)
    step = case.rng.randint(1, STOPPED_AFTER)
    watch_until(first, lambda: steps_of(run) >= step)
    second = well_ended(case.start("resume", run).wait(SECONDS), codes={DONE, BAD_INPUT})
    code = well_ended(first.wait(SECONDS), codes={DONE}).code
    _require_one(run, straight, [code, second.code])
    return Verdict.REFUSED if refused(second) else Verdict.FINE


def _readers_of_a_running(case: Case, recipe: str) -> Verdict:
    """Report and compare a run while it is written: they answer, and it takes no harm."""
    straight, run = case.straight(recipe), case.folder / "run"
    first = case.start("train", *tiny.RECIPES[recipe], "--out", run)
    watch_until(first, (run / "records.jsonl").exists)
    for _ in range(3):
        words = case.rng.choice((("report", run), ("compare", run, straight)))
        case.run(*words, codes={DONE, BAD_INPUT})
    well_ended(first.wait(SECONDS), codes={DONE})
    require_equal(run, straight)
    return Verdict.FINE


def _require_one(run: Path, straight: Path, codes: list[int | None]) -> None:
    if DONE not in codes:
        raise Found(Verdict.LOST, f"nobody could write: exit codes {codes}")
    require_equal(run, straight)
