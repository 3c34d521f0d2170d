"""A safetensors file that is whole on the disk when it has been written."""

import re
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from narrowcast.runs.writing import sync_file


def write_tensors(path: Path, tensors: dict[str, Tensor], *, metadata: dict[str, str]) -> None:
    """Write and sync a safetensors file of contiguous CPU tensors; a full disk raises `OSError`."""
    try:
        save_file(tensors, path, metadata=metadata)
    except SafetensorError as error:  # what its Rust part makes of a full disk
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]) if number else 0, str(error)) from error
    sync_file(path)
