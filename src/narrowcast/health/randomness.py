"""The random state before a step, kept so that the step can be taken again."""

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RandomState:
    """Where the generators of Python, NumPy, torch and one device stood.

    As each of them gives it, which takes microseconds: one is kept for every step. What a
    checkpoint holds is made of plain values, in `training`.
    """

    python: Any
    numpy: Any
    on_host: Tensor
    """Of torch."""
    device: torch.device
    on_device: Tensor | None
    """None for a CPU, which draws from torch's own."""

    @classmethod
    def now(cls, device: torch.device) -> "RandomState":
        """Return the state as it is. Waits for nothing."""
        return cls(
            python=random.getstate(),
            numpy=np.random.get_state(legacy=False),
            on_host=torch.get_rng_state(),
            device=device,
            on_device=_state_of(device),
        )

    def restore(self) -> None:
        """Let every generator go on from here."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.on_host)
        if self.on_device is None:
            return
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(self.on_device, self.device)
        else:
            torch.mps.set_rng_state(self.on_device)


@contextlib.contextmanager
def drawing_from(state: RandomState) -> Iterator[None]:
    """Let the block draw from `state` on, and nobody after it know that it has drawn."""
    before = RandomState.now(state.device)
    state.restore()
    try:
        yield
    finally:
        before.restore()


def _state_of(device: torch.device) -> Tensor | None:
    match device.type:
        case "cuda":
            return torch.cuda.get_rng_state(device)
        case "mps":
            return torch.mps.get_rng_state()
        case _:
            return None
