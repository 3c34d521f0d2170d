"""The file of what was measured: rows by trial, taken up again when the bench is called again.

A row is written as soon as it is there, so a bench that is ended loses none. Rows of another
machine, another torch or other sizes stand in no ratio to new ones: such a file is refused.
"""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, final

from narrowcast.bench.zoo.models import ZOO
from narrowcast.bench.zoo.ways import MODES, WAYS, Trial
from narrowcast.errors import RecipeError
from narrowcast.runs.strict_json import dumps, loads
from narrowcast.runs.writing import replace_file

SAME = ("bench", "device", "torch", "quick", "cold_caches")
"""What rows that are compared have in common."""


@final
class Kept:
    """Rows, and the file they are in, if any."""

    def __init__(self, path: Path | None, *, about: Mapping[str, Any]) -> None:
        """Read what the file has, if it is there."""
        self._path, self._about = path, dict(about)
        self.rows: dict[Trial, dict[str, Any]] = {}
        if path is not None and path.exists():
            self._read(path)

    def has(self, trial: Trial) -> bool:
        """Say whether a trial has figures; one that failed is tried again."""
        return trial in self.rows and not self.rows[trial]["failure"]

    def add(self, trial: Trial, row: Mapping[str, Any]) -> None:
        """Add a row, and write the file."""
        self.rows[trial] = {**asdict(trial), **row}
        self.write()

    def data(self, **more: Any) -> dict[str, Any]:
        """Return all of it as plain data, rows in the order of the zoo."""
        models = list(dict.fromkeys(trial.model for trial in self.rows))
        order = [*ZOO, *(name for name in models if name not in ZOO)]
        ways = list(WAYS)

        def place(trial: Trial) -> tuple[int, int, int]:
            return order.index(trial.model), ways.index(trial.way), MODES.index(trial.mode)

        rows = [self.rows[trial] for trial in sorted(self.rows, key=place)]
        return {**self._about, **more, "rows": rows}

    def write(self, **more: Any) -> None:
        """Write the file, if there is one."""
        if self._path is not None:
            replace_file(self._path, (dumps(self.data(**more), indent=1) + "\n").encode())

    def _read(self, path: Path) -> None:
        try:
            found = loads(path.read_text(encoding="utf-8"))
            was = {name: found[name] for name in SAME}
            rows = {
                Trial(model=row["model"], way=row["way"], mode=row["mode"]): row
                for row in found["rows"]
                if isinstance(row["failure"], str) and (row["failure"] or row["ms"] > 0)
                if row["way"] in WAYS and row["mode"] in MODES
            }
        except (OSError, ValueError, TypeError, LookupError):
            raise RecipeError(
                f"--json {path}: there is a file already, and not one that this bench has written; "
                "name another, or remove it"
            ) from None
        unlike = [name for name in SAME if was[name] != self._about[name]]
        if unlike:
            told = ", ".join(f"{name} {was[name]} and not {self._about[name]}" for name in unlike)
            raise RecipeError(
                f"--json {path}: its rows are of {told}; they cannot be compared with new ones: "
                "name another file, or remove this one"
            )
        self.rows = rows
