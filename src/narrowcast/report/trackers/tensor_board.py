"""TensorBoard's event files, in the folder `tensorboard` of a run.

By torch's writer rather than tensorboardX: torch is here anyway, who looks at the files needs the
package `tensorboard` in any case, and its own writer knows how to take back steps (purge_step).
"""

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, final

from narrowcast.report.trackers.tracker import numbers, record_text
from narrowcast.runs.records import CheckpointRecord, Record

if TYPE_CHECKING:
    pass

FOLDER = "tensorboard"
FLUSH_SECONDS = 10
"""Between two writes to disk; TensorBoard looks every 30 seconds at most."""
QUEUE = 1000
"""Numbers that wait for the writing thread before a step would wait for it."""


@final
class TensorBoard:
    """Writes numbers as scalars, and the rest as text."""

    def __init__(self, folder: Path, *, earlier: Sequence[Record], recipe_text: str = "") -> None:
        """Go on after the `earlier` records, or begin with them where there are no files yet.

        What files hold of later steps, from before the run was rewound, is taken back.
        """
        from torch.utils.tensorboard import SummaryWriter

        location = folder / FOLDER
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
            # A run that is killed goes on from here, and nobody would write these steps again.
            self._writer.flush()

    def close(self) -> None:
        """Put everything on disk."""
        self._writer.close()


def _wait_past(name: str) -> None:
    """Wait until a new event file sorts behind `name`, for less than a second.

    TensorBoard reads files in the order of their names, which count whole seconds; of two from
    one second, those of the process with the larger number would come last.
    """
    second = re.match(r"events\.out\.tfevents\.(\d{10})\.", name)
    left = float(second[1]) + 1 - time.time() if second else 0.0
    # More than that, and the clock has been set back: waiting would not help.
    time.sleep(left if 0 < left <= 1 else 0)
