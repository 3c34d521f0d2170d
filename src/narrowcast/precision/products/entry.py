"""How modules come to compute in their formats, whoever calls them and from where.

A module that finds its region in force computes as it is: `compute()` has entered that of the
model, and modules that are an exception that of what is inside them. Any other enters its own: a
module that is an exception, and one that is called by itself, outside its model's passes (to
evaluate, to generate, one encoder of two, in the middle of another model's pass).
"""

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FunctionType, TracebackType
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn

from narrowcast.precision.nested import widen_floats
from narrowcast.precision.products.in_force import in_force, put_in_force
from narrowcast.precision.products.regions import Region
from narrowcast.precision.swap import Transparent


class PassListener(Protocol):
    """Is told where the passes of a model begin and end."""

    def begin_pass(self) -> None:
        """Take note that a pass begins."""

    def end_pass(self) -> None:
        """Take note that it has ended."""


LOAD = "nc_load"
"""What a weight has that can keep more digits of a value than it holds itself: takes the value."""
_CAST = ("'bf16'", "'fp16'")
"""Found in the names of regions inside which torch's autocast is on."""


@final
class PreparedModel:
    """What all regions of one prepared model have in common."""

    def __init__(self, model: nn.Module) -> None:
        self.name = f"{id(model):x}"
        """The same for as long as the model is there, whatever its formats become."""
        self._listener: weakref.ref[PassListener] | None = None

    def tell(self, listener: PassListener) -> None:
        """Tell somebody of this model's passes, for as long as others hold it."""
        self._listener = weakref.ref(listener)

    @property
    def listener(self) -> PassListener | None:
        """Who is told of passes."""
        return None if self._listener is None else self._listener()


@final
@dataclass(frozen=True)
class Entry:
    """A region of one prepared model."""

    region: Region
    model: PreparedModel
    name: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", f"{self.model.name} {self.region}")

    @property
    def is_on_an_island(self) -> bool:
        """Whether a region of this model is in force, and its autocast switched off by somebody."""
        around = in_force() or ""
        inside = around.startswith(self.model.name) and any(name in around for name in _CAST)
        return inside and not torch.is_autocast_enabled(self.region.device_type)


class InRegion(Transparent):
    """A module of a prepared model, which finds its region in force or enters it."""

    nc_entry: Entry
    nc_begins: bool = False
    """Whether its region is another than that around it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, inside its region."""
        if in_force() == self.nc_entry.name or self.nc_entry.is_on_an_island:
            return super().forward(*args, **kwargs)
        return self._nc_enter(super().forward, args, kwargs)

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a state, and of weights that are kept in fewer bits what these cannot hold."""
        result = super().load_state_dict(state_dict, *args, **kwargs)
        for name, weight in self.named_parameters(remove_duplicate=False):
            load, value = vars(weight).get(LOAD), state_dict.get(name)
            if load is not None and isinstance(value, Tensor):
                load(value)
        return result

    def extra_repr(self) -> str:
        """Say the format where the model is printed."""
        own = f"in {self.nc_entry.region.format_name}" if self.nc_begins else ""
        return ", ".join(filter(None, [super().extra_repr(), own]))

    def _nc_enter(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.nc_entry.region.is_plain and not _has_16_bits(self):
            args, kwargs = widen_floats((args, kwargs))
        if torch.compiler.is_compiling():
            return self._nc_compiled(call, args, kwargs)
        with Pass(self.nc_entry):
            return call(*args, **kwargs)

    def _nc_compiled(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        around = in_force()
        put_in_force(self.nc_entry.name)
        try:
            with self.nc_entry.region.autocast():
                return self._nc_inside(call, args, kwargs)
        finally:
            put_in_force(around)

    def _nc_inside(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        # On its own, because torch.compile cannot trace one context inside another in one function.
        with self.nc_entry.region.products():
            return call(*args, **kwargs)

    @classmethod
    def nc_namespace(cls, plain: type[nn.Module]) -> dict[str, Any]:
        """Let every way into the module that is its own enter the region, `encode` as `forward`."""
        return {name: _entering(function) for name, function in _ways_in(plain)}


def _has_16_bits(module: nn.Module) -> bool:
    """Say whether somebody who does not train it gave a module weights that want narrow inputs."""
    return any(p.dtype in (torch.bfloat16, torch.float16) for p in module.parameters())


@final
class Pass:
    """Puts a region in force, whatever is around: hold it over forward passes and their loss."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry

    def __enter__(self) -> None:
        """Put the region in the place of the one around it, which may be a native one."""
        self._around = in_force()
        put_in_force(self._entry.name)
        self._region = self._entry.region()
        self._region.__enter__()
        if (listener := self._listener) is not None:
            listener.begin_pass()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Put back what was in force before."""
        if (listener := self._listener) is not None:
            listener.end_pass()
        self._region.__exit__(kind, error, traceback)
        put_in_force(self._around)

    @property
    def _listener(self) -> PassListener | None:
        """Who is to be told; nobody where a pass of this model is under way already."""
        around, model = self._around or "", self._entry.model
        return None if around.startswith(model.name) else model.listener


def entry_of(model: nn.Module) -> Entry:
    """Return the region of a prepared model."""
    assert isinstance(model, InRegion)
    return model.nc_entry


def _ways_in(plain: type[nn.Module]) -> Iterator[tuple[str, FunctionType]]:
    """Yield the public methods of a class that are not every module's."""
    for name in dir(plain):
        function = inspect.getattr_static(plain, name)
        if name.startswith("_") or hasattr(nn.Module, name):
            continue
        # What a generator does, it does after it was returned.
        if isinstance(function, FunctionType) and not inspect.isgeneratorfunction(function):
            yield name, function


def _entering(function: FunctionType) -> Any:
    @functools.wraps(function)
    def method(self: InRegion, *args: Any, **kwargs: Any) -> Any:
        if in_force() == self.nc_entry.name:
            return function(self, *args, **kwargs)
        return self._nc_enter(functools.partial(function, self), args, kwargs)

    return method
