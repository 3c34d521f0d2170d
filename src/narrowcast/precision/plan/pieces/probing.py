"""How a module of transformers is asked what it computes: its own forward, with stand-ins.

A class whose forward is somebody's own is not asked.
"""

from typing import Any

import torch
from torch import Tensor, nn

from narrowcast.precision.swap import has_own_forward, plain_class

NOT_RUN = (AttributeError, TypeError, ValueError, LookupError, RuntimeError)
"""What other people's forwards raise that want something else."""


def in_a_line(error: Exception) -> str:
    """Return what went wrong in somebody else's forward, short enough for a plan."""
    first = next(iter(str(error).splitlines()), "")
    text = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return text if len(text) <= 90 else f"{text[:89]}…"


def reason_not_probed(module: nn.Module) -> str:
    """Say why a module's forward is not to be asked what it computes; nothing where it is."""
    plain = plain_class(module)
    if has_own_forward(module) or not plain.forward.__module__.startswith("transformers."):
        return f"{plain.__name__} overrides forward"
    return ""


def make_twin(module: nn.Module, **attributes: Any) -> Any:
    """Return a module like this one, with other weights and layers inside, that nobody else has."""
    twin = object.__new__(plain_class(module))
    twin.__dict__.update(module.__dict__)
    twin.__dict__.update(attributes)
    return twin


def numbers(*shape: int, seed: int) -> Tensor:
    """Return numbers to ask with, the same every time."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")
