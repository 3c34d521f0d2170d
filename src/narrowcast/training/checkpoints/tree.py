"""A nested state (dicts, lists, tuples, tensors, plain values) as one JSON value and named tensors.

JSON alone would turn a tuple into a list, the key 3 into "3", and has no infinities. What JSON
lacks is an object with one key that starts with `$`.
"""

import math
from typing import Any

from torch import Tensor


def flatten(state: Any, *, copied: bool = False) -> tuple[Any, dict[str, Tensor]]:
    """Return `state` with names in place of tensors, and the tensors by name, on the CPU.

    Tensors that share memory are stored once. With `copied`, no tensor is that of the state, which
    may then change. Synchronises.
    """
    stored = _SavedTensors(copied=copied)
    return _flatten(state, stored, path=()), stored.tensors


def unflatten(tree: Any, tensors: dict[str, Tensor]) -> Any:
    """Return the state that `flatten` was given; raise ValueError for any other tree."""
    try:
        return _unflatten(tree, tensors)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _unflatten(tree: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(tree, list):
        return [_unflatten(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    match list(tree.items()):
        case [("$tensor", str(name))]:
            if name not in tensors:
                raise ValueError(f"there is no tensor {name}")
            return tensors[name]
        case [("$float", str(text))] if text in _FLOATS:
            return float(text)
        case [("$tuple", list(items))]:
            return tuple(_unflatten(item, tensors) for item in items)
        case [("$dict", list(items))]:
            return dict(_item(item, tensors) for item in items)
    if strange := [key for key in tree if key.startswith("$")]:
        raise ValueError(f"{strange[0]} is not valid there")
    return {key: _unflatten(value, tensors) for key, value in tree.items()}


_FLOATS = ("inf", "-inf", "nan")


def _item(item: Any, tensors: dict[str, Tensor]) -> tuple[str | int, Any]:
    match item:
        case [(str() | int()) as key, value]:
            return key, _unflatten(value, tensors)
    raise ValueError("$dict has an entry that is not a key with a value")


class _SavedTensors:
    """The tensors so far, each memory once and under its own name."""

    def __init__(self, *, copied: bool) -> None:
        self._copied = copied
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[tuple[object, ...], str] = {}
        self._storages: set[int] = set()

    def unique_name(self, tensor: Tensor, path: tuple[object, ...]) -> str:
        memory = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and memory in self._names:
            return self._names[memory]
        name = "/".join(str(key) for key in path)
        # Taken by the key 3 when this is the key "3" of one dict; or a word of safetensors' own.
        while name in self.tensors or name in ("", "__metadata__"):
            name += "'"
        copy = tensor.detach().cpu().contiguous()
        storage = copy.untyped_storage().data_ptr()
        own = not self._copied or storage != tensor.untyped_storage().data_ptr()
        if storage in self._storages or not own:  # part of the same memory: a file has no views
            copy = copy.clone()
        self._storages.add(storage)
        self.tensors[name] = copy
        self._names[memory] = name
        return name


def _flatten(state: Any, saved: _SavedTensors, path: tuple[object, ...]) -> Any:
    match state:
        case None | bool() | str() | int():
            return state
        case float():
            return float(state) if math.isfinite(state) else {"$float": str(float(state))}
        case Tensor():
            return {"$tensor": saved.unique_name(state, path)}
        case list():
            return [_flatten(item, saved, (*path, i)) for i, item in enumerate(state)]
        case tuple():
            return {"$tuple": [_flatten(item, saved, (*path, i)) for i, item in enumerate(state)]}
        case dict():
            items = [
                (_checked_key(key, path), _flatten(value, saved, (*path, key)))
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
