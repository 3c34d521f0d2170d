"""The inputs of passes, and the values in them that no product survives.

An infinity may be bad data or a mask. It is the cause only if a replay with zeros in its place
moves the first bad value.
"""

import contextlib
import copy
import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, is_dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from narrowcast.precision.plan.module_plan import (
    GRADIENTS,
    OPERANDS,
    ModulePlan,
    Role,
    multiplies,
    roundings,
)
from narrowcast.precision.plan.plan import Plan
from narrowcast.precision.swap import plain_class

SQUARE_ROOT = 2.0**64 * (1 - 2.0**-24)
"""The largest number whose square fp32 holds: Adam squares gradients."""
LARGEST_TO_FP16 = 65519.0
"""From 65520 up, rounding to fp16 gives infinity."""


@dataclass(frozen=True)
class Location:
    """A role of a module; the whole model is named by nothing."""

    module: str
    role: Role
    format: str = ""
    """In force there; nothing if no product is made."""

    @property
    def limit(self) -> float:
        """The largest magnitude that is not suspicious."""
        # What a product returns is in its format already, and infinite if it does not fit.
        cast_here = self.role in OPERANDS
        return LARGEST_TO_FP16 if cast_here and self.format == "fp16" else SQUARE_ROOT

    @property
    def in_backward(self) -> bool:
        return self.role in GRADIENTS

    def __str__(self) -> str:
        match self.role:
            case "batch":
                return "the batch"
            case "loss":
                return "the loss"
            case _:
                return f"{self.module or 'the model'} {self.role}"


class Formats:
    """The format in force at every place of a planned model."""

    def __init__(self, plan: Plan) -> None:
        self._plans: Mapping[str, ModulePlan] = {each.name: each for each in plan.modules}
        self._policy = plan.policy

    def location(self, module: str, role: Role) -> Location:
        return Location(module, role, self._format(module, role))

    def use_location(self, module: str) -> Location:
        """Return the location of the gradient that a module makes of a weight."""
        if module in self._plans:
            return self.location(module, "grad_weight")
        policy = self._policy.for_module(module)
        return Location(module, "grad_weight", roundings(policy, "grad_weight")[0])

    def holders(self, model: nn.Module) -> dict[nn.Parameter, str]:
        """Return the module of each weight; of those that share one, the first that multiplies."""
        results: dict[nn.Parameter, str] = {}
        for name, module in model.named_modules():
            for parameter in module.parameters(recurse=False):
                if parameter not in results or not self._multiplies(results[parameter]):
                    results[parameter] = (
                        name if self._multiplies(name) else results.get(parameter, name)
                    )
        return results

    def _multiplies(self, name: str) -> bool:
        module_plan = self._plans.get(name)
        return module_plan is not None and multiplies(module_plan.kind)

    def _format(self, module: str, role: Role) -> str:
        module_plan = self._plans.get(module)
        if module_plan is None:
            return ""
        # The first: what it cannot hold is where a number stops being finite.
        return roundings(module_plan.policy, role, kind=module_plan.kind)[0]


def written(value: float) -> str:
    """Write a magnitude with two digits: 7.1e4, 312."""
    if not math.isfinite(value):
        return "inf"
    if 1e-3 <= abs(value) < 1e4:
        return f"{value:.3g}"
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


Call = tuple[nn.Module, str, tuple[Any, ...], dict[str, Any]]
"""A module called from outside the model, its name, and its inputs."""


@dataclass(frozen=True, kw_only=True)
class Extreme:
    """The first number of a tensor that is not finite, or that fp32 cannot square."""

    holder: str
    """Who has the tensor, in words."""
    path: str
    """Where the tensor is, as one would write it: `batch['image']`."""
    index: tuple[int, ...]
    value: float
    count: int
    of: int
    """How many numbers of that tensor are such, of how many."""

    @property
    def where(self) -> str:
        """Where the number is: `batch['image'][17, 3]`."""
        return f"{self.path}[{', '.join(map(str, self.index))}]" if self.index else self.path

    @property
    def sample(self) -> int:
        """Its place along the first dimension, which samples share."""
        return self.index[0] if self.index else 0

    @property
    def describe(self) -> str:
        """Return which number it is, where, and how many there are."""
        what = written(self.value) if math.isfinite(self.value) else _name(self.value)
        return f"{self.holder} holds {what} at {self.where}, {self.count} of {self.of:,} values"


def find_extremes(batch: Any, calls: list[Call]) -> list[Extreme]:
    """Return values in the batch and in calls that no product survives. Synchronises."""
    inputs = [("the batch itself", path, tensor) for path, tensor in _tensors(batch, "batch")]
    inputs += [
        (_holder(name), path, tensor)
        for module, name, args, kwargs in calls
        for path, tensor in _arguments(module, args, kwargs)
    ]
    first = {id(tensor): (holder, path, tensor) for holder, path, tensor in reversed(inputs)}
    matches = [_find_extreme(*each) for each in reversed(first.values())]
    return [each for each in matches if each is not None]


def zeroed(batch: Any, extremes: Collection[Extreme]) -> Any:
    """Return a batch, however nested, with zeros in the place of such numbers of some tensors."""
    paths = {(each.holder, each.path) for each in extremes}
    named = {id(t) for path, t in _tensors(batch, "batch") if ("the batch itself", path) in paths}
    return _changed(batch, lambda tensor: _zeroed(tensor) if id(tensor) in named else tensor)


@contextlib.contextmanager
def arguments_zeroed(model: nn.Module, extremes: Collection[Extreme]) -> Iterator[None]:
    """Give zeros in the place of such numbers to modules that no other one calls."""
    paths, depth = {(each.holder, each.path) for each in extremes}, [0]

    def enter(name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        depth[0] += 1
        if depth[0] > 1:
            return None
        settings = _arguments(module, args, kwargs)
        named = {id(tensor) for path, tensor in settings if (_holder(name), path) in paths}
        return _changed((args, kwargs), lambda t: _zeroed(t) if id(t) in named else t)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        depth[0] -= 1

    handles: list[Any] = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(partial(enter, name), with_kwargs=True))
        handles.append(module.register_forward_hook(leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _holder(name: str) -> str:
    return f"what {name or 'the model'} is given"


def _arguments(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    for key, value in _by_name(module, args, kwargs).items():
        yield from _tensors(value, key)


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
    """Return whether a tensor is data: of real numbers, side by side, and made by no weight."""
    of_numbers = tensor.is_floating_point() and tensor.layout is torch.strided
    return of_numbers and (tensor.is_leaf or not tensor.requires_grad)


def _extremes(tensor: Tensor) -> Tensor:
    wide = tensor.float() if tensor.dtype.itemsize < 4 else tensor
    return ~(wide.abs() <= SQUARE_ROOT)


def _zeroed(tensor: Tensor) -> Tensor:
    if not _is_plain(tensor) or tensor.numel() == 0:
        return tensor
    return torch.where(_extremes(tensor), torch.zeros_like(tensor), tensor)


def _find_extreme(holder: str, path: str, tensor: Tensor) -> Extreme | None:
    if not _is_plain(tensor) or tensor.numel() == 0:
        return None
    result = _extremes(tensor.detach())
    count = int(result.sum())
    if not count:
        return None
    first = result.flatten().byte().argmax()  # of several that are largest, the first
    index = tuple(int(i) for i in torch.unravel_index(first, result.shape))
    return Extreme(
        holder=holder,
        path=path,
        index=index,
        value=float(tensor.detach()[index]),
        count=count,
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


def _name(value: float) -> str:
    if math.isnan(value):
        return "a NaN"
    return "an infinity" if value > 0 else "a negative infinity"
