"""What is active in this thread: the region of a prepared model, by its name, and autocast.

It is a name because `torch.compile` recompiles for another name, but not for another object of the
same class. A 16-bit region is inside torch's autocast even if emulated, so that code that checks
for it (`torch.amp.custom_fwd`, activation checkpointing) works. Emulated products turn its casts
off.
"""

import contextlib
import threading
from typing import Any, final

import torch
from torch import Tensor

from narrowcast.errors import UnsupportedError

_NOTHING = contextlib.nullcontext()


def autocast_off(device_type: str) -> contextlib.AbstractContextManager[Any]:
    """Return a block in which autocast casts nothing."""
    if torch.compiler.is_compiling():
        return torch.autocast(device_type, enabled=False)  # all that the compiler can trace
    return _Off(device_type) if torch.is_autocast_enabled(device_type) else _NOTHING


def check_native_backward(device_type: str) -> None:
    """Check that no backward pass through emulated products has autocast on, and raise."""
    if not torch.is_autocast_enabled(device_type):
        return
    modes = torch.overrides._get_current_function_mode_stack()
    if any(getattr(mode, "emulates", False) for mode in modes):
        raise UnsupportedError(
            "torch.autograd.backward() was called inside autocast(), where its products would not "
            "be emulated. Call loss.backward() instead, or leave the block first."
        )


@final
class _Off:
    """What `torch.autocast(enabled=False)` is where it is on, in a fifth of the time."""

    __slots__ = ("_device_type",)

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type

    def __enter__(self) -> None:
        torch.set_autocast_enabled(self._device_type, False)

    def __exit__(self, *_: object) -> None:
        torch.set_autocast_enabled(self._device_type, True)


_here = threading.local()


def active_region() -> str | None:
    """Return the name of the region in force; None outside all of them."""
    name: str | None = getattr(_here, "name", None)
    return name


def set_active_region(name: str | None) -> None:
    """Set the active region, or none; the caller restores the previous one."""
    _here.name = name
    if not torch.compiler.is_compiling():
        _here.cache = None if name is None else {}


def active_cache() -> dict[int, Any] | None:
    """Return the cache of the active region for eager modules; None outside.

    It ends with its region: nothing is kept from an eager pass to one that a CUDA graph captures.
    """
    stored: dict[int, Any] | None = getattr(_here, "cache", None)
    return stored


def _grouped_product(x: Tensor, weights: Tensor, *rest: Any, **settings: Any) -> Tensor:
    """Multiply groups of rows by their expert's weights, in the format of the active region.

    torch's autocast leaves this product in fp32, unlike all others.
    """
    dtype = torch.get_autocast_dtype(x.device.type)
    with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
        if active_region() is not None and dtype in (torch.bfloat16, torch.float16):
            x, weights = x.to(dtype), weights.to(dtype)
        result: Tensor = torch.ops.aten._grouped_mm.default(x, weights, *rest, **settings)
    return result


_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA).add(
    torch._C.DispatchKey.AutocastCPU
)
_LIBRARY = torch.library.Library("aten", "IMPL")
for _key in ("AutocastCUDA", "AutocastCPU"):
    _LIBRARY.impl("_grouped_mm", _grouped_product, _key)
