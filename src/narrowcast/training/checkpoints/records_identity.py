"""The records up to a checkpoint: synced before it is saved, and unchanged when it is resumed."""

import hashlib
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, final

from narrowcast.errors import CheckpointError
from narrowcast.plain_files import open_plain
from narrowcast.runs import RunFolder, StepRecord
from narrowcast.runs.commands import resume_command
from narrowcast.runs.folder import RECORDS
from narrowcast.runs.writing import explain_write_error

CHUNK = 2**20


@final
class RecordsDigest:
    """Incremental digest of a growing file."""

    def __init__(self) -> None:
        self._read, self._digest = 0, hashlib.sha256()

    def upto_now(self, folder: Path) -> dict[str, Any]:
        """Sync the records, and return their size and digest; both are 0 and empty without records.

        After a power cut, a synced checkpoint then has the records of its steps.
        """
        try:
            with open_plain(folder / RECORDS, follow=True) as file:
                os.fsync(file.fileno())
                if os.fstat(file.fileno()).st_size < self._read:  # another file by now
                    self._read, self._digest = 0, hashlib.sha256()
                file.seek(self._read)
                while chunk := file.read(CHUNK):
                    self._digest.update(chunk)
                    self._read += len(chunk)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise CheckpointError(
                f"Cannot read {folder / RECORDS}: {explain_write_error(error)}. Then run "
                f"`{resume_command(folder)}`."
            ) from error
        return {"bytes": self._read, "sha256": self._digest.hexdigest()}


def require_records(
    run: RunFolder, state: Mapping[str, Any] | None, *, accept: Collection[str] = ()
) -> None:
    """Raise if the records differ from what the run wrote up to its checkpoint."""
    done = 0 if state is None else int(state["step"])
    records = run.records()  # what is damaged is said here
    if state is None or "records" in accept:
        return
    saved = state.get("records", {})  # older checkpoints are refused by whoever takes them up
    if not saved or is_as_written(run.path / RECORDS, saved):
        return
    steps = [r.step for r in records if isinstance(r, StepRecord) and r.step <= done]
    wrong = _wrong_steps(steps, done) or "has other values up to the checkpoint"
    raise CheckpointError(
        f"{run.path / RECORDS} was changed after the run wrote it: it {wrong}. Restore it from a "
        "copy, or add --accept records (in Python accept=['records']) to continue with it."
    )


def _wrong_steps(steps: list[int], done: int) -> str:
    expected = range(1, done + 1)
    if steps == list(expected):
        return ""
    missing = sorted(set(expected) - set(steps))
    if not missing:
        return "has steps twice or out of order"
    return (
        f"lacks {len(missing)} of the {done} steps before its checkpoint, the first is step "
        f"{missing[0]}"
    )


def is_as_written(file: Path, saved: Mapping[str, Any]) -> bool:
    """Return whether a file still starts with what was saved of it."""
    digest, left = hashlib.sha256(), int(saved.get("bytes", 0))
    try:
        with open_plain(file, follow=True) as content:
            while left > 0 and (chunk := content.read(min(left, CHUNK))):
                digest.update(chunk)
                left -= len(chunk)
    except FileNotFoundError:
        pass
    return digest.hexdigest() == saved.get("sha256")
