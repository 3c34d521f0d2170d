"""The checkpoints of a run that is going on: written when there is a folder, and told once."""

from collections.abc import Iterator
from typing import final

from narrowcast.runs import Record
from narrowcast.training.checkpoints.checkpoint import is_saved, save_checkpoint
from narrowcast.training.checkpoints.records_identity import RecordsDigest
from narrowcast.training.run_state import Progress, RunState
from narrowcast.training.signals import Home
from narrowcast.training.vital_signs import VitalSigns


@final
class Saving:
    """Saves the state of a run, and knows what is saved."""

    def __init__(
        self, state: RunState, vital_signs: VitalSigns, *, home: Home | None, keep: int
    ) -> None:
        self._state, self._vital_signs, self._home, self._keep = state, vital_signs, home, keep
        self._records = RecordsDigest()
        self.last = 0
        """The step of the last checkpoint."""

    def save(self, progress: Progress) -> Iterator[Record]:
        """Write a checkpoint of the whole run, if there is a folder to write it to."""
        if self._home is None:
            return
        step, home = progress.step, self._home.path()
        good_until = self._vital_signs.good_until(step)  # part of the state
        state = self._state.captured(progress) | {"records": self._records.upto_now(home)}
        kept = {"keep": self._keep, "good_until": good_until}
        record = save_checkpoint(home / "checkpoints", step, state=state, **kept)
        if self.last != step:  # else it has been told
            self.last = step
            yield record

    def save_if_lacking(self, progress: Progress) -> Iterator[Record]:
        """Save what no checkpoint holds; a folder that was put back holds none."""
        step = progress.step
        if self._home is None or step == 0:
            return
        if self.last != step or not is_saved(self._home.path() / "checkpoints", step):
            yield from self.save(progress)
