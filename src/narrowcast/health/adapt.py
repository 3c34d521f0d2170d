"""Adaptive precision: which modules get a wider format, and when they return to their own.

`adapt` widens the modules that readings show in trouble. The ladder moves the whole policy after
overflows in a row, and back after calm steps. The trainer applies both between two steps.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, final

WIDER = {
    "e2m1": "bf16",
    "nvfp4": "bf16",
    "mxfp8": "bf16",
    "e4m3": "bf16",
    "e5m2": "bf16",
    "fp16": "bf16",
    "bf16": "fp32",
    "tf32": "fp32",
}
"""The format above each; fp32 has none."""

REASONS = {"overflow": "overflows", "saturation": "saturates", "vanishing": "loses its gradients"}
"""Kinds of trouble that a wider format helps against, in words."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How far and how fast formats may change."""

    most: float = 0.25
    """Share of the modules that may be raised at once; one is always allowed."""
    cooldown: int = 100
    """Steps between two changes of one module."""
    calm: int = 1000
    """Steps without trouble, in the format below neither, after which a module goes down again."""


class Move(NamedTuple):
    """One module's change of format."""

    module: str
    before: str
    after: str
    reason: str


@final
@dataclass
class Adaptation:
    """The modules that are raised now; goes into a checkpoint as plain data."""

    formats: Mapping[str, str]
    """What the policy gives each module that multiplies."""
    limits: Limits = field(default_factory=Limits)
    overrides: dict[str, str] = field(default_factory=dict)
    """Formats in force that are not the policy's, by module."""
    _changed: dict[str, int] = field(default_factory=dict)
    _troubled: dict[str, int] = field(default_factory=dict)
    """The last step at which each raised module had trouble, or would have had below."""

    def decide(
        self,
        issues: Collection[tuple[str, str, str]],
        *,
        step: int,
        seen: int | None = None,
        unsafe_to_lower: Collection[str] = (),
    ) -> list[Move]:
        """Return the changes to make after `step`, from issues (kind, module, role) of step `seen`.

        Issues from before a module's last change do not count.
        """
        for module in unsafe_to_lower:
            if self.overrides.get(module) == WIDER.get(self.formats[module]):
                self._troubled[module] = step
        reasons: dict[str, str] = {}
        for kind, module, role in issues:
            changed_since = self._changed.get(module, -1) >= (step if seen is None else seen)
            if kind in REASONS and module in self.formats and not changed_since:
                reasons.setdefault(module, f"its {role} {REASONS[kind]}")
        moves = [self._raise(module, why, step) for module, why in reasons.items()]
        calm = [module for module in self.overrides if module not in reasons]
        moves += [self._lower(module, step) for module in calm]
        return [move for move in moves if move is not None]

    def state_dict(self) -> dict[str, Any]:
        return {
            "overrides": dict(self.overrides),
            "changed": dict(self._changed),
            "troubled": dict(self._troubled),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.overrides = dict(state["overrides"])
        self._changed, self._troubled = dict(state["changed"]), dict(state["troubled"])

    def _raise(self, module: str, why: str, step: int) -> Move | None:
        self._troubled[module] = step
        now = self.overrides.get(module, self.formats[module])
        most = max(1, int(self.limits.most * len(self.formats)))
        full = module not in self.overrides and len(self.overrides) >= most
        if full or now not in WIDER or self._is_cooling(module, step):
            return None
        return self._move(module, now, WIDER[now], why, step=step)

    def _lower(self, module: str, step: int) -> Move | None:
        quiet = step - self._troubled[module]
        if quiet < self.limits.calm or self._is_cooling(module, step):
            return None
        self._troubled[module] = step  # the format below has to show that it is calm as well
        own, now = self.formats[module], self.overrides[module]
        # One format at a time: back from fp32 to bf16, and from there to its own.
        below = own if WIDER[own] == now else WIDER[own]
        return self._move(module, now, below, f"calm for {quiet} steps", step=step)

    def _move(self, module: str, before: str, after: str, why: str, *, step: int) -> Move:
        self._changed[module] = step
        if after == self.formats[module]:
            del self.overrides[module]
        else:
            self.overrides[module] = after
        return Move(module, before, after, why)

    def _is_cooling(self, module: str, step: int) -> bool:
        changed = self._changed.get(module)
        return changed is not None and step - changed < self.limits.cooldown


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
        """Return the ladder after a step: up after `limit` overflows, down after `calm` steps."""
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
        """Return whether formats change; one step late, so that a resumed run decides the same."""
        return self.move != 0 and self.seen < step

    @property
    def reason(self) -> str:
        if self.move > 0:
            return f"{self.overflows} overflows in a row, by step {self.seen}"
        return f"calm for {self.calm} steps, by step {self.seen}"

    def moved(self, step: int) -> "Ladder":
        """Return the ladder with the move that is due, made after this step."""
        return Ladder(rung=self.rung + self.move, since=step + 1)
