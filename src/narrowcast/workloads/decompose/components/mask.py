"""How much of each component takes part in a pass, said by where that comes from.

A component of importance g is kept at least by that share, and the rest is up to a source s:
m = g + (1 - g) s. With s = 0 only what is important takes part, with s = 1 everything; drawn at
random, what is not important may be there or not, and must not matter.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor


@dataclass(frozen=True)
class Draw:
    """Numbers drawn anew in every pass: evenly from [0, 1], or 0 and 1 with even chances."""

    kind: Literal["continuous", "binomial"] = "continuous"


Source = Tensor | float | Draw
"""Given numbers in [0, 1], one number for all, or new ones."""


@dataclass(frozen=True, eq=False)
class SiteMask:
    """What one site does in a pass."""

    importance: Tensor
    """Between 0 and 1: (seeds, rows, components)."""
    source: Source
    """What is not important takes part by this share; a tensor broadcasts to `importance`."""
    delta: Source | None = None
    """By which share what components leave of the weight takes part, (seeds, rows); None: not."""
    routed: Tensor | None = None
    """Rows that the components compute, bool of (seeds, rows); others are the target's. None: all.
    """
