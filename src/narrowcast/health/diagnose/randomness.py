"""The random state before a step, kept so that the step can be taken again."""

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RandomState:
    """Where torch's generators stood, on the host and on one device.

    One is kept for every step, so it is no more than that: it takes a microsecond or two, and the
    generators of Python and NumPy, from which hardly any model draws, would take fifty.
    """

    on_host: Tensor
    device: torch.device
    on_device: Tensor | None
    """None for a CPU, which draws from the host's."""

    @classmethod
    def now(cls, device: torch.device) -> "RandomState":
        """Return the state as it is. Waits for nothing."""
        return cls(on_host=torch.get_rng_state(), device=device, on_device=device_state(device))

    def restore(self) -> None:
        """Let torch's generators go on from here."""
        torch.set_rng_state(self.on_host)
        if self.on_device is None:
            return
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(self.on_device, self.device)
        else:
            torch.mps.set_rng_state(self.on_device)


@contextlib.contextmanager
def drawing_from(state: RandomState) -> Iterator[None]:
    """Let the block draw from `state` on, and nobody after it know that it has drawn.

    Of Python and NumPy it draws what comes next, and that will come again.
    """
    before, python, numpy = RandomState.now(state.device), random.getstate(), np.random.get_state()
    state.restore()
    try:
        yield
    finally:
        before.restore()
        random.setstate(python)
        np.random.set_state(numpy)


def device_state(device: torch.device) -> Tensor | None:
    """Return the state of a device's own generator; None where it draws from torch's CPU one."""
    match device.type:
        case "cuda":
            return torch.cuda.get_rng_state(device)
        case "mps":
            return torch.mps.get_rng_state()
        case _:
            return None
