"""What passes are given, and what in it no product survives.

An infinity in a batch may be data gone bad, or a mask that means what it says. A second take of the
passes tells them apart, in which all such numbers are zero: only where that moves the first bad
number were they its cause.
"""

import contextlib
import copy
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, is_dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from narrowcast.health.diagnose.places import SQUARE_ROOT, written
from narrowcast.precision.swap import plain_class

Call = tuple[nn.Module, str, tuple[Any, ...], dict[str, Any]]
"""A module that no other one called, its name, and what it was given."""


@dataclass(frozen=True, kw_only=True)
class Extreme:
    """The first number of a tensor that is not finite, or that fp32 cannot square."""

    where: str
    """As one would write it: `batch["image"][17, 3]`."""
    value: float
    sample: int
    """Its place along the first dimension, which samples share."""
    count: int
    of: int
    """How many numbers of that tensor are such, of how many."""
    holder: str = "the batch itself"

    @property
    def told(self) -> str:
        """Say which number it is, where, and how many there are."""
        what = written(self.value) if math.isfinite(self.value) else _names(self.value)
        return f"{what} at {self.where}, {self.count} of {self.of:,} values"


def first_extreme(value: Any, name: str) -> Extreme | None:
    """Return the first such number in a value, however nested. Waits for the device."""
    return next(filter(None, (_extreme_of(t, path) for path, t in _tensors(value, name))), None)


def first_argument(calls: list[Call]) -> Extreme | None:
    """Return the first such number that a module was called with from outside."""
    for module, name, args, kwargs in calls:
        for key, value in _by_name(module, args, kwargs).items():
            found = first_extreme(value, key)
            if found is not None:
                return replace(found, holder=f"what {name or 'the model'} is given")
    return None


def zeroed(value: Any) -> Any:
    """Return a value, however nested, with zeros in the place of such numbers."""
    return _changed(value, _zeroed)


@contextlib.contextmanager
def arguments_zeroed(model: nn.Module) -> Iterator[None]:
    """Let modules that no other calls be given zeros in the place of such numbers."""
    depth = [0]

    def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        depth[0] += 1
        return zeroed((args, kwargs)) if depth[0] == 1 else None

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        depth[0] -= 1

    handles: list[Any] = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(module.register_forward_hook(leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _tensors(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, f"{path}[{key!r}]")
    elif isinstance(value, tuple | list):
        for i, item in enumerate(value):
            yield from _tensors(item, f"{path}[{i}]")
    elif _has_fields(value):
        for key, item in vars(value).items():
            yield from _tensors(item, f"{path}.{key}")


def _changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and type(value) not in (tuple, torch.Size):
        return type(value)(*(_changed(item, change) for item in value))  # a named one
    if isinstance(value, tuple | list):
        return type(value)([_changed(item, change) for item in value])
    if isinstance(value, MutableMapping):
        copied = copy.copy(value)
        copied.update({key: _changed(item, change) for key, item in value.items()})
        return copied
    if _has_fields(value):
        copied = copy.copy(value)
        for key, item in vars(value).items():
            object.__setattr__(copied, key, _changed(item, change))
        return copied
    return value


def _has_fields(value: Any) -> bool:
    of_fields = is_dataclass(value) or isinstance(value, SimpleNamespace)
    return of_fields and not isinstance(value, type) and hasattr(value, "__dict__")


def _is_plain(tensor: Tensor) -> bool:
    """Say whether a tensor is data: of real numbers, and made by no weight."""
    return tensor.is_floating_point() and not tensor.requires_grad and not tensor.is_sparse


def _extremes(tensor: Tensor) -> Tensor:
    wide = tensor.float() if tensor.dtype.itemsize < 4 else tensor
    return ~(wide.abs() <= SQUARE_ROOT)


def _zeroed(tensor: Tensor) -> Tensor:
    if not _is_plain(tensor) or tensor.numel() == 0:
        return tensor
    return torch.where(_extremes(tensor), torch.zeros_like(tensor), tensor)


def _extreme_of(tensor: Tensor, path: str) -> Extreme | None:
    if not _is_plain(tensor) or tensor.numel() == 0:
        return None
    found = _extremes(tensor.detach()).nonzero()
    if not len(found):
        return None
    index = found[0].tolist()
    at = f"[{', '.join(map(str, index))}]" if index else ""
    return Extreme(
        where=path + at,
        value=float(tensor.detach()[tuple(index)]),
        sample=index[0] if index else 0,
        count=len(found),
        of=tensor.numel(),
    )


def _by_name(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return what a module was given, by the names of its parameters."""
    try:
        plain = plain_class(module).forward
        bound = inspect.signature(plain).bind(module, *args, **kwargs)
        return dict(list(bound.arguments.items())[1:])
    except (TypeError, ValueError):  # as a forward written in C has no signature
        return {**{str(i): value for i, value in enumerate(args)}, **kwargs}


def _names(value: float) -> str:
    if math.isnan(value):
        return "a NaN"
    return "an infinity" if value > 0 else "a negative infinity"
