"""The folder of a new run."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from narrowcast.config.problems import shown_path
from narrowcast.errors import CheckpointError, ConfigError
from narrowcast.runs import RunFolder
from narrowcast.runs.folder import holds_a_run

RUNS = Path("runs")


@dataclass(frozen=True, kw_only=True)
class OutDir:
    """The folder of a new run."""

    path: Path
    taken: Path | None = None
    """The default folder, if it exists already."""

    def __str__(self) -> str:
        return f"{self.path} ({self.taken} is taken)" if self.taken else str(self.path)


@contextmanager
def out_dir(name: str, out: str | None) -> Iterator[OutDir]:
    """Yield the folder of a new run: `out`, or the first free one for `name`.

    A default folder is created at once, so that two runs that start together get one each.
    """
    if out is not None:
        require_no_run(Path(out))
        yield OutDir(path=Path(out))
        return
    is_first = not os.path.lexists(RUNS)
    location = _claimed(RUNS / (re.sub(r"[^\w.-]+", "-", name).strip("-.") or "run"))
    try:
        yield location
    finally:
        with suppress(OSError):  # one that a run is in is not empty, and stays
            location.path.rmdir()
            if is_first:
                RUNS.rmdir()


def alternative_paths(path: Path) -> Iterator[Path]:
    """Return the names to try beside `path` if it is taken, without end."""
    return (path.with_name(f"{path.name}-{number}") for number in count(2))


def require_no_run(path: Path) -> None:
    """Raise if a folder has a run in it already."""
    try:
        RunFolder.open(path)
    except CheckpointError:
        return  # whatever else is in the way, making the folder says
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"Cannot use {shown_path(path)} as a run folder: {why}. Choose another --out."
        ) from error
    raise holds_a_run(path)


def _claimed(first: Path) -> OutDir:
    """Create the first free folder of that name; only one of two processes can."""
    if _is_made(first):
        return OutDir(path=first)
    return OutDir(
        path=next(path for path in alternative_paths(first) if _is_made(path)), taken=first
    )


def _is_made(path: Path) -> bool:
    try:
        path.mkdir(parents=True)
    except OSError:
        # Taken, or no folder can be created at all; creating the run reports that.
        return not os.path.lexists(path)
    return True
