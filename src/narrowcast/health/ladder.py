"""The ladder of a run's whole policy: a format up after overflows in a row, one down after a calm.

fp16 → bf16 → fp32 and back. Where `adapt` widens the modules that readings show in trouble, this
asks nothing but whether steps were applied. Pure: the trainer carries out what is decided here.
"""

from dataclasses import dataclass, replace
from typing import final


@final
@dataclass(frozen=True, kw_only=True)
class Ladder:
    """Where a run stands, and what decides its next move; part of what a checkpoint keeps."""

    rung: int = 0
    """0: the policy's own formats."""
    since: int = 1
    """The first step in these formats."""
    overflows: int = 0
    """Skipped steps in a row, in these formats."""
    calm: int = 0
    """Applied steps in a row, in these formats."""
    move: int = 0
    """The move that is due: 1 up, -1 down."""
    seen: int = 0
    """The step whose record made it due."""

    def after(self, step: int, *, applied: bool, limit: int, calm: int, top: int) -> "Ladder":
        """Return the ladder once a step is known.

        It goes up after `limit` overflows in a row, as far as `top`, and down after `calm` steps.
        """
        if self.move or step < self.since:
            return self
        now = replace(
            self,
            overflows=0 if applied else self.overflows + 1,
            calm=self.calm + 1 if applied else 0,
        )
        if now.overflows >= limit and now.rung < top:
            return replace(now, move=1, seen=step)
        if now.calm >= calm and now.rung > 0:
            return replace(now, move=-1, seen=step)
        return now

    def is_due(self, step: int) -> bool:
        """Say whether the formats change after this step.

        One later than could be: a GPU's record comes late, and a resumed run decides the same.
        """
        return self.move != 0 and self.seen < step

    @property
    def reason(self) -> str:
        """Why the move that is due is made."""
        if self.move > 0:
            return f"{self.overflows} overflows in a row, by step {self.seen}"
        return f"calm for {self.calm} steps, by step {self.seen}"

    def moved(self, step: int) -> "Ladder":
        """Return the ladder with the move that is due, made after this step."""
        return Ladder(rung=self.rung + self.move, since=step + 1)
