"""Adaptive precision: which modules get a wider format, and when they return to their own.

A module whose tensors overflow, saturate or vanish goes one format up (8 bits → bf16 → fp32, fp16 →
bf16 → fp32). After a calm it goes one down again, and never below what the policy says. Pure: what
is decided here is carried out by the trainer, between two steps.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
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
    """Steps without trouble after which a module goes down again."""


class Move(NamedTuple):
    """One module's change of format."""

    module: str
    before: str
    after: str
    reason: str


@dataclass
class _Raised:
    format: str
    since: int
    """The step of its last change."""
    calm_since: int


@final
@dataclass
class Adaptation:
    """The modules that are raised now; goes into a checkpoint as plain data."""

    formats: Mapping[str, str]
    """What the policy gives each module that multiplies."""
    limits: Limits = field(default_factory=Limits)
    _raised: dict[str, _Raised] = field(default_factory=dict)

    @property
    def overrides(self) -> dict[str, str]:
        """Formats in force that are not the policy's, by module."""
        return {module: raised.format for module, raised in self._raised.items()}

    def decide(self, troubles: Collection[tuple[str, str, str]], *, step: int) -> list[Move]:
        """Return the changes to make after `step`, given all troubles now: (kind, module, role)."""
        reasons: dict[str, str] = {}
        for kind, module, role in troubles:
            if kind in REASONS and module in self.formats:
                reasons.setdefault(module, f"its {role} {REASONS[kind]}")
        moves = [self._raise(module, why, step) for module, why in reasons.items()]
        moves += [self._lower(module, step) for module in [*self._raised] if module not in reasons]
        return [move for move in moves if move is not None]

    def state_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            module: [raised.format, raised.since, raised.calm_since]
            for module, raised in self._raised.items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._raised = {module: _Raised(*values) for module, values in state.items()}

    def _raise(self, module: str, why: str, step: int) -> Move | None:
        raised = self._raised.get(module)
        now = self.formats[module] if raised is None else raised.format
        if raised is None:
            full = len(self._raised) >= max(1, int(self.limits.most * len(self.formats)))
            if full or now not in WIDER:
                return None
        else:
            raised.calm_since = step
            if now not in WIDER or step - raised.since < self.limits.cooldown:
                return None
        wider = WIDER[now]
        self._raised[module] = _Raised(wider, step, step)
        return Move(module, now, wider, why)

    def _lower(self, module: str, step: int) -> Move | None:
        raised = self._raised[module]
        quiet = step - raised.calm_since
        if quiet < self.limits.calm or step - raised.since < self.limits.cooldown:
            return None
        own = self.formats[module]
        # One format at a time: back from fp32 to bf16, and from there to its own.
        below = own if WIDER.get(own) == raised.format else WIDER[own]
        if below == own:
            del self._raised[module]
        else:
            self._raised[module] = _Raised(below, step, step)
        return Move(module, raised.format, below, f"calm for {quiet} steps")
