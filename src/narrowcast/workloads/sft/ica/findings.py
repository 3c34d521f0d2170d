"""Findings of the ICA: what was noticed, and what was done about it."""

from dataclasses import dataclass
from typing import Literal, final

Kind = Literal[
    "dtype",
    "overflow",
    "coarse",
    "constant",
    "subspace",
    "solver",
    "convergence",
    "stability",
    "loud rows",
]


@final
@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that happened, and its answer."""

    kind: Kind
    what: str
    """What was seen, with numbers."""
    answer: str
    """What was done, or what to write."""

    def __str__(self) -> str:
        return f"{self.what}. {self.answer}."
