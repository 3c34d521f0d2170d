"""Runs that may be ended and gone on with, and figures that are in their file as they come."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from narrowcast.runs import EvalRecord, Record
from narrowcast.runs.folder import RECORDS

Told = Callable[[list[dict[str, Any]]], None]
"""Gets all evaluations so far, after each of them."""


def records_of(recipe: str, settings: Sequence[str], folder: Path) -> Iterator[Record]:
    """Train in a folder, or go on with the run that is there; yield all its records.

    SIGTERM ends a run with a checkpoint, and one that is finished is not made again. A folder of
    other settings is refused.
    """
    import narrowcast as nc

    asked = folder / "asked.json"
    words = [recipe, *settings]
    if not (folder / RECORDS).exists():
        run = nc.train(recipe, settings, out=folder)
        asked.write_text(json.dumps(words))
    elif asked.exists() and json.loads(asked.read_text()) == words:
        run = nc.resume(folder)
    else:
        raise SystemExit(f"{folder} has a run of other settings; give --keep another folder")
    yield from run.earlier
    yield from run


def watched(records: Iterator[Record], told: Told) -> Iterator[Record]:
    """Yield records as they are, and tell of evaluations."""
    evaluations: list[dict[str, Any]] = []
    for record in records:
        if isinstance(record, EvalRecord):
            evaluations.append({"step": record.step, **record.metrics})
            told(evaluations)
        yield record


class Figures:
    """What is known so far, in a file beside what that had; without a path nowhere."""

    def __init__(self, path: Path | None, first: dict[str, Any]) -> None:
        self._path, self._found = path, dict(first)

    def __setitem__(self, name: str, value: Any) -> None:
        """Write a section's figures, in the place of what was known before its end."""
        self._found[name] = value
        self._found.pop(_so_far(name), None)
        self._write(without=_so_far(name))

    def so_far(self, name: str) -> Told:
        """Return what writes evaluations of a section that has not ended."""

        def told(evaluations: list[dict[str, Any]]) -> None:
            self._found[_so_far(name)] = evaluations
            self._write()

        return told

    def _write(self, without: str = "") -> None:
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        known = json.loads(self._path.read_text()) if self._path.exists() else {}
        known.pop(without, None)
        text = json.dumps(known | self._found, indent=1, ensure_ascii=False) + "\n"
        beside = self._path.with_name(f"{self._path.name}.new")
        beside.write_text(text)
        beside.replace(self._path)  # who ends the process in between leaves the old file whole


def _so_far(name: str) -> str:
    return f"{name} so far"
