"""Tensors inside what modules are given and return: tuples, lists and dicts of them."""

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a value with its tensors changed, those inside tuples, lists and dicts included."""
    if isinstance(value, Tensor):
        return change(value)
    if hasattr(value, "_fields") and isinstance(value, tuple):
        return type(value)(*(map_tensors(item, change) for item in value))  # a named one
    if isinstance(value, tuple | list):
        return type(value)([map_tensors(item, change) for item in value])
    if isinstance(value, MutableMapping):
        fresh = {key: map_tensors(item, change) for key, item in value.items()}
        if type(value) is dict:
            return fresh
        copied = copy.copy(value)  # a mapping that is more than a dict stays so
        for key, item in fresh.items():  # not by `update`, which outputs of transformers refuse
            copied[key] = item
        return copied
    return value


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Return a value with its floating-point tensors cast."""
    return map_tensors(value, lambda t: t.to(dtype) if t.is_floating_point() else t)


def cast_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with their floating-point tensors cast."""
    if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
        # What most layers are given, in every call of every one: a walk takes longer than a cast.
        x = args[0]
        return (x.to(dtype),) if x.is_floating_point() and x.dtype != dtype else args, kwargs
    cast: tuple[tuple[Any, ...], dict[str, Any]] = cast_floats((args, kwargs), dtype)
    return cast


def widen_floats(value: Any) -> Any:
    """Return a value with its tensors of 16 bits cast to fp32."""
    narrow = (torch.bfloat16, torch.float16)
    return map_tensors(value, lambda t: t.float() if t.dtype in narrow else t)


def first_float(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the first floating-point tensor among the arguments of a call."""
    if args and isinstance(args[0], Tensor) and args[0].is_floating_point():
        return args[0]
    return next((t for t in tensors_in((args, kwargs)) if t.is_floating_point()), None)


def cast_first_float(value: Any, dtype: torch.dtype) -> Any:
    """Cast the first floating-point tensor of a result; the rest is unchanged."""
    if isinstance(value, Tensor):
        return value if value.dtype == dtype or not value.is_floating_point() else value.to(dtype)
    first = next((t for t in tensors_in(value) if t.is_floating_point()), None)
    return map_tensors(value, lambda t: t.to(dtype) if t is first else t)


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


def copy_tensors(into: Any, source: Any) -> None:
    """Copy the tensors of one value into another of the same structure."""
    if isinstance(into, Tensor):
        into.copy_(source, non_blocking=True)
    elif isinstance(into, tuple | list):
        for mine, inputs in zip(into, source, strict=True):
            copy_tensors(mine, inputs)
    elif isinstance(into, Mapping):
        for key, mine in into.items():
            copy_tensors(mine, source[key])


def outline(value: Any) -> Any:
    """Return the structure of a value: shape and dtype for tensors, the rest unchanged."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, tuple | list):
        return [outline(item) for item in value]
    if isinstance(value, Mapping):
        return {key: outline(item) for key, item in value.items()}
    return value


def constants_in(value: Any) -> list[Any]:
    """Return the leaves of a value that are not tensors, such as numbers and strings."""
    if isinstance(value, Tensor):
        return []
    if isinstance(value, tuple | list):
        return [constant for item in value for constant in constants_in(item)]
    if isinstance(value, Mapping):
        return [constant for item in value.values() for constant in constants_in(item)]
    return [value]


def leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a value with their paths, including container types."""
    if isinstance(value, Mapping):
        yield name, type(value)
        for key, item in value.items():
            yield from leaves(item, f"{name}[{key!r}]")
    elif isinstance(value, tuple | list) and not isinstance(value, torch.Size):
        yield name, type(value)
        for i, item in enumerate(value):
            yield from leaves(item, f"{name}[{i}]")
    else:
        yield name, value
