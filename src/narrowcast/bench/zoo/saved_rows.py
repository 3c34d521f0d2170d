"""The file of rows: written after each row, and continued when the bench runs again.

Rows of another machine, another torch or other sizes cannot be compared with new ones, so a file
with such rows raises.
"""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, final

from narrowcast.bench.zoo.models import ZOO
from narrowcast.bench.zoo.ways import MODES, WAYS, ZooTrial
from narrowcast.errors import ConfigError
from narrowcast.runs.strict_json import dumps, loads
from narrowcast.runs.writing import replace_file

SAME = ("bench", "device", "torch", "quick", "cold_caches")
"""What rows that are compared must have in common."""


@final
class SavedRows:
    """Rows, and the file they are in, if any."""

    def __init__(self, path: Path | None, *, about: Mapping[str, Any]) -> None:
        """Read the file if it exists."""
        self._path, self._about = path, dict(about)
        self.rows: dict[ZooTrial, dict[str, Any]] = {}
        if path is not None and path.exists():
            self._read(path)

    def has(self, trial: ZooTrial) -> bool:
        """Return whether a trial has figures; one that failed is tried again."""
        return trial in self.rows and not self.rows[trial]["failure"]

    def add(self, trial: ZooTrial, row: Mapping[str, Any]) -> None:
        """Add a row, and write the file."""
        self.rows[trial] = {**asdict(trial), **row}
        self.write()

    def data(self, **more: Any) -> dict[str, Any]:
        """Return plain data, rows in the order of the zoo."""
        models = list(dict.fromkeys(trial.model for trial in self.rows))
        order = [*ZOO, *(name for name in models if name not in ZOO)]
        ways = list(WAYS)

        def sort_key(trial: ZooTrial) -> tuple[int, int, int]:
            return order.index(trial.model), ways.index(trial.way), MODES.index(trial.mode)

        rows = [self.rows[trial] for trial in sorted(self.rows, key=sort_key)]
        return {**self._about, **more, "rows": rows}

    def write(self, **more: Any) -> None:
        """Write the file, if there is one."""
        if self._path is not None:
            replace_file(self._path, (dumps(self.data(**more), indent=1) + "\n").encode())

    def _read(self, path: Path) -> None:
        try:
            saved = loads(path.read_text(encoding="utf-8"))
            about = {name: saved[name] for name in SAME}
            rows = {
                ZooTrial(model=row["model"], way=row["way"], mode=row["mode"]): row
                for row in saved["rows"]
                if isinstance(row["failure"], str) and (row["failure"] or row["ms"] > 0)
                if row["way"] in WAYS and row["mode"] in MODES
            }
        except (OSError, ValueError, TypeError, LookupError):
            raise ConfigError(
                f"--json {path} exists and was not written by bench models. Name another file."
            ) from None
        unlike = [name for name in SAME if about[name] != self._about[name]]
        if unlike:
            differences = ", ".join(
                f"{name} {about[name]} instead of {self._about[name]}" for name in unlike
            )
            raise ConfigError(
                f"--json {path} has rows of {differences}, which cannot be compared. Name another "
                "file."
            )
        self.rows = rows
