"""Trackers that get the records of a run: TensorBoard, and W&B in offline mode.

TensorBoard's files are written by torch's writer, which can take back steps (purge_step).
"""

import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, final

from narrowcast.errors import UnsupportedError
from narrowcast.runs.records import (
    CheckpointRecord,
    EvalRecord,
    FindingRecord,
    PrecisionRecord,
    Record,
    StepRecord,
    StrategyRecord,
)

if TYPE_CHECKING:
    from wandb import Run

T = TypeVar("T")


class Tracker(Protocol):
    """A third-party program that stores records; it may raise anything."""

    def take(self, record: Record) -> None:
        """Take the next record."""
        ...

    def close(self) -> None:
        """Write what is left, and end."""
        ...


@final
class Trackers:
    """The trackers of one run, which have to be closed."""

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
        for name, tracker in list(self._open.items()):
            self._tried(name, partial(tracker.take, record))

    def close(self) -> None:
        for name, tracker in list(self._open.items()):
            self._tried(name, tracker.close)
        self._open.clear()

    def _tried(self, name: str, deed: Callable[[], T]) -> T | None:
        # The one place where any exception is caught: an error of a third-party program must
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


FLUSH_SECONDS = 10
"""Between two writes to disk; TensorBoard looks every 30 seconds at most."""
QUEUE = 1000
"""Numbers that wait for the writing thread before a step would wait for it."""


@final
class TensorBoard:
    """Writes numbers as scalars, and the rest as text."""

    def __init__(self, folder: Path, *, earlier: Sequence[Record], recipe_text: str = "") -> None:
        """Continue after the `earlier` records, and take back later steps of a rewound run."""
        from torch.utils.tensorboard import SummaryWriter

        location = folder / "tensorboard"
        written = sorted(location.iterdir()) if location.is_dir() else []
        continued = bool(written)
        if continued:
            _wait_past(written[-1].name)
        last = max((record.step for record in earlier), default=0)
        self._writer: SummaryWriter = SummaryWriter(
            log_dir=str(location),
            purge_step=last + 1 if continued else None,
            max_queue=QUEUE,
            flush_secs=FLUSH_SECONDS,
        )
        if not continued:
            # As a block of code: TensorBoard takes text for Markdown.
            indented = "".join(f"    {line}\n" for line in recipe_text.splitlines())
            self._writer.add_text("recipe", indented, 0)
            for record in earlier:
                self.take(record)

    def take(self, record: Record) -> None:
        """Write what `record` holds; a checkpoint puts on disk all that led to it."""
        for name, y in numbers(record).items():
            self._writer.add_scalar(name, y, record.step)
        for name, text in record_text(record).items():
            self._writer.add_text(name, text, record.step)
        if isinstance(record, CheckpointRecord):
            # A killed run resumes from here and would not write these steps again.
            self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _wait_past(name: str) -> None:
    """Wait until a new event file sorts behind `name`, for less than a second.

    TensorBoard reads files in the order of their names, which count whole seconds.
    """
    second = re.match(r"events\.out\.tfevents\.(\d{10})\.", name)
    left = float(second[1]) + 1 - time.time() if second else 0.0
    # More than that, and the clock has been set back: waiting would not help.
    time.sleep(left if 0 < left <= 1 else 0)


def import_wandb() -> Any:
    """Import wandb without network access, including its error reports."""
    # Read when wandb is imported and when it starts its helper process.
    os.environ["WANDB_MODE"] = "offline"
    os.environ["WANDB_ERROR_REPORTING"] = "false"
    import wandb

    return wandb


@final
class WeightsAndBiases:
    """Writes one row per step: its numbers, its evaluation, and its messages."""

    def __init__(
        self, folder: Path, *, earlier: Sequence[Record], name: str, settings: Mapping[str, Any]
    ) -> None:
        """Write a new file with the `earlier` records; an offline file cannot take steps back."""
        replaced = _set_aside(folder / "wandb")
        same_id = replaced[-1].name.rpartition("-")[2] if replaced else secrets.token_hex(4)
        wandb = import_wandb()
        quiet = wandb.Settings(
            mode="offline",
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
            save_code=False,
            x_disable_stats=True,
            x_disable_meta=True,
            x_disable_machine_info=True,
        )
        self._run: Run = wandb.init(
            dir=str(folder),
            project="narrowcast",
            name=name or None,
            id=same_id,
            config=dict(settings),
            settings=quiet,
            mode="offline",
            resume="allow",
            reinit="create_new",
        )
        self._step, self._row = 0, dict[str, Any]()
        for record in earlier:
            self.take(record)
        for old in replaced:
            shutil.rmtree(old)

    def take(self, record: Record) -> None:
        """Add `record` to the row of its step, or of the present one: W&B needs rows in order."""
        late = record.step < self._step
        if record.step > self._step:
            self._write()
            self._step = record.step
        self._row.update({} if late else numbers(record))
        for name, text in record_text(record).items():
            before = self._row.get(name)
            text = f"step {record.step}: {text}" if late else text
            self._row[name] = f"{before}\n{text}" if before else text

    def close(self) -> None:
        self._write()
        self._run.finish()

    def _write(self) -> None:
        if self._row:
            self._run.log(self._row, step=self._step)
            self._row = {}


def _set_aside(location: Path) -> list[Path]:
    """Rename earlier offline runs, whose names a new one of the same second would share."""
    for old in location.glob("offline-run-*-*"):
        old.rename(old.with_name(f"replaced-{old.name}"))
    return sorted(location.glob("replaced-offline-run-*-*"))


NEEDED: dict[str, Callable[[], object]] = {
    "tensorboard": lambda: import_module("torch.utils.tensorboard"),
    "wandb": import_wandb,
}
"""How each tracker's package is imported."""


def require_trackers(names: Sequence[str]) -> None:
    """Raise for trackers whose package is missing or broken. Imports those that are named."""
    for name in names:
        try:
            NEEDED[name]()
        except ImportError as error:
            raise UnsupportedError(
                f"trackers={name} needs the package {name}, which cannot be imported ({error}). "
                f"Run `pip install {name}`, or leave {name} out of trackers"
            ) from None


def open_trackers(
    names: Sequence[str],
    *,
    folder: Path,
    earlier: Sequence[Record],
    recipe_text: str,
    settings: Mapping[str, Any],
    tell: Callable[[str], None],
) -> Trackers:
    """Open the trackers called `names`; `tell` gets a sentence for each that fails."""
    openers: dict[str, Callable[[], Tracker]] = {
        "tensorboard": lambda: TensorBoard(folder, earlier=earlier, recipe_text=recipe_text),
        "wandb": lambda: WeightsAndBiases(
            folder, earlier=earlier, name=str(settings.get("name", "")), settings=settings
        ),
    }
    return Trackers({name: openers[name] for name in dict.fromkeys(names)}, tell=tell)
