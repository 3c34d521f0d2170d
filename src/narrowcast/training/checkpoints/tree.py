"""A nested state as one JSON value and named tensors.

What JSON lacks (tuples, keys that are numbers, inf) is an object with one key that starts with `$`.
"""

import json
import math
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from narrowcast.errors import UnsupportedError
from narrowcast.runs.writing import sync_file

CHECKSUM_THREADS = 2
"""Threads that compute SHA-256 beside training; with one per core, training waits for them."""
GetName = Callable[[Tensor, tuple[object, ...]], str]
"""Returns a name for the tensor at a path in a state."""


def flatten(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return `state` with names in place of tensors, and the tensors by name, where they are.

    Tensors of the same memory and shape are there once.
    """
    stored = _SavedTensors()
    return flatten_named(state, stored.unique_name), stored.tensors


def flatten_named(state: Any, get_name: GetName) -> Any:
    """Return `state` with names in place of tensors, each the name that `get_name` returns."""
    return _flatten(state, get_name, path=())


def unflatten(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the state that `flatten` was given."""
    if isinstance(tree, list):
        return [unflatten(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    match list(tree.items()):
        case [("$tensor", name)]:
            return tensors[name]
        case [("$float", text)]:
            return float(text)
        case [("$tuple", items)]:
            return tuple(unflatten(item, tensors) for item in items)
        case [("$dict", items)]:
            return {key: unflatten(value, tensors) for key, value in items}
    return {key: unflatten(value, tensors) for key, value in tree.items()}


def joined_name(path: tuple[object, ...], taken: Container[str]) -> str:
    """Return a name for the tensor at `path` that no other has."""
    name = "/".join(str(key) for key in path)
    # Taken by the key 3 when this is the key "3" of one dict; or a word of safetensors' own.
    while name in taken or name in ("", "__metadata__"):
        name += "'"
    return name


class _SavedTensors:
    """The tensors so far, each memory once and under its own name."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[tuple[object, ...], str] = {}

    def unique_name(self, tensor: Tensor, path: tuple[object, ...]) -> str:
        memory = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and memory in self._names:
            return self._names[memory]
        name = joined_name(path, self.tensors)
        self.tensors[name] = tensor.detach()
        self._names[memory] = name
        return name


def _flatten(state: Any, get_name: GetName, path: tuple[object, ...]) -> Any:
    match state:
        case None | bool() | str() | int():
            return state
        case float():
            return float(state) if math.isfinite(state) else {"$float": str(float(state))}
        case Tensor():
            return {"$tensor": get_name(state, path)}
        case list():
            return [_flatten(item, get_name, (*path, i)) for i, item in enumerate(state)]
        case tuple():
            return {
                "$tuple": [_flatten(item, get_name, (*path, i)) for i, item in enumerate(state)]
            }
        case dict():
            items = [
                (_checked_key(key, path), _flatten(value, get_name, (*path, key)))
                for key, value in state.items()
            ]
            if all(isinstance(key, str) and not key.startswith("$") for key, _ in items):
                return dict(items)
            return {"$dict": [list(item) for item in items]}
        case _:
            where = "/".join(str(key) for key in path)
            raise TypeError(f"{where}: a checkpoint cannot hold a {type(state).__name__}")


def _checked_key(key: Any, path: tuple[object, ...]) -> str | int:
    if isinstance(key, str | int):
        return key
    where = "/".join(str(part) for part in path)
    raise TypeError(f"{where}: a checkpoint cannot hold a dict with a {type(key).__name__} as key")


_SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def tensor_file_header(
    outline: Mapping[str, tuple[torch.dtype, torch.Size]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Return how a safetensors file begins, before the values of its tensors in this order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    for name, (dtype, shape) in outline.items():
        if dtype not in _SAFETENSORS_DTYPES:
            raise UnsupportedError(
                f"{name} must have a dtype that safetensors has, got {dtype}. Cast it first."
            )
        begin, end = end, end + shape.numel() * dtype.itemsize
        kind, offsets = _SAFETENSORS_DTYPES[dtype], [begin, end]
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_tensors(path: Path, tensors: dict[str, Tensor], *, metadata: dict[str, str]) -> None:
    """Write and sync a safetensors file of contiguous CPU tensors; a full disk raises `OSError`.

    `safetensors` holds Python's lock while it writes, which would stop training meanwhile.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))  # aligned
    outline = {name: (tensors[name].dtype, tensors[name].shape) for name in order}
    with path.open("wb") as file:
        file.write(tensor_file_header(outline, metadata))
        for name in order:
            file.write(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    sync_file(path)
