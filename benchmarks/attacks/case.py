"""One case: an attack with a seed, a folder of its own, and the runs that it is compared with."""

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TypeVar

from attacks import tiny
from attacks.forks import Command, Ended, Prepare, start
from attacks.oracle import ANY_CODE, DONE, Found, Verdict, well_ended

_Choice = TypeVar("_Choice")

SECONDS = 40.0
"""For any command: a tiny run takes one, and the machine may be busy."""
FRESH_SECONDS = 90.0
"""For a process that imports everything itself."""
ANSWER_SECONDS = 20.0
"""For a command that only has to look at what it is given."""
STEP_LINE, CHECKPOINT_LINE = '"kind": "step"', '"kind": "checkpoint"'
STOPPED_AFTER = 7
"""Steps of the run that stopped: two checkpoints, and a step after the second."""


@dataclass
class Case:
    """What an attack works with."""

    kind: str
    seed: int
    folder: Path
    """Where it may write; commands start here."""
    shared: Path
    """Runs that several cases compare with or begin from."""
    rng: Random = field(init=False)
    told: list[str] = field(default_factory=list)
    """What the case does, in words."""
    commands: list[Command] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = Random(f"{self.kind} {self.seed}")

    def tell(self, what: str) -> None:
        self.told.append(what)

    def turn(self, choices: Collection[_Choice]) -> _Choice:
        """Return one of `choices`: consecutive seeds take them all, in an order that is mixed."""
        mixed = Random(self.kind).sample(list(choices), k=len(choices))
        return mixed[self.seed % len(mixed)]

    def start(
        self, *words: str | Path, fresh: bool = False, prepare: Prepare = lambda: None
    ) -> Command:
        """Start a command in the folder of the case."""
        command = start(
            [str(word) for word in words],
            cwd=self.folder,
            name=f"command-{len(self.commands)}",
            fresh=fresh,
            prepare=prepare,
        )
        self.commands.append(command)
        return command

    def run(
        self,
        *words: str | Path,
        codes: Collection[int] = ANY_CODE,
        seconds: float = SECONDS,
        fresh: bool = False,
        prepare: Prepare = lambda: None,
    ) -> Ended:
        """Run a command to its end, and check that it ended well."""
        ended = self.start(*words, fresh=fresh, prepare=prepare).wait(seconds)
        return well_ended(ended, codes=codes)

    def end(self) -> None:
        """Kill what is left of all commands."""
        for command in self.commands:
            command.end()

    def straight(self, recipe: str) -> Path:
        """Return the run of a tiny recipe that nothing happened to."""
        with self._once(f"straight {recipe}") as place:
            if place is not None:
                self.run("train", *tiny.WORDS[recipe], "--out", place, codes={DONE})
        return self.shared / f"straight {recipe}"

    def stopped(self, recipe: str, *, to: str = "run") -> Path:
        """Return a copy of a run of a tiny recipe that was killed after its second checkpoint."""
        with self._once(f"stopped {recipe}") as place:
            if place is not None:
                command = self.start("train", *tiny.RECIPES[recipe], "--out", place)
                watch_until(command, lambda: steps_of(place) >= STOPPED_AFTER)
                command.kill()
                command.wait(SECONDS)
                if steps_of(place) < STOPPED_AFTER or (place / "report.html").exists():
                    raise RuntimeError(f"the run of {recipe} was not stopped in time")
        return copied(self.shared / f"stopped {recipe}", self.folder / to)

    @contextlib.contextmanager
    def _once(self, name: str) -> Iterator[Path | None]:
        """Give the place of a shared run to whoever makes it, and None where it is made already."""
        place = self.shared / name
        with (self.shared / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if place.exists():
                yield None
                return
            beside = self.folder / "in the making"
            yield beside
            beside.rename(place)


def watch_until(
    command: Command, happened: Callable[[], bool], *, seconds: float = SECONDS
) -> bool:
    """Look every fraction of a millisecond until it has happened; False: the command has ended."""
    deadline = time.monotonic() + seconds
    while not happened():
        if not command.running() or time.monotonic() > deadline:
            return False
        time.sleep(0.0003)
    return True


def steps_of(folder: Path) -> int:
    """Return how many steps a run has recorded, which may be writing."""
    try:
        return (folder / "records.jsonl").read_bytes().count(STEP_LINE.encode())
    except OSError:
        return 0


def copied(run: Path, to: Path) -> Path:
    shutil.copytree(run, to, symlinks=True)
    return to


def resumed_equal(
    case: Case, run: Path, straight: Path, *words: str, asked_to_stop: bool = False
) -> Ended:
    """Resume a run that was hurt, and check that it becomes the run nothing happened to."""
    try:
        ended = case.run("resume", run, *words)
    except Found as found:
        found.what = f"resuming: {found.what}"
        raise
    if ended.code != DONE:
        raise Found(
            Verdict.LOST, f"cannot be resumed: exit {ended.code}: {ended.err.strip()[:300]}"
        )
    require_equal(run, straight, asked_to_stop=asked_to_stop)
    return ended


def require_equal(run: Path, straight: Path, *, asked_to_stop: bool = False) -> None:
    """Check that two finished runs are the same bit for bit, and that both have a whole report."""
    if difference := difference_between(run, straight, asked_to_stop=asked_to_stop):
        raise Found(Verdict.SILENT, f"differs from the straight run: {difference[:300]}")
    page = run / "report.html"
    if not page.is_file() or not page.read_bytes().rstrip().endswith(b"</html>"):
        raise Found(Verdict.LOST, "done, but there is no whole report.html")


def difference_between(run: Path, straight: Path, *, asked_to_stop: bool = False) -> str | None:
    """Say where two runs first differ; one that cannot be read differs.

    A run that was asked to stop has written one checkpoint more, and its records say so. Where that
    was after the last step and before its evaluation, which is made up for when it is resumed, the
    last checkpoint does not know of the evaluation.
    """
    from safetensors import SafetensorError

    from narrowcast.errors import NarrowcastError
    from narrowcast.training.checkpoints.verify import difference_between as between

    try:
        if asked_to_stop:
            with _without_checkpoint_records(run, straight) as (one, other):
                return between(other, one, but=("evaluated", "vital_signs"))
        return between(straight, run)
    except (NarrowcastError, OSError, SafetensorError) as error:
        return f"it cannot be read: {error}"


@contextlib.contextmanager
def _without_checkpoint_records(*runs: Path) -> Iterator[list[Path]]:
    with tempfile.TemporaryDirectory(dir=runs[0].parent) as folder:
        copies = [copied(run, Path(folder) / f"{n}") for n, run in enumerate(runs)]
        for copy in copies:
            file = copy / "records.jsonl"
            lines = file.read_text().splitlines(keepends=True)
            file.write_text("".join(each for each in lines if CHECKPOINT_LINE not in each))
        yield copies


def contents(run: Path) -> dict[str, str]:
    """Return what every file of a run holds, but for its lock."""
    found = {}
    for folder, folders, files in os.walk(run):
        for name in (*folders, *files):
            path = Path(folder) / name
            if name == ".lock":
                continue
            found[str(path.relative_to(run))] = _content(path)
    return found


def _content(path: Path) -> str:
    if path.is_symlink():
        return f"link to {os.readlink(path)}"  # noqa: PTH115  as it is written
    if path.is_file():
        return hashlib.sha256(path.read_bytes()).hexdigest()
    return "folder" if path.is_dir() else "special"


def require_untouched(run: Path, before: dict[str, str]) -> None:
    """Check that a refusal has changed nothing in the folder."""
    after = contents(run)
    changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    if changed:
        listed = ", ".join(sorted(changed)[:5])
        raise Found(Verdict.LOST, f"a refused command changed the folder: {listed}")
