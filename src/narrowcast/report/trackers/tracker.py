"""Consumers of records that are never in the way: one that fails says so once and is let go.

A tracker is told what `records.jsonl` holds and nothing else, so it can be caught up at any time.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Protocol, Self, TypeVar, final

from narrowcast.runs.records import (
    EvalRecord,
    FindingRecord,
    PrecisionRecord,
    Record,
    StepRecord,
    StrategyRecord,
)

T = TypeVar("T")


class Tracker(Protocol):
    """Somebody else's program that keeps what it is told; it may raise anything."""

    def take(self, record: Record) -> None:
        """Take the next record."""
        ...

    def close(self) -> None:
        """Write what is left, and end."""
        ...


@final
class Trackers:
    """The trackers of one run; a context, because they have to be closed."""

    def __init__(
        self, openers: Mapping[str, Callable[[], Tracker]], *, tell: Callable[[str], None]
    ) -> None:
        """Open each, by its name; `tell` gets one sentence for each that fails, now or later."""
        self._tell = tell
        self._open: dict[str, Tracker] = {}
        for name, opener in openers.items():
            tracker = self._tried(name, opener)
            if tracker is not None:
                self._open[name] = tracker

    def take(self, record: Record) -> None:
        """Pass `record` on to all that are left."""
        for name, tracker in list(self._open.items()):
            self._tried(name, partial(tracker.take, record))

    def close(self) -> None:
        """Close all that are left."""
        for name, tracker in list(self._open.items()):
            self._tried(name, tracker.close)
        self._open.clear()

    def _tried(self, name: str, deed: Callable[[], T]) -> T | None:
        # The one place where any exception is caught: what somebody else's program raises must
        # not end a run of days, whatever it is.
        try:
            return deed()
        except Exception as error:  # noqa: BLE001
            self._open.pop(name, None)
            reason = " ".join(str(error).split()) or "no reason given"
            self._tell(
                f"{name} failed and was disabled ({type(error).__name__}: {reason}); training "
                "continues, and records.jsonl has everything"
            )
            return None

    def __enter__(self) -> Self:
        """Return the trackers themselves."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close them."""
        self.close()


def numbers(record: Record) -> dict[str, float]:
    """Return what can be drawn of a record, by a name with its group."""
    match record:
        case StepRecord():
            results = {
                "train/loss": record.loss,
                "train/loss_scale": record.loss_scale,
                "train/skipped": float(not record.applied),
                "train/grad_norm": record.grad_norm,
                "train/lr": record.lr,
                "speed/step_seconds": record.seconds,
                "memory/peak_bytes": float(record.peak_bytes),
            }
            if record.seconds > 0:
                results["speed/items_per_second"] = record.items / record.seconds
            if record.lost_updates is not None:
                results["train/lost_updates"] = record.lost_updates
            return results | {f"loss/{name}": y for name, y in record.loss_parts.items()}
        case EvalRecord():
            return {f"eval/{name}": y for name, y in record.metrics.items()}
        case StrategyRecord(event="readout" | "jump"):
            return {f"strategy/{name}": y for name, y in record.values.items()}
        case _:
            return {}


def record_text(record: Record) -> dict[str, str]:
    """Return what can only be said of a record, by name."""
    match record:
        case StepRecord() if not record.applied:
            return {"skipped": record.skip_reason or "no reason recorded"}
        case FindingRecord():
            where = f"{record.module} {record.role}".strip()
            rest = f"; {record.remedy}" if record.remedy else ""
            text = f"{record.what}: {record.why}{rest}"
            return {"finding": f"{where}: {text}" if where else text}
        case PrecisionRecord():
            change = f"{record.module} {record.before} → {record.after}"
            return {"precision": f"{change.strip()}: {record.reason}"}
        case StrategyRecord(event="phase" | "jump" | "readout"):
            return {"strategy": f"{record.what}: {record.why}"}
        case _:
            return {}
