"""Saving checkpoints during a run, in the background if requested."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import final

from narrowcast.config.common_sections import CheckpointSection
from narrowcast.errors import CheckpointError
from narrowcast.runs import Record
from narrowcast.runs.records import CheckpointRecord
from narrowcast.training.checkpoints.checkpoint import (
    Snapshot,
    is_saved,
    take_snapshot,
    write_snapshot,
)
from narrowcast.training.checkpoints.records_identity import RecordsDigest
from narrowcast.training.run_state import Progress, RunState
from narrowcast.training.signals import Home
from narrowcast.training.vital_signs import VitalSigns


@dataclass(frozen=True, kw_only=True, eq=False)
class _Writing:
    """A checkpoint that a thread is writing."""

    taken: Snapshot
    good_until: int
    written: Future[CheckpointRecord]
    reported: bool
    """Whether this step was recorded already."""


@final
class Saving:
    """Saves the state of a run, one checkpoint at a time.

    In the background, training waits only until the state is on the host, and a thread writes it.
    """

    def __init__(
        self,
        state: RunState,
        vital_signs: VitalSigns,
        *,
        home: Home | None,
        settings: CheckpointSection,
    ) -> None:
        self._state, self._vital_signs, self._home = state, vital_signs, home
        self._keep = settings.keep
        self._records = RecordsDigest()
        self._thread = ThreadPoolExecutor(1, "checkpoint") if settings.background else None
        self._writing: _Writing | None = None
        self.last = 0
        """Step of the last checkpoint."""

    def save(self, progress: Progress) -> Iterator[Record]:
        """Write a checkpoint of the whole run, if there is a folder."""
        if self._home is None:
            return
        yield from self.settled()
        step, home = progress.step, self._home.path()
        good_until = self._vital_signs.good_until(step)  # part of the state
        state = self._state.captured(progress) | {"records": self._records.upto_now(home)}
        taken = take_snapshot(step, state=state, copied=self._thread is not None)
        message, self.last = self.last == step, step
        folder, stored = home / "checkpoints", {"keep": self._keep, "good_until": good_until}
        if self._thread is not None:
            written = self._thread.submit(write_snapshot, folder, taken, **stored)
            self._writing = _Writing(
                taken=taken, good_until=good_until, written=written, reported=message
            )
            return
        record = write_snapshot(folder, taken, **stored)
        if not message:
            yield replace(record, seconds_blocked=record.seconds_total)

    def arrived(self) -> Iterator[Record]:
        """Yield the record of a checkpoint that was written meanwhile; does not wait."""
        if self._writing is not None and self._writing.written.done():
            yield from self.settled()

    def settled(self) -> Iterator[Record]:
        """Wait for the checkpoint that is being written, and tell of it.

        Where its folder was moved from under it, it is written again where that is now.
        """
        writing, self._writing = self._writing, None
        if writing is None or self._home is None:
            return
        try:
            record = writing.written.result()
        except (CheckpointError, OSError):
            folder = self._home.path() / "checkpoints"
            record = write_snapshot(
                folder, writing.taken, keep=self._keep, good_until=writing.good_until
            )
        if not writing.reported:
            yield record

    def save_if_lacking(self, progress: Progress) -> Iterator[Record]:
        """Save what no checkpoint holds; a folder that was put back holds none."""
        yield from self.settled()
        step = progress.step
        if self._home is None or step == 0:
            return
        if self.last != step or not is_saved(self._home.path() / "checkpoints", step):
            yield from self.save(progress)
            yield from self.settled()

    def close(self) -> None:
        """Wait for the thread that writes."""
        if self._thread is not None:
            self._thread.shutdown()
