"""Checkpoints: the whole state of a run at one step, without pickle.

A folder is written under another name, synced and renamed, so `step-000100` is always complete. For
a sharded model, it also holds one file per rank and their index.
"""

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from narrowcast.errors import CheckpointError
from narrowcast.hardware.transfers import HostCopies, free, to_host
from narrowcast.plain_files import read_plain
from narrowcast.runs.records import CheckpointRecord
from narrowcast.runs.writing import remove, remove_leftovers, write_text, written_atomically
from narrowcast.training.checkpoints.ranks import CheckpointRanks
from narrowcast.training.checkpoints.run_checkpoint import StoredShards
from narrowcast.training.checkpoints.sharded import (
    ADVICE,
    ShardedSnapshot,
    index_digest,
    write_sharded,
)
from narrowcast.training.checkpoints.tree import CHECKSUM_THREADS, flatten, unflatten, write_tensors

FORMAT = 1
"""Version of the layout; readers raise for any other."""
TENSORS = "tensors.safetensors"
STATE = "state.json"
PREPARED = "prepared"
"""The part of the state that the model, the optimizer and their formats have."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Snapshot:
    """The state of a run at one step, which a thread may write."""

    step: int
    tree: Any
    tensors: Callable[[], dict[str, Tensor]]
    """Waits for the tensors to be on the host, and returns them."""
    seconds: float
    """Seconds that training waited for it."""


def take_snapshot(step: int, *, state: dict[str, Any], copied: bool = False) -> Snapshot:
    """Take what is to be written; with `copied`, training may continue meanwhile."""
    began = time.perf_counter()
    tree, held = flatten(state)
    tensors = HostCopies(held).wait if copied else partial(to_host, held)
    seconds = time.perf_counter() - began
    return Snapshot(step=step, tree=tree, tensors=tensors, seconds=seconds)


def save_checkpoint(
    folder: Path, step: int, *, state: dict[str, Any], keep: int = 2, good_until: int | None = None
) -> CheckpointRecord:
    """Write `state` as the checkpoint of `step`; see `write_snapshot`."""
    taken = take_snapshot(step, state=state)
    record = write_snapshot(folder, taken, keep=keep, good_until=good_until)
    return replace(record, seconds_blocked=record.seconds_total)


def write_snapshot(
    folder: Path, taken: Snapshot, *, keep: int = 2, good_until: int | None = None
) -> CheckpointRecord:
    """Write a checkpoint, then remove all but it and the `keep` newest up to `good_until`."""
    began = time.perf_counter()
    path, last = checkpoint_path(folder, taken.step), latest(folder)
    hint = f"{last} is unchanged, resume from it" if last else "there is no earlier checkpoint"
    with written_atomically(path, hint=hint) as extra:
        _make_ready(folder)
        extra.mkdir()
        _write_state(taken, extra, "")
    return _written(folder, taken, began=began, keep=keep, good_until=good_until)


def write_with_shards(
    folder: Path,
    taken: Snapshot | None,
    shards: ShardedSnapshot,
    ranks: CheckpointRanks,
    *,
    step: int,
    keep: int = 2,
    good_until: int | None = None,
) -> CheckpointRecord | None:
    """Write a checkpoint with all other ranks, as `write_snapshot` does.

    Rank 0 has `taken`, the state without that of the model, and returns the record.
    """
    began, path = time.perf_counter(), checkpoint_path(folder, step)
    if taken is None:
        write_sharded(shards, path, ranks)
        return None
    with suppress(OSError):  # writing says what is wrong with the folder
        remove_leftovers(folder)
    write_sharded(shards, path, ranks, also=partial(_write_state, taken))
    return _written(folder, taken, began=began, keep=keep, good_until=good_until)


def _write_state(taken: Snapshot, folder: Path, shards: str) -> None:
    """Write the files of a state; `shards` is the digest of the index beside them, if any."""
    tensors = taken.tensors()
    with _checksums(tensors) as checksums:
        write_tensors(folder / TENSORS, tensors, metadata={"step": str(taken.step)})
        described = {
            "format": FORMAT,
            "step": taken.step,
            "bytes": (folder / TENSORS).stat().st_size,
            "sha256": {"state": _checksum(taken.tree), "tensors": checksums(), "shards": shards},
            "state": taken.tree,
        }
        write_text(folder / STATE, json.dumps(described))
    free(tensors)


def _written(
    folder: Path, taken: Snapshot, *, began: float, keep: int, good_until: int | None
) -> CheckpointRecord:
    """Remove the checkpoints that are not needed any more, and return the record of a new one."""
    step, path = taken.step, checkpoint_path(folder, taken.step)
    until = step if good_until is None else good_until
    good = [each for each in checkpoints(folder) if checkpoint_step(each) <= until]
    _remove_all_but({path, *good[-keep:]}, folder)
    total = taken.seconds + time.perf_counter() - began
    return CheckpointRecord(
        step=step, seconds_blocked=taken.seconds, seconds_total=total, bytes=checkpoint_bytes(path)
    )


def load_checkpoint(path: Path, *, shards: bool = True) -> dict[str, Any]:
    """Return the checked state in `path`, on the CPU; an error names an older intact one.

    Without `shards`, those of a model stay on the disk as `StoredShards`.
    """
    try:
        return _load(path, shards=shards)
    except _DamagedError as damage:
        raise damaged(path, str(damage)) from damage


def damaged(path: Path, what: str) -> CheckpointError:
    """Return the error for a damaged checkpoint, which names the newest older intact one."""
    older = _newest_whole(path.parent, before=path)
    advice = (
        f"Remove {path} to resume from {older.name}, which is intact."
        if older
        else "No older checkpoint is intact. Start the run again."
    )
    return CheckpointError(f"{what.removesuffix(ADVICE)}. {advice}")


def checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in `folder`, oldest first."""
    try:
        matches = list(folder.iterdir()) if folder.is_dir() else []
        named = [path for path in matches if _NAME.fullmatch(path.name) and path.is_dir()]
    except OSError as error:
        raise CheckpointError(f"Cannot read {folder}: {error.strerror}.") from error
    return sorted(named, key=checkpoint_step)


def latest(folder: Path) -> Path | None:
    """Return the newest complete checkpoint in `folder`."""
    return next(reversed(checkpoints(folder)), None)


def checkpoint_step(path: Path) -> int:
    """Return the step in a checkpoint's name."""
    return int(path.name.removeprefix("step-"))


def checkpoint_bytes(path: Path) -> int:
    """Return the size of a checkpoint's files."""
    return sum(file.lstat().st_size for file in path.iterdir())


_NAME = re.compile(r"step-[0-9]{1,18}")


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return where the checkpoint of a step is."""
    return folder / f"step-{step:06d}"


class _DamagedError(Exception):
    """What is wrong with which file."""


def _make_ready(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)


def _remove_all_but(stored: set[Path], folder: Path) -> None:
    """Remove the other checkpoints; one that cannot be removed stays."""
    for path in set(checkpoints(folder)) - stored:
        with suppress(OSError):
            remove(path)


def _newest_whole(folder: Path, *, before: Path) -> Path | None:
    """Return the newest checkpoint older than `before` that can be loaded."""
    if not _NAME.fullmatch(before.name):
        return None
    for path in reversed(checkpoints(folder)):
        if checkpoint_step(path) < checkpoint_step(before):
            try:
                _load(path)
            except _DamagedError:
                continue
            return path
    return None


def _load(path: Path, *, shards: bool = True) -> dict[str, Any]:
    tree, size, expected, digest = _read_state(path / STATE)
    file = path / TENSORS
    if not file.is_file():
        raise _DamagedError(f"{file} is missing")
    if (actual := file.stat().st_size) != size:
        raise _DamagedError(f"{file} must have {size} bytes, got {actual}")
    try:
        tensors = load_file(file)
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise _DamagedError(f"{file} cannot be read: {error}") from error
    with _checksums(tensors) as checksums:
        results = checksums()
    if changed := sorted(name for name in expected if results.get(name) != expected[name]):
        raise _DamagedError(
            f"{file} was changed after it was written: {changed[0]} has other values"
        )
    state: dict[str, Any] = unflatten(tree, tensors)
    if digest:
        stored = StoredShards(path)
        try:
            if index_digest(path, content=False) != digest:
                raise _DamagedError(f"{path} has shards of another checkpoint")
            state[PREPARED] = stored.read() if shards else stored
        except CheckpointError as error:
            raise _DamagedError(str(error).removesuffix(ADVICE)) from error
    return state


def _read_state(file: Path) -> tuple[Any, int, dict[str, str], str]:
    """Return the state, and the size and checksums of the tensors and shards, from its file."""
    if not file.is_file():
        raise _DamagedError(f"{file} is missing, so {file.parent} is not a checkpoint")
    try:
        described = json.loads(read_plain(file).decode())
        if described["format"] != FORMAT:
            shown = str(described["format"])[:20]
            raise _DamagedError(f"{file} must have layout {FORMAT}, got {shown}")
        tree, sums = described["state"], described["sha256"]
        if _checksum(tree) != sums["state"]:
            raise _DamagedError(f"{file} was changed after it was written")
        return tree, described["bytes"], dict(sums["tensors"]), str(sums.get("shards", ""))
    except (OSError, ValueError, RecursionError) as error:  # a cut or binary file
        raise _DamagedError(f"{file} cannot be read: {error}") from error
    except (LookupError, TypeError) as error:
        raise _DamagedError(f"{file} is not the state of a narrowcast checkpoint") from error


def _checksum(tree: Any) -> str:
    return hashlib.sha256(json.dumps(tree).encode()).hexdigest()


@contextmanager
def _checksums(tensors: dict[str, Tensor]) -> Iterator[Callable[[], dict[str, str]]]:
    """Yield a function that returns each tensor's checksum, computed in other threads meanwhile.

    SHA-256 takes longer than the disk: 1.2 s for 1.4 GB where writing and syncing took 0.9 s.
    """
    with ThreadPoolExecutor(CHECKSUM_THREADS, "checksum") as threads:
        matched = threads.map(_tensor_checksum, tensors.values())
        yield lambda: dict(zip(tensors, matched, strict=True))


def _tensor_checksum(tensor: Tensor) -> str:
    digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)} ".encode())
    digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
