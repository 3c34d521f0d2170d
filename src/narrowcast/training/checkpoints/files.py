"""Files and folders that are whole or absent, whatever moment the machine stops at."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from narrowcast.errors import CheckpointError
from narrowcast.runs.writing import explain_write_error, sync_folder


def write_tensors(path: Path, tensors: dict[str, Tensor], *, metadata: dict[str, str]) -> None:
    """Write a safetensors file that outlasts a power cut; a full disk raises `OSError`.

    The tensors are on the CPU, contiguous, and no two of them share memory.
    """
    try:
        save_file(tensors, path, metadata=metadata)
    except SafetensorError as error:  # what its Rust part makes of a full disk
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]) if number else 0, str(error)) from error
    _sync(path)


def write_text(path: Path, text: str) -> None:
    """Write a text file that outlasts a power cut."""
    path.write_text(text, encoding="utf-8")
    _sync(path)


@contextmanager
def written_beside(path: Path, *, hint: str) -> Iterator[Path]:
    """Give a name beside `path` to write a file or folder at; put it at `path` once it is whole.

    What was at `path` is replaced. If writing fails, `path` is as it was, nothing is left beside
    it, and a `CheckpointError` ends with `hint`. Leftovers of a process that was killed while it
    wrote `path` are removed.
    """
    beside = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        for other in path.parent.iterdir() if path.parent.is_dir() else ():
            if other.name.startswith(f"{path.name}.tmp-"):
                remove(other)
        yield beside
        if beside.is_dir():
            sync_folder(beside)
            remove(path)  # a rename replaces a file, but no folder that has something in it
        beside.rename(path)
        sync_folder(path.parent)
    except OSError as error:
        reason = explain_write_error(error)
        raise CheckpointError(f"{path} could not be written: {reason}; {hint}") from error
    finally:
        remove(beside)


def remove(path: Path) -> None:
    """Remove a file or a folder if it is there; a folder half removed never bears its own name."""
    if path.is_dir():
        doomed = path.with_name(f"{path.name}.tmp-removed")
        path.rename(doomed)
        rmtree(doomed)
    elif path.exists():
        path.unlink()


def _sync(path: Path) -> None:
    """Wait until the bytes of a file are on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
