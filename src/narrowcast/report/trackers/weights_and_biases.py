"""W&B's offline files, in the folder `wandb` of a run; nothing is ever sent.

Who wants them on a server uploads them later, with `wandb sync`.
"""

import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from narrowcast.report.trackers.tracker import numbers, record_text
from narrowcast.runs.records import Record

if TYPE_CHECKING:
    from wandb import Run

FOLDER = "wandb"
PROJECT = "narrowcast"


def import_wandb() -> Any:
    """Import wandb so that it calls nobody: not even to report its own errors."""
    # Read when wandb is imported and when it starts its helper process.
    os.environ["WANDB_MODE"] = "offline"
    os.environ["WANDB_ERROR_REPORTING"] = "false"
    import wandb

    return wandb


@final
class WeightsAndBiases:
    """Writes one row per step: its numbers, its evaluation, and what there is to say of it."""

    def __init__(
        self, folder: Path, *, earlier: Sequence[Record], name: str, settings: Mapping[str, Any]
    ) -> None:
        """Begin with the `earlier` records.

        An offline file cannot take steps back, so a run that is continued gets a new one, under
        the same id and with all its steps; the files it replaces are deleted.
        """
        replaced = _set_aside(folder / FOLDER)
        same_id = replaced[-1].name.rpartition("-")[2] if replaced else secrets.token_hex(4)
        self._run: Run = _begin(folder, name=name, settings=settings, id_=same_id)
        self._step, self._row = 0, dict[str, Any]()
        for record in earlier:
            self.take(record)
        for old in replaced:
            shutil.rmtree(old)

    def take(self, record: Record) -> None:
        """Add `record` to the row of its step; a row is written when the next one begins.

        What is found out later about an earlier step goes to the present row, with its step: W&B
        ignores rows that do not follow one another.
        """
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
        """Write the last row, and end."""
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


def _begin(folder: Path, *, name: str, settings: Mapping[str, Any], id_: str) -> "Run":
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
    run: Run = wandb.init(
        dir=str(folder),
        project=PROJECT,
        name=name or None,
        id=id_,
        config=dict(settings),
        settings=quiet,
        mode="offline",
        resume="allow",
        reinit="create_new",
    )
    return run
