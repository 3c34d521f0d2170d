"""The findings of a run, made from its records: reported once, and again after a calm."""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from narrowcast.health.findings.rules import (
    CALM,
    LOST,
    NEAR_ZERO,
    REMEMBERED,
    RULES,
    TensorHistory,
    Trouble,
    first_nonfinite,
    floor,
    low,
    percent,
    spike,
)
from narrowcast.numerics import FP32
from narrowcast.precision.gradients.loss_scale import LossScale
from narrowcast.precision.plan.wording import Wording
from narrowcast.runs import FindingRecord, HealthRecord, StepRecord


@final
@dataclass
class Findings:
    """Issues of a run so far; goes into a checkpoint as plain data."""

    wording: Callable[[], Wording] = Wording
    """How its owner writes settings, which may be others by now."""
    _amax: dict[tuple[str, str], deque[float]] = field(default_factory=dict)
    _losses: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _highest_lr: float = 0.0
    _active: dict[tuple[str, str, str], tuple[int, int]] = field(default_factory=dict)
    """Since when, and for how many looks it has been calm."""
    _implied: list[tuple[str, str, str]] = field(default_factory=list)
    """Issues of the latest reading that another finding already covers."""

    @property
    def present(self) -> list[tuple[str, str, str]]:
        """What the latest look has shown to be wrong: kind, module, role."""
        return [key for key, (_, calm) in self._active.items() if calm == 0] + self._implied

    def look(
        self, record: HealthRecord, *, scaling: LossScale | None = None, loss_scale: float = 1.0
    ) -> list[FindingRecord]:
        """Take in the statistics of a step; return the issues that begin with it."""
        seen = {(s.module, s.role): s for s in self._tensors(record)}
        terms = self.wording()
        matches = [t for s in seen.values() for rule in RULES for t in rule(s, terms)]
        # A weight has a gradient only if some of its output has one, which a sample may miss.
        learning = {s.module for s in seen.values() if s.role == "grad_weight" and s.amax > 0}
        matches = [
            t for t in matches if t[::2][:2] != ("dead", "grad_output") or t[1] not in learning
        ]
        matches += first_nonfinite([*seen.values()], terms)
        too_low = [] if scaling is None else [*low([*seen.values()], loss_scale, scaling, terms)]
        fp16 = {key for key, s in seen.items() if s.format == "fp16"}
        # One finding for the scale, rather than one for every tensor that it is too low for.
        implied = [t for t in matches if too_low and t.kind == "vanishing" and t[1:3] in fp16]
        self._implied = [t[:3] for t in implied]
        for key, tensor in seen.items():
            self._amax.setdefault(key, deque(maxlen=REMEMBERED)).append(tensor.amax)
        requested = {rule.__name__ for rule in RULES} | {"nonfinite", low.__name__}
        lines = [t for t in matches if t not in implied] + too_low
        return self._new_findings(lines, step=record.step, requested=requested)

    def step(self, record: StepRecord, *, scaling: LossScale | None = None) -> list[FindingRecord]:
        at_floor = [] if scaling is None else [*floor(record.loss_scale, scaling, self.wording())]
        fresh = self._new_findings(at_floor, step=record.step, requested={floor.__name__})
        # The step log reports an overflow at the minimum scale, together with the minimum.
        return (fresh if record.applied else []) + self._of_losses(record)

    def _of_losses(self, record: StepRecord) -> list[FindingRecord]:
        result = []
        message = spike(record.loss, self._losses)
        if message:
            names = self.wording()
            advice = f"check the data of this step, or try a lower {names.lr} or {names.clip}"
            result.append(Trouble("spike", "", "loss", "loss spike", message, advice))
        if record.applied and math.isfinite(record.loss):
            self._losses.append(record.loss)
        request = {"spike"}
        self._highest_lr = max(self._highest_lr, record.lr)  # NaN, of an optimizer without, is not
        if record.lost_updates is not None:
            request.add("lost")
            # A learning rate of zero is meant so: schedules begin or end with one.
            if record.lost_updates > LOST and record.lr != 0 and not self._is_resting(record.lr):
                why = f"{percent(record.lost_updates)} of the updates round to nothing"
                result.append(
                    Trouble("lost", "", "update", "lost updates", why, _finer(self.wording()))
                )
        return self._new_findings(result, step=record.step, requested=request)

    def _is_resting(self, lr: float) -> bool:
        """Return whether a schedule is near zero, where fp32 itself loses updates."""
        near_zero = lr < max(NEAR_ZERO * self._highest_lr, FP32.epsilon)
        return near_zero and _keeps_all_digits(self.wording())

    def state_dict(self) -> dict[str, Any]:
        return {
            "amax": [[*key, list(values)] for key, values in self._amax.items()],
            "losses": list(self._losses),
            "highest_lr": self._highest_lr,
            "active": [[*key, *value] for key, value in self._active.items()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._amax = {(m, r): deque(v, maxlen=REMEMBERED) for m, r, v in state["amax"]}
        self._losses = deque(state["losses"], maxlen=REMEMBERED)
        self._highest_lr = state.get("highest_lr", 0.0)
        self._active = {(m, r, w): (since, calm) for m, r, w, since, calm in state["active"]}

    def _tensors(self, record: HealthRecord) -> Iterator[TensorHistory]:
        for i, (module, role) in enumerate(zip(record.module, record.role, strict=True)):
            yield TensorHistory(
                module=module,
                role=role,
                format=record.format[i],
                amax=record.amax[i],
                overflow=record.overflow[i],
                underflow=record.underflow[i],
                subnormal=record.subnormal[i],
                nonfinite=record.nonfinite[i],
                past=tuple(self._amax.get((module, role), ())),
            )

    def _new_findings(
        self, matched: Sequence[Trouble], *, step: int, requested: set[str]
    ) -> list[FindingRecord]:
        """Return the findings that begin now, and end those whose rules no longer apply."""
        there = {t[:3] for t in matched}
        for key, (since, calm) in list(self._active.items()):
            if key[0] not in requested:
                continue
            if key in there:
                self._active[key] = since, 0
            elif calm + 1 >= CALM:
                del self._active[key]
            else:
                self._active[key] = since, calm + 1
        fresh = []
        for trouble in matched:
            if trouble[:3] not in self._active:
                self._active[trouble[:3]] = step, 0
                fresh.append(_finding(trouble, step))
        return fresh


def _finding(trouble: Trouble, step: int) -> FindingRecord:
    _, module, role, what, why, advice = trouble
    return FindingRecord(
        step=step,
        since=step,
        module=module,
        role=role,
        what=what,
        why=why,
        action="",
        advice=advice,
    )


def _finer(terms: Wording) -> str:
    """Return how fewer updates are lost, in the formats that are in force."""
    if _keeps_all_digits(terms):
        return f"all fp32 digits are stored already: try a higher {terms.lr}"
    return "try master=split (or kahan, stochastic) in the policy"


def _keeps_all_digits(terms: Wording) -> bool:
    return terms.policy.params == "fp32" or terms.policy.master in ("fp32", "split")
