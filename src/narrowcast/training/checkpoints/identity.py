"""Bit-exact comparison of two states."""

from typing import Any

import torch
from torch import Tensor


def first_difference(a: Any, b: Any, *, where: str = "") -> str | None:
    """Return where and how two nested states first differ, or None if every bit is the same.

    NaN equals itself, -0.0 differs from 0.0, and 1 differs from 1.0.
    """
    if type(a) is not type(b) and not (isinstance(a, dict) and isinstance(b, dict)):
        return f"{where}: a {type(a).__name__} and a {type(b).__name__}"
    match a:
        case Tensor():
            return _tensor_difference(a, b, where)
        case dict():
            if keys := [key for key in [*a, *b] if (key in a) is not (key in b)]:
                return f"{where}: only one of the two has {keys[0]!r}"
            pairs = [(key, a[key], b[key]) for key in a]
        case list() | tuple():
            if len(a) != len(b):
                return f"{where}: {len(a)} items and {len(b)} items"
            pairs = [(key, *pair) for key, pair in enumerate(zip(a, b, strict=True))]
        case _:
            return None if repr(a) == repr(b) else f"{where}: {a!r} and {b!r}"
    inside = (
        first_difference(x, y, where=f"{where}/{key}" if where else str(key)) for key, x, y in pairs
    )
    return next((text for text in inside if text), None)


def _tensor_difference(a: Tensor, b: Tensor, where: str) -> str | None:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return f"{where}: {a.dtype} of {tuple(a.shape)} and {b.dtype} of {tuple(b.shape)}"
    bits = [t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    same = (bits[0] == bits[1]).view(a.numel(), -1).all(dim=1) if a.numel() else bits[0].bool()
    if same.all():
        return None
    first = int(same.logical_not().nonzero()[0])
    values = [t.detach().cpu().reshape(-1)[first].item() for t in (a, b)]
    return (
        f"{where}: {int((~same).sum())} of {a.numel()} values differ, the first at {first}: "
        f"{values[0]!r} and {values[1]!r}"
    )
