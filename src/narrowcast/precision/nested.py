"""Tensors inside what modules are given and return: tuples, lists and dicts of them."""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def changed_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a value with its tensors changed, those inside tuples, lists and dicts included."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and type(value) not in (tuple, torch.Size):
        return type(value)(*(changed_tensors(item, change) for item in value))  # a named one
    if isinstance(value, tuple | list):
        return type(value)([changed_tensors(item, change) for item in value])
    if isinstance(value, dict):
        fresh = {key: changed_tensors(item, change) for key, item in value.items()}
        if type(value) is dict:
            return fresh
        copied = copy.copy(value)  # a dict that is more than one stays so
        copied.update(fresh)
        return copied
    return value


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Return a value with its floating-point tensors cast."""
    return changed_tensors(value, lambda t: t.to(dtype) if t.is_floating_point() else t)


def first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the first tensor among the arguments of a call."""
    return next(v for v in (*args, *kwargs.values()) if isinstance(v, Tensor))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value, those inside tuples, lists and mappings included."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
