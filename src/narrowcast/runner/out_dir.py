"""Where a new run goes."""

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from narrowcast.errors import CheckpointError, RecipeError
from narrowcast.runs import RunFolder

RUNS = Path("runs")
LONGEST_SHOWN = 200
"""Characters of a path that a message shows."""


@dataclass(frozen=True, kw_only=True)
class OutDir:
    """A folder that can be made."""

    path: Path
    unnamed: bool = False
    """Whether it was found here rather than asked for."""
    taken: Path | None = None
    """The folder that would have been used, had it not been there already."""

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Hold a folder that nobody named while its run is built; let go of it if that fails."""
        if not self.unnamed:
            yield
            return
        with suppress(OSError):  # what is in the way, whoever makes the run says
            self.path.mkdir(parents=True, exist_ok=True)
        try:
            yield
        finally:
            with suppress(OSError):  # one that a run is in is not empty, and stays
                self.path.rmdir()

    def __str__(self) -> str:
        return f"{self.path} ({self.taken} is taken)" if self.taken else str(self.path)


def out_dir_for(name: str, out: str | None) -> OutDir:
    """Return the place of a new run called `name`: `out`, or the first free one of that name.

    Makes nothing. An `out` that holds a run already is refused here, before any work is done.
    """
    if out is not None:
        require_no_run(Path(out))
        return OutDir(path=Path(out))
    first = RUNS / (re.sub(r"[^\w.-]+", "-", name).strip("-.") or "run")
    if not first.exists():
        return OutDir(path=first, unnamed=True)
    numbered = (first.with_name(f"{first.name}-{n}") for n in count(2))
    free = next(path for path in numbered if not path.exists())
    return OutDir(path=free, unnamed=True, taken=first)


def require_no_run(path: Path) -> None:
    """Refuse a folder that holds a run already."""
    try:
        RunFolder.open(path)
    except CheckpointError:
        return  # whatever else is in the way, making the folder says
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        shown = ascii(str(path)[:LONGEST_SHOWN])[1:-1]
        raise RecipeError(f"no run can be kept at {shown}: {why}; choose another --out") from error
    raise RecipeError(
        f"{path} already holds a run; choose another --out, or continue it with "
        f"`narrowcast resume {path}`"
    )
