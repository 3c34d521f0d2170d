"""What readers hand over: a sequence with its name and fields, and features that lie on one."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, final

from narrowcast.config.problems import shown_path

Strand = Literal[1, -1, 0]
"""Forward, reverse, or not said."""


class Part(NamedTuple):
    """Letters from `start` up to, not with, `end`, counted from 0 on the forward strand."""

    start: int
    end: int
    strand: Strand


@final
@dataclass(frozen=True, kw_only=True)
class Feature:
    """A gene, an exon or anything else that lies on a sequence, in one part or in several.

    Parts stand in the order in which they are read: of a spliced gene on the reverse strand the
    last one first. A feature across the origin of a circle is two parts.
    """

    kind: str
    parts: tuple[Part, ...]
    record: str
    """The name of the sequence it lies on."""
    qualifiers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def strand(self) -> Strand:
        """The strand of all parts; 0 where they differ or do not say."""
        first = self.parts[0].strand
        return first if all(part.strand == first for part in self.parts) else 0


class Raw(NamedTuple):
    """What a format says of one record, before any letter is looked at."""

    name: str
    letters: bytes
    fields: dict[str, Any]
    features: tuple[Feature, ...] = ()


@final
@dataclass(frozen=True, kw_only=True)
class Record:
    """One sequence of a file, cleaned."""

    name: str
    sequence: str
    number: int
    """Its place in the file, from 1."""
    file: Path
    fields: Mapping[str, Any] = field(default_factory=dict)
    """All else that the file says of it: columns of a table, `description`, `quality`."""
    features: tuple[Feature, ...] = ()
    replaced: int = 0
    """Letters that meant several and are the unknown one now."""

    @property
    def place(self) -> str:
        """Where it stands, for messages."""
        return place_of(self.file, self.number)


def place_of(path: Path, number: int) -> str:
    """Return a file and the number of a record in it as messages name them."""
    return f"{shown_path(path)}, record {number}"
