"""What is active in this thread: the region of a prepared model, by its name, and autocast.

A module that finds its own region here computes as it is; any other enters its own first. It is a
name because `torch.compile` compiles again for another name, but not for another object of the same
class.

A region of 16 bits is inside torch's autocast whether its products are native or emulated, so that
code that asks for it (`torch.amp.custom_fwd`, activation checkpointing, a model's own code) gets
the right answer, and `torch.autocast(..., enabled=False)` around fp32 products can be noticed. The
casts themselves would make native 16-bit products: whatever is emulated computes with them off.
"""

import contextlib
import threading
from typing import Any, final

import torch

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
    """Let a region be in force, or none; whoever does so puts back what was."""
    _here.name = name
    if not torch.compiler.is_compiling():
        _here.cache = None if name is None else {}


def active_cache() -> dict[int, Any] | None:
    """Return what modules keep for one another while this region is in force; None outside.

    Gone when another is put in its place: nothing is kept from pass to pass, nor from an eager pass
    to one that a CUDA graph captures. Not for what is compiled.
    """
    stored: dict[int, Any] | None = getattr(_here, "cache", None)
    return stored
