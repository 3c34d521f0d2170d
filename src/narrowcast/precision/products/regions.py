"""Regions: the format of products that no module of ours makes, and how modules enter theirs.

Attention, `@`, einsum, convolutions and recurrent layers are reached through a region around the
forward pass. A native region is torch's autocast. An emulated one is a function mode inside it,
which `torch.compile` traces through; `torch.autocast(enabled=False)` inside gives plain torch.

A module enters its own region unless that is active: as an exception of the policy, or when it is
called outside its model's passes (to evaluate, to generate, in another model's pass).
"""

import contextlib
import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FunctionType, TracebackType
from typing import Any, Protocol, final

import torch
from torch import nn

from narrowcast.numerics import plain_format
from narrowcast.precision.nested import widen_floats
from narrowcast.precision.plan.plan import Plan
from narrowcast.precision.products.autocast import active_region, set_active_region
from narrowcast.precision.products.emulated import TRACED_RIGHTLY
from narrowcast.precision.products.modes import EmulatedProducts, RoundedReductions
from narrowcast.precision.swap import Transparent


@dataclass(frozen=True)
class Region:
    """A format for functional products, and whether the device multiplies it or we emulate it."""

    format_name: str
    emulated: bool
    device_type: str
    reduce: str = "fp32"
    """The format of sums, softmax and losses."""

    @classmethod
    def of(cls, plan: Plan) -> "Region":
        """Return the region of a whole planned model."""
        device_type = torch.device(plan.hardware.device).type
        return cls(plan.policy.functional, plan.emulated, device_type, plan.policy.reduce)

    def __call__(self) -> contextlib.AbstractContextManager[Any]:
        """Enter the region, in place of any around it: hold it over a forward pass and its loss."""
        more = self.emulated or self.reduce != "fp32" or self.format_name == "tf32"
        return _entered(self) if more else self.autocast()

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Enter torch's autocast of this region, if its format has 16 bits."""
        dtype = plain_format(self.format_name).dtype if self.is_of_16_bits else None
        return torch.autocast(self.device_type, dtype=dtype, enabled=self.is_of_16_bits)

    def products(self) -> contextlib.AbstractContextManager[Any]:
        """Enter the region without its autocast, which backward passes do not have."""
        heeded = self.device_type if self.is_of_16_bits else None
        context: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self.emulated:
            context = EmulatedProducts(plain_format(self.format_name), autocast=heeded)
        elif self.format_name == "tf32":
            context = tf32_products()
        if self.reduce == "fp32":
            return context
        stack = contextlib.ExitStack()
        stack.enter_context(context)
        stack.enter_context(RoundedReductions(plain_format(self.reduce), autocast=heeded))
        return stack

    @property
    def is_plain(self) -> bool:
        """True if products are plain fp32 products of the device."""
        return self.format_name == "fp32" and not self.emulated

    @property
    def is_of_16_bits(self) -> bool:
        """Whether torch's autocast is on inside, and off only on an island."""
        return self.format_name in ("bf16", "fp16")

    @property
    def is_native_16_bits(self) -> bool:
        """Whether what leaves its products is of 16 bits, and not of fp32 with as few digits."""
        return self.is_of_16_bits and not self.emulated


@contextlib.contextmanager
def _entered(region: Region) -> Iterator[None]:
    with region.autocast(), region.products():
        if torch.compiler.is_compiling() or not TRACED_RIGHTLY:
            yield
            return
        with _backward_without_autocast():
            yield


@contextlib.contextmanager
def _backward_without_autocast() -> Iterator[None]:
    """Compile backward passes in the block without autocast.

    By default they inherit it, and gradients of emulated products would be native ones.
    """
    config = torch._functorch.config
    before = config.backward_pass_autocast
    config.backward_pass_autocast = "off"
    try:
        yield
    finally:
        config.backward_pass_autocast = before


@contextlib.contextmanager
def tf32_products() -> Iterator[None]:
    """Run fp32 products on NVIDIA GPUs in tf32 inside the block."""
    switches: list[Any] = [
        torch.backends.cuda.matmul,
        torch.backends.cudnn.conv,  # type: ignore[attr-defined]
    ]
    before = [switch.fp32_precision for switch in switches]
    for switch in switches:
        switch.fp32_precision = "tf32"
    try:
        yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.fp32_precision = value


class PassListener(Protocol):
    """Receives the beginning and end of each pass of a model."""

    def begin_pass(self) -> None:
        """Take note that a pass begins."""

    def end_pass(self) -> None:
        """Take note that it has ended."""


_CAST = "cast "
"""In the names of regions inside which torch's autocast is on."""


@final
class PreparedModel:
    """What all regions of one prepared model have in common."""

    def __init__(self, model: nn.Module) -> None:
        self.name = f"{id(model):x} "
        """Begins the names of its regions; the same for as long as the model is there."""
        self._listener: weakref.ref[PassListener] | None = None

    def tell(self, listener: PassListener) -> None:
        """Notify a listener of this model's passes, by a weak reference."""
        self._listener = weakref.ref(listener)

    @property
    def listener(self) -> PassListener | None:
        """The listener for passes."""
        return None if self._listener is None else self._listener()


@final
@dataclass(frozen=True)
class RegionEntry:
    """A region of one prepared model."""

    region: Region
    model: PreparedModel
    name: str = field(init=False)

    def __post_init__(self) -> None:
        cast = _CAST if self.region.is_of_16_bits else ""
        object.__setattr__(self, "name", f"{self.model.name}{cast}{self.region}")

    @property
    def is_autocast_disabled(self) -> bool:
        """Whether a region of this model is active while autocast was disabled inside it."""
        around = active_region()
        if around is None:
            # Activation checkpointing computes again in a thread of its own, and has put autocast
            # there back to what it was; a backward pass of somebody's own knows of no autocast.
            inside = self.region.is_of_16_bits and _is_in_backward() and _is_in_inner_autocast()
        else:
            inside = around.startswith(self.model.name + _CAST)
        return inside and not torch.is_autocast_enabled(self.region.device_type)


class InRegion(Transparent):
    """A module of a prepared model, which finds its region in force or enters it."""

    nc_entry: RegionEntry
    nc_begins: bool = False
    """Whether its region is another than that around it."""
    nc_widens: bool = False
    """Whether its results stay in fp32, because of neighbouring fp32 weights."""
    nc_is_model: bool = False
    """Whether it is the prepared model itself."""
    nc_narrow: bool = False
    """Whether it has frozen 16-bit weights, which need 16-bit inputs."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, inside its region."""
        if active_region() != self.nc_entry.name and not self.nc_entry.is_autocast_disabled:
            return self._nc_enter(super().forward, args, kwargs)
        if self.nc_is_model and not torch.compiler.is_compiling():
            return self._nc_annotate(super().forward, args, kwargs)
        return super().forward(*args, **kwargs)

    def extra_repr(self) -> str:
        """Return the format for `print(model)`."""
        own = f"in {self.nc_entry.region.format_name}" if self.nc_begins else ""
        return ", ".join(filter(None, [super().extra_repr(), own]))

    def _nc_enter(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.nc_entry.region.is_plain and not self.nc_narrow:
            args, kwargs = widen_floats((args, kwargs))
        if torch.compiler.is_compiling():
            result = self._nc_compiled(call, args, kwargs)
        else:
            with Pass(self.nc_entry):
                result = call(*args, **kwargs)
        return widen_floats(result) if self.nc_widens else result

    def _nc_annotate(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        # A pass inside `autocast()`, where it may be one without gradients.
        listener = self.nc_entry.model.listener
        if listener is None or _is_in_backward():
            return call(*args, **kwargs)
        listener.begin_pass()
        try:
            return call(*args, **kwargs)
        finally:
            listener.end_pass()

    def _nc_compiled(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        around = active_region()
        set_active_region(self.nc_entry.name)
        try:
            with self.nc_entry.region.autocast():
                return self._nc_inside(call, args, kwargs)
        finally:
            set_active_region(around)

    def _nc_inside(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        # On its own, because torch.compile cannot trace one context inside another in one function.
        with self.nc_entry.region.products():
            return call(*args, **kwargs)

    @classmethod
    def nc_namespace(cls, plain: type[nn.Module]) -> dict[str, Any]:
        """Make every method of the module that is called from outside enter the region."""
        return {name: _entering(function) for name, function in _ways_in(plain)}


def _is_in_backward() -> bool:
    """Return whether this thread is in a backward pass; a compiler need not know."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


@contextlib.contextmanager
def passing_back() -> Iterator[None]:
    """Run a backward pass in the block, outside of all regions: on a CPU it uses this thread."""
    around, began = active_region(), getattr(_backward, "depth", 0)
    set_active_region(None)
    _backward.depth = _autocast_depth()
    try:
        yield
    finally:
        set_active_region(around)
        _backward.depth = began


_backward = threading.local()
"""How deep in blocks of autocast the thread's backward pass began: in those of autograd, in none"""


def _is_in_inner_autocast() -> bool:
    """Return whether a block of `torch.autocast` was entered in this backward pass, on or off."""
    return _autocast_depth() > getattr(_backward, "depth", 0)


def _autocast_depth() -> int:
    depth: int = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return depth - 1


@final
class Pass:
    """Puts a region in force, whatever is around: hold it over forward passes and their loss."""

    def __init__(
        self, entry: RegionEntry, *, explain: Callable[[BaseException], None] | None = None
    ) -> None:
        """Store a region, and what may add advice to an error inside it."""
        self._entry, self._explain = entry, explain
        self._entered: list[contextlib.ExitStack] = []

    def __enter__(self) -> None:
        """Put the region in the place of the one around it, which may be a native one."""
        around = active_region()
        message = None if _is_in_backward() else self._listener(around)
        with contextlib.ExitStack() as stack:
            stack.callback(set_active_region, around)
            set_active_region(self._entry.name)
            stack.enter_context(self._entry.region())
            if message is not None:
                message.begin_pass()
                stack.callback(message.end_pass)
            self._entered.append(stack.pop_all())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Put back what was in force before."""
        self._entered.pop().__exit__(kind, error, traceback)
        if error is not None and self._explain is not None:
            self._explain(error)

    def _listener(self, around: str | None) -> PassListener | None:
        """The listener; None if a pass of this model is active already."""
        model = self._entry.model
        return None if (around or "").startswith(model.name) else model.listener


def get_entry(model: nn.Module) -> RegionEntry:
    """Return the region of a prepared model."""
    assert isinstance(model, InRegion)
    return model.nc_entry


def _ways_in(plain: type[nn.Module]) -> Iterator[tuple[str, FunctionType]]:
    """Yield the public methods of a class that are not every module's."""
    for name in dir(plain):
        function = inspect.getattr_static(plain, name)
        if name.startswith(("_", "nc_")) or hasattr(nn.Module, name):
            continue
        if (getattr(function, "__module__", None) or "").startswith("torch.nn."):
            continue  # a layer's own: it enters by `forward`
        # What a generator does, it does after it was returned.
        if isinstance(function, FunctionType) and not inspect.isgeneratorfunction(function):
            yield name, function


def _entering(function: FunctionType) -> Any:
    @functools.wraps(function)
    def method(self: InRegion, *args: Any, **kwargs: Any) -> Any:
        if active_region() == self.nc_entry.name or self.nc_entry.is_autocast_disabled:
            return function(self, *args, **kwargs)
        return self._nc_enter(functools.partial(function, self), args, kwargs)

    return method
