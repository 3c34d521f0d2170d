"""Records: one frozen value per event of a run, and its line of JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from narrowcast.errors import CheckpointError
from narrowcast.runs import strict_json
from narrowcast.runs.health_records import (
    ExponentRecord,
    HealthRecord,
    health_from_json,
    health_line,
)
from narrowcast.runs.shape import LARGEST

__all__ = [
    "KINDS",
    "CheckpointRecord",
    "EvalRecord",
    "ExponentRecord",
    "FindingRecord",
    "HealthRecord",
    "PrecisionRecord",
    "Record",
    "StepRecord",
    "StrategyRecord",
    "from_line",
    "same_trajectory",
    "to_line",
]


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step, applied or skipped."""

    step: int
    loss: float
    loss_scale: float
    applied: bool
    skip_reason: str
    """Why the step was skipped; empty when it was applied."""
    grad_norm: float
    lr: float
    lost_updates: float | None
    """Share of weights whose update rounded to zero; None if not measured."""
    items: int
    """Items in the step, in the units of its task: tokens, samples."""
    seconds: float
    peak_bytes: int
    loss_parts: dict[str, float] = field(default_factory=dict)
    """Parts of the loss by name; empty if it has none."""
    forward_only: bool = False
    """Whether the step had no backward pass: it verified predicted weights."""


@dataclass(frozen=True, kw_only=True)
class EvalRecord:
    """Metrics of an evaluation; on the line they are next to `step`."""

    step: int
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SampleRecord:
    """Text that a language model wrote after a prompt, with the weights of an evaluation."""

    step: int
    prompt: str
    text: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class FindingRecord:
    """A problem: where, since when, what, why, what was done, and what to try."""

    step: int
    """Step at which it was reported."""
    since: int
    """Step at which it started."""
    module: str
    role: str
    what: str
    why: str
    action: str
    """What was done about it, or empty."""
    advice: str
    """What to try, or empty."""
    rank: int | None = None
    """The rank that found it; None in one process, or if all ranks found it."""

    @property
    def remedy(self) -> str:
        """What was done and what to try."""
        return "; ".join(part for part in (self.action, self.advice) if part)


@dataclass(frozen=True, kw_only=True)
class PrecisionRecord:
    """A change of format; on the line, `before` and `after` are `from` and `to`."""

    step: int
    module: str
    before: str
    after: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class CheckpointRecord:
    """A checkpoint that is complete on disk."""

    step: int
    seconds_blocked: float
    seconds_total: float
    bytes: int


@dataclass(frozen=True, kw_only=True)
class StrategyRecord:
    """An action of a strategy between two steps: a phase, a jump, a choice of weights."""

    step: int
    phase: str
    event: str
    """`phase`, `readout`, `jump`, `divergence`, `baseline` or `summary`."""
    what: str
    why: str
    values: dict[str, float]
    """Its numbers by name."""
    seconds: float
    """Time it took in addition to the steps."""


Record = (
    StepRecord
    | EvalRecord
    | HealthRecord
    | ExponentRecord
    | FindingRecord
    | PrecisionRecord
    | CheckpointRecord
    | StrategyRecord
    | SampleRecord
)

KINDS: dict[str, type[Record]] = {
    "step": StepRecord,
    "eval": EvalRecord,
    "health": HealthRecord,
    "exponents": ExponentRecord,
    "finding": FindingRecord,
    "precision": PrecisionRecord,
    "checkpoint": CheckpointRecord,
    "strategy": StrategyRecord,
    "sample": SampleRecord,
}

MEASURED = frozenset({"seconds", "seconds_blocked", "seconds_total", "peak_bytes", "bytes"})
"""Fields that differ between two equal runs."""


def to_line(record: Record) -> str:
    """Return `record` as one line of strict JSON, without a newline."""
    if isinstance(record, HealthRecord):
        return health_line(record, kind="health")
    return strict_json.dumps(_to_json(record))


def from_line(line: str) -> Record:
    """Return the record of a line, or raise CheckpointError."""
    try:
        result = strict_json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"not a record ({error}): {_shown(line)}") from None
    kind = result.pop("kind", None) if isinstance(result, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        raise CheckpointError(
            f"not a record (kind must be one of {', '.join(KINDS)}): {_shown(line)}"
        )
    try:
        return _from_json(KINDS[kind], result)
    except (KeyError, TypeError, OverflowError) as error:
        raise CheckpointError(
            f"not a record of kind {kind} ({error.args[0]}): {_shown(line)}"
        ) from None


def same_trajectory(a: Record, b: Record) -> bool:
    """Return whether two records are equal except for times and memory."""
    return _course(a) == _course(b)


# The name on the line differs where the field's would be a keyword of Python.
_ON_THE_LINE = {"before": "from", "after": "to"}
_RESERVED = frozenset({"kind", "step"})


def _to_json(record: Record) -> dict[str, object]:
    kind = next(kind for kind, cls in KINDS.items() if type(record) is cls)
    if isinstance(record, EvalRecord):
        if taken := _RESERVED & record.metrics.keys():
            raise ValueError(
                f"A metric must not be named {min(taken)}, which is a field of the record. Rename "
                "it."
            )
        return {"kind": kind, "step": record.step, **record.metrics}
    values = {_ON_THE_LINE.get(f.name, f.name): getattr(record, f.name) for f in fields(record)}
    if isinstance(record, StepRecord) and not record.loss_parts:
        del values["loss_parts"]  # most losses are of one piece
    if isinstance(record, StepRecord) and not record.forward_only:
        del values["forward_only"]
    if isinstance(record, FindingRecord) and record.rank is None:
        del values["rank"]
    return {"kind": kind, **values}


def _from_json(cls: type[Record], results: dict[str, Any]) -> Record:
    if cls is EvalRecord:
        step = _whole("step", results.pop("step", None))
        return EvalRecord(step=step, metrics={k: _number(k, v) for k, v in results.items()})
    if cls is HealthRecord:
        return health_from_json(results)
    if cls is StepRecord and "tokens" in results:  # of a run from before there were other units
        results["items"] = results.pop("tokens")
    values: dict[str, Any] = {}
    for f in fields(cls):
        name = _ON_THE_LINE.get(f.name, f.name)
        if name not in results and name in ("loss_parts", "forward_only", "rank"):
            continue
        if name not in results:
            raise KeyError(f"{name} is missing")
        values[f.name] = _READERS[str(f.type)](name, results.pop(name))
    if results:
        raise KeyError(f"{min(results)} is not a known field")
    return cls(**values)


def _number(name: str, value: object) -> float:
    if isinstance(value, str) and value in strict_json.NONFINITE:
        return strict_json.NONFINITE[value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is not a number")
    return float(value)


def _number_or_none(name: str, value: object) -> float | None:
    return None if value is None else _number(name, value)


def _whole(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is not a whole number")
    if abs(value) > LARGEST:
        raise TypeError(f"{name} is above 2**63")
    return value


def _wholes(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise TypeError(f"{name} is not a list")
    matches = tuple(_whole(name, item) for item in value)
    if matches and min(matches) < 0:
        raise TypeError(f"{name} has a count below 0")
    return matches


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} is not true or false")
    return value


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} is not text")
    return value


def _numbers(name: str, value: object) -> dict[str, float]:
    if not isinstance(value, dict):
        raise TypeError(f"{name} is not a mapping")
    return {key: _number(f"{name}.{key}", item) for key, item in value.items()}


_READERS: dict[str, Callable[[str, object], object]] = {
    "int": _whole,
    "float": _number,
    "float | None": _number_or_none,
    "int | None": lambda name, value: None if value is None else _whole(name, value),
    "bool": _flag,
    "str": _text,
    "tuple[int, ...]": _wholes,
    "dict[str, float]": _numbers,
}


def _course(record: Record) -> str:
    # As text, because nan is not equal to itself but "nan" is.
    if isinstance(record, HealthRecord):
        return to_line(record)
    items = _to_json(record).items()
    return strict_json.dumps({key: value for key, value in items if key not in MEASURED})


def _shown(line: str) -> str:
    return line if len(line) <= 80 else line[:77] + "..."
