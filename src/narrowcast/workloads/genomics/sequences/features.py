"""What lies on a sequence: genes, exons, open reading frames, in one part or in several."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, final

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
    """A gene, an exon or anything else that lies on a sequence.

    Parts stand in the order in which they are read: of a spliced gene on the reverse strand the
    last one first. A feature across the origin of a circle is two parts.
    """

    kind: str
    parts: tuple[Part, ...]
    record: str
    """The name of the sequence it lies on."""
    qualifiers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
