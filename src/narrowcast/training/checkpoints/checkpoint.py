"""Checkpoints: the whole state of a run at one step, never torn, never unpickled.

A checkpoint is a folder, `step-000100`, with the tensors in `tensors.safetensors` and everything
else in `state.json`, which also holds the size and the checksum of both. It is written under
another name, forced to the disk and renamed, so that a folder of that name is always whole; older
ones are removed only after that.
"""

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from narrowcast.errors import CheckpointError
from narrowcast.runs.records import CheckpointRecord
from narrowcast.runs.writing import remove, write_text, written_beside
from narrowcast.training.checkpoints.tensor_file import write_tensors
from narrowcast.training.checkpoints.tree import flatten, unflatten

FORMAT = 1
"""The version of the layout; a reader refuses any other."""
TENSORS = "tensors.safetensors"
STATE = "state.json"


def save_checkpoint(
    folder: Path, step: int, *, state: dict[str, Any], keep: int = 2
) -> CheckpointRecord:
    """Write `state` as the checkpoint of `step` in `folder`, then remove all but the `keep` newest.

    If it cannot be written, the older checkpoints are untouched and `CheckpointError` says which
    of them to go on from.
    """
    began = time.perf_counter()
    path = folder / f"step-{step:06d}"
    tree, tensors = flatten(state)
    last = latest(folder)
    hint = f"{last} is untouched, resume from it" if last else "there is no earlier checkpoint"
    with written_beside(path, hint=hint) as beside, _checksums(tensors) as checksums:
        _make_ready(folder)
        beside.mkdir()
        write_tensors(beside / TENSORS, tensors, metadata={"step": str(step)})
        described = {
            "format": FORMAT,
            "step": step,
            "bytes": (beside / TENSORS).stat().st_size,
            "sha256": {"state": _checksum(tree), "tensors": checksums()},
            "state": tree,
        }
        write_text(beside / STATE, json.dumps(described))
    _remove_others(folder, step, keep=keep)
    size = sum(file.stat().st_size for file in path.iterdir())
    seconds = time.perf_counter() - began
    return CheckpointRecord(step=step, seconds_blocked=seconds, seconds_total=seconds, bytes=size)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Return the state saved in `path`, its tensors on the CPU, after checking that it is whole.

    A checkpoint that is not raises `CheckpointError`, which names the file and the newest older
    checkpoint that is whole.
    """
    try:
        return _load(path)
    except _DamagedError as damage:
        older = _newest_whole(path.parent, before=path)
        advice = (
            f"{older.name} is whole: remove {path} and resume from that one"
            if older
            else "there is no older one that is whole: start the run again"
        )
        raise CheckpointError(f"{damage}; {advice}") from damage


def checkpoints(folder: Path) -> list[Path]:
    """Return the finished checkpoints in `folder`, oldest first."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted((path for path in found if _NAME.fullmatch(path.name)), key=step_of)


def latest(folder: Path) -> Path | None:
    """Return the newest finished checkpoint in `folder`."""
    return next(reversed(checkpoints(folder)), None)


def step_of(path: Path) -> int:
    """Return the step a checkpoint's name says it was saved at."""
    return int(path.name.removeprefix("step-"))


_NAME = re.compile(r"step-\d+")


class _DamagedError(Exception):
    """What is wrong with which file."""


def _make_ready(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for path in list(folder.iterdir()):
        if ".tmp-" in path.name:  # left by a run that was killed while it wrote or removed it
            rmtree(path)


def _remove_others(folder: Path, step: int, *, keep: int) -> None:
    """Remove all but the `keep` newest up to `step`, and those of a course the run has left."""
    upto = [path for path in checkpoints(folder) if step_of(path) <= step]
    for path in set(checkpoints(folder)) - set(upto[-keep:]):
        remove(path)


def _newest_whole(folder: Path, *, before: Path) -> Path | None:
    """Return the newest checkpoint older than `before` that can be loaded."""
    if not _NAME.fullmatch(before.name):
        return None
    for path in reversed(checkpoints(folder)):
        if step_of(path) < step_of(before):
            try:
                _load(path)
            except _DamagedError:
                continue
            return path
    return None


def _load(path: Path) -> dict[str, Any]:
    described = _read_state(path / STATE)
    file = path / TENSORS
    if not file.is_file():
        raise _DamagedError(f"{file} is missing")
    if (size := file.stat().st_size) != described["bytes"]:
        raise _DamagedError(f"{file} has {size} bytes where {described['bytes']} were written")
    try:
        tensors = load_file(file)
    except SafetensorError as error:
        raise _DamagedError(f"{file} is not readable: {error}") from error
    expected = described["sha256"]["tensors"]
    with _checksums(tensors) as checksums:
        found = checksums()
    if changed := sorted(name for name in expected if found.get(name) != expected[name]):
        raise _DamagedError(f"{file} has other values of {changed[0]} than were written")
    state = unflatten(described["state"], tensors)
    assert isinstance(state, dict)
    return state


def _read_state(file: Path) -> dict[str, Any]:
    """Return what `state.json` holds, once its own checksum agrees."""
    if not file.is_file():
        raise _DamagedError(f"{file} is missing, so {file.parent} is no checkpoint")
    try:
        described = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # a cut or binary file: JSONDecodeError, UnicodeDecodeError
        raise _DamagedError(f"{file} is not readable: {error}") from error
    if not isinstance(described, dict) or not {"format", "state", "sha256"} <= described.keys():
        raise _DamagedError(f"{file} is not the state of a narrowcast checkpoint")
    if described["format"] != FORMAT:
        raise _DamagedError(
            f"{file} has layout {described['format']}, this version reads layout {FORMAT}"
        )
    if _checksum(described["state"]) != described["sha256"]["state"]:
        raise _DamagedError(f"{file} has other values than were written")
    return described


def _checksum(tree: Any) -> str:
    return hashlib.sha256(json.dumps(tree).encode()).hexdigest()


@contextmanager
def _checksums(tensors: dict[str, Tensor]) -> Iterator[Callable[[], dict[str, str]]]:
    """Give a function that returns the checksum of each tensor; other threads work on it meanwhile.

    SHA-256 takes longer than the disk: 1.2 s for 1.4 GB where writing and syncing took 0.9 s.
    """
    with ThreadPoolExecutor(thread_name_prefix="checksum") as threads:
        found = threads.map(_tensor_checksum, tensors.values())
        yield lambda: dict(zip(tensors, found, strict=True))


def _tensor_checksum(tensor: Tensor) -> str:
    digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)} ".encode())
    digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
