"""Autocast as an emulated region uses it: as a word of the user, never as arithmetic.

A region of 16 bits is inside torch's autocast whether its products are native or emulated, so that
what asks for it (`torch.amp.custom_fwd`, activation checkpointing, a model's own code) hears the
truth, and `torch.autocast(..., enabled=False)` around fp32 products, an island, can be noticed. The
casts themselves would make native 16-bit products: whatever is emulated computes with them off.
"""

import contextlib
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
    """Refuse a backward pass that would go through emulated products with autocast on.

    Their gradients are torch's own formulas, which nothing sees but autocast.
    """
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
