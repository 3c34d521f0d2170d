"""Saving checkpoints during a run, in the background if requested."""

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import final

from narrowcast.config.common_sections import CheckpointSection
from narrowcast.runs import Record
from narrowcast.runs.records import CheckpointRecord
from narrowcast.training.checkpoints.checkpoint import (
    PREPARED,
    Snapshot,
    checkpoint_path,
    take_snapshot,
    write_snapshot,
    write_with_shards,
)
from narrowcast.training.checkpoints.ranks import CheckpointRanks
from narrowcast.training.checkpoints.resume import RecordsDigest
from narrowcast.training.checkpoints.run_checkpoint import take_run_snapshot
from narrowcast.training.checkpoints.sharded import ShardedSnapshot
from narrowcast.training.parallel import ALONE, RunRanks
from narrowcast.training.run_state import Progress, RunState
from narrowcast.training.vital_signs import VitalSigns


@final
class Saving:
    """Saves the state of a run, one checkpoint at a time; a thread may write it.

    Rank 0 writes it, with a file of every rank if the model is sharded.
    """

    def __init__(
        self,
        state: RunState,
        vital_signs: VitalSigns,
        *,
        folder: Path | None,
        settings: CheckpointSection,
        ranks: RunRanks = ALONE,
        sharded: bool = False,
    ) -> None:
        self._state, self._vital_signs, self._folder = state, vital_signs, folder
        self._ranks = ranks
        self._writers = CheckpointRanks() if sharded and folder is not None else None
        """The ranks that write shards; None if rank 0 writes the whole state."""
        self._keep = settings.keep
        self._records = RecordsDigest()
        self._thread = ThreadPoolExecutor(1, "checkpoint") if settings.background else None
        self._writing: Future[CheckpointRecord | None] | None = None
        self.last = 0
        """Step of the last checkpoint."""

    def save(self, progress: Progress) -> Iterator[Record]:
        """Write a checkpoint of the whole run, if there is a folder. All ranks call it."""
        if self._folder is None:
            return
        yield from self.settled()
        step = progress.step
        self._ranks.at(f"saving the checkpoint of step {step}")
        good_until = self._vital_signs.good_until(step)  # part of the state
        state, copied = self._state.captured(progress), self._thread is not None
        began = time.perf_counter()
        shards = None
        if self._writers is not None:
            shards = take_run_snapshot(state.pop(PREPARED), self._writers, copied=copied)
        self.last = step
        taken = None
        if self._ranks.is_main:
            state["records"] = self._records.upto_now(self._folder)
            taken = take_snapshot(step, state=state, copied=copied)
            taken = replace(taken, seconds=time.perf_counter() - began)
        write = partial(
            self._write, taken, shards, self._folder / "checkpoints", good_until=good_until
        )
        if self._thread is not None:
            self._writing = self._thread.submit(write)
            return
        record = write()
        if record is not None:
            yield replace(record, seconds_blocked=record.seconds_total)

    def _write(
        self,
        taken: Snapshot | None,
        shards: ShardedSnapshot | None,
        folder: Path,
        *,
        good_until: int,
    ) -> CheckpointRecord | None:
        """Write this rank's part of a checkpoint; rank 0 returns the record."""
        if shards is not None and self._writers is not None:
            return write_with_shards(
                folder,
                taken,
                shards,
                self._writers,
                step=self.last,
                keep=self._keep,
                good_until=good_until,
            )
        if taken is None:
            return None
        return write_snapshot(folder, taken, keep=self._keep, good_until=good_until)

    def arrived(self) -> Iterator[Record]:
        """Yield the record of a checkpoint that was written meanwhile; does not wait."""
        if self._writing is not None and self._writing.done():
            yield from self.settled()

    def settled(self) -> Iterator[Record]:
        """Wait for the checkpoint that is being written, and yield its record."""
        writing, self._writing = self._writing, None
        record = None if writing is None else writing.result()
        if record is not None:
            yield record

    def save_if_lacking(self, progress: Progress) -> Iterator[Record]:
        """Save a checkpoint of the current step if there is none."""
        yield from self.settled()
        step = progress.step
        if self._folder is None or step == 0:
            return
        # A run may be resumed into another folder than that of its checkpoint.
        saved = checkpoint_path(self._folder / "checkpoints", step).is_dir()
        if self._ranks.from_main(step != self.last or not saved):
            yield from self.save(progress)
            yield from self.settled()

    def close(self) -> None:
        """Wait for the thread that writes."""
        if self._thread is not None:
            self._thread.shutdown()
