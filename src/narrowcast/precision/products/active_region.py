"""Which region of which prepared model is in force in this thread, by its name.

A module that finds its own here computes as it is; any other enters its own first. A name, because
`torch.compile` compiles again for another name, but not for another object of the same class.
"""

import threading
from typing import Any

import torch

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
