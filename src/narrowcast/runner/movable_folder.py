"""The folder of a run that is going on, kept whole where somebody removes or moves it.

What is written to a folder that is gone is lost, and is missed only when the run has ended. So the
folder is looked for every second. One that was moved is followed; one that was removed is put back
with all its records, which can be read as long as they are open. Either way the run then ends with
a checkpoint in it, for its owner to decide.
"""

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain, islice
from pathlib import Path
from typing import final

from narrowcast.errors import CheckpointError
from narrowcast.plain_files import open_plain
from narrowcast.runner.out_dir import alternative_paths
from narrowcast.runs import RunFolder
from narrowcast.runs.folder import ENVIRONMENT, RECIPE, RECORDS, RESOLVED, TASK
from narrowcast.runs.writing import explain_write_error, replace_file

LOOK_SECONDS = 1.0
"""Between two looks for the folder."""
AGAIN_SECONDS = 1.0
"""Until a folder that is not found is looked for once more; then it is gone."""
SETTLE_SECONDS = 0.5
"""A folder that has not changed for so long is not being removed or copied at this moment."""
SETTLE_LOOKS = 60
NAMES_TRIED = 1000
FILES = (RECIPE, RESOLVED, ENVIRONMENT, TASK, "plan.json")
"""What a run writes when it begins, and not again."""


@final
class MovableFolder:
    """Where the folder of a run is; what the trainer knows as its `Home`."""

    def __init__(self, path: Path) -> None:
        """Take `path` as it is until the folder is held."""
        self._path = self._absolute = self._resolved = path
        self._run: RunFolder | None = None
        self._directory: int | None = None
        self._files: dict[str, bytes] = {}
        self._looked = 0.0
        self.lost = ""
        """What became of the folder, once it was not in its place; empty until then."""

    @contextmanager
    def held(self, run: RunFolder) -> Iterator[None]:
        """Become the one writer of `run`, and look after its folder inside the block."""
        run.hold()
        self._path, self._absolute = run.path, run.path.absolute()
        self._resolved = run.path.resolve()
        results = {name: _content(run.path / name) for name in FILES}
        self._files = {name: content for name, content in results.items() if content is not None}
        with ExitStack() as stack:
            if os.name == "posix":  # elsewhere a folder with an open file stays where it is
                self._directory = os.open(run.path, os.O_RDONLY | os.O_DIRECTORY)
                stack.callback(os.close, self._directory)
            self._run, self._looked = run, time.monotonic()
            try:
                yield
            finally:
                self._run = None
                run.close()

    def look(self) -> None:
        """Look for the folder, if the last look was some time ago."""
        if time.monotonic() >= self._looked + LOOK_SECONDS:
            self.path()

    def path(self) -> Path:
        """Return where the folder is, found or put back if it was not in its place."""
        if self._run is not None:
            here = self._locate(self._run)
            if here is None:
                time.sleep(AGAIN_SECONDS)
                here = self._locate(self._run)
            self._path = self._put_right(self._run) if here is None else here
            self._run.path = self._path
            self._looked = time.monotonic()
        return self._path

    def _locate(self, run: RunFolder) -> Path | None:
        """Return where the folder is; None where it is not in its place.

        What the disk does not tell at this moment is no reason to think so.
        """
        at = {path: run.is_at(path) for path in self._places()}
        if here := next((path for path in at if at[path]), None):
            return here
        return self._path if None in at.values() else None

    def _places(self) -> tuple[Path, ...]:
        """Return the names of the folder, the best first.

        A relative path may have another meaning by now, and one through a link; an absolute one
        too, where the working directory was moved with all that is in it.
        """
        return self._path, self._absolute, self._resolved

    def _put_right(self, run: RunFolder) -> Path:
        """Make the run whole in a folder that is its own, say so in `lost`, return the folder."""
        self._let_it_settle()
        own, why = self._own_folder(run), ""
        try:
            for location in chain([] if own is None else [own], _made_at(self._resolved)):
                try:
                    self._fill(location, run)
                except CheckpointError as error:
                    why = str(error)
                else:
                    self.lost = self._describe(location, own)
                    return location
        except OSError as error:  # no folder can be made anywhere
            why = why or explain_write_error(error)
        raise CheckpointError(
            f"the run's folder {self._path} was removed and cannot be put back: {why}"
        )

    def _let_it_settle(self) -> None:
        """Wait while the folder changes: what is put back into it now would be removed again."""
        before: object = None
        for _ in range(SETTLE_LOOKS):
            matches = _listing(self._directory)
            if matches == before:
                return
            before = matches
            time.sleep(SETTLE_SECONDS)

    def _own_folder(self, run: RunFolder) -> Path | None:
        """Return where the folder this run began in is now; None where that is nowhere.

        A folder with another run's files in it is not this run's any more.
        """
        if self._directory is None:
            return None
        result = next((path for path in self._places() if self._is_own(path)), None)
        if result is None:
            with suppress(OSError):  # systems without /proc do not tell
                result = Path(f"/proc/self/fd/{self._directory}").readlink()
        if result is None or not self._is_own(result):
            return None
        records = run.is_at(result) or not os.path.lexists(result / RECORDS)
        return (
            result if records and all(self._is_unchanged(result / name) for name in FILES) else None
        )

    def _is_own(self, path: Path) -> bool:
        assert self._directory is not None
        try:
            return os.path.samestat(path.stat(), os.fstat(self._directory))
        except OSError:
            return False

    def _is_unchanged(self, file: Path) -> bool:
        """Say whether a file is the one that was there when the run began, or not there at all."""
        return not os.path.lexists(file) or _content(file) == self._files.get(file.name, b"")

    def _fill(self, position: Path, run: RunFolder) -> None:
        """Write to `place` what it lacks of the run, and go on there; or raise CheckpointError."""
        try:
            for name, content in self._files.items():
                if not (position / name).exists():
                    replace_file(position / name, content)
            run.move_to(position)
        except OSError as error:
            raise CheckpointError(
                f"cannot write to {position}: {explain_write_error(error)}"
            ) from error

    def _describe(self, location: Path, own: Path | None) -> str:
        if location != own:
            back = "there" if location in self._places() else f"at {location}"
            return f"the run's folder {self._path} was removed; the run was put back {back}"
        if location in self._places():
            return f"files of the run's folder {location} were removed; they were put back"
        return f"the run's folder {self._path} was moved to {location}"


def _made_at(path: Path) -> Iterator[Path]:
    """Make a folder at `path` or beside it; then, if that one is of no use, anywhere."""
    for free in (path, *islice(alternative_paths(path), NAMES_TRIED)):
        try:
            free.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError:
            break
        yield free
        break
    yield Path(tempfile.mkdtemp(prefix=f"{path.name}-"))


def _content(file: Path) -> bytes | None:
    try:
        with open_plain(file) as opened:
            return opened.read()
    except OSError:
        return None


def _listing(directory: int | None) -> list[str]:
    try:
        return [] if directory is None else sorted(os.listdir(directory))  # noqa: PTH208  # a number
    except OSError:
        return []
