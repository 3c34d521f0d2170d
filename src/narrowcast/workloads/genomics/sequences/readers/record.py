"""What readers hand over: a sequence with its name, its fields and the features on it."""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from narrowcast.config.problems import shown_path
from narrowcast.workloads.genomics.sequences.features import Feature


class Raw(NamedTuple):
    """What a format says of one record, before any letter is looked at."""

    name: str
    letters: bytes
    fields: dict[str, Any]
    features: tuple[Feature, ...] = ()


class Record(NamedTuple):
    """One sequence of a file, cleaned."""

    name: str
    sequence: str
    number: int
    """Its place in the file, from 1."""
    file: Path
    fields: Mapping[str, Any]
    """All else that the file says of it: columns of a table, `description`, `quality`."""
    features: tuple[Feature, ...] = ()

    @property
    def location(self) -> str:
        """Where it stands, for messages."""
        return record_location(self.file, self.number)


def record_location(path: Path, number: int) -> str:
    """Return a file and the number of a record in it as messages name them."""
    return f"{_shown(path)}, record {number}"


_shown = lru_cache(maxsize=16)(shown_path)
"""Asked for at each record."""
