"""Where random generators stand: of a step that may be taken again, and of a whole run."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RandomState:
    """The states of torch's generators, on the host and on one device.

    Python's and NumPy's are left out: they would take 50 µs per step instead of 2.
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
        torch.set_rng_state(self.on_host)
        if self.on_device is None:
            return
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(self.on_device, self.device)
        else:
            torch.mps.set_rng_state(self.on_device)


@dataclass(frozen=True, kw_only=True)
class AllRandomState:
    """The states of the random generators of torch, Python and NumPy."""

    of_torch: RandomState
    of_python: Any
    of_numpy: Any

    @classmethod
    def now(cls, device: torch.device) -> "AllRandomState":
        """Return the state as it is. Waits for nothing."""
        return cls(
            of_torch=RandomState.now(device),
            of_python=random.getstate(),
            of_numpy=np.random.get_state(),
        )

    def restore(self) -> None:
        self.of_torch.restore()
        random.setstate(self.of_python)
        np.random.set_state(self.of_numpy)


@contextmanager
def preserve_rng(device: torch.device) -> Iterator[None]:
    """Leave the generators, after the context, as they were before it."""
    before = AllRandomState.now(device)
    try:
        yield
    finally:
        before.restore()


@contextmanager
def drawing_from(state: RandomState) -> Iterator[None]:
    """Draw from `state` inside the block, and restore all generators after it."""
    with preserve_rng(state.device):
        state.restore()
        yield


@final
class OwnRandomness:
    """Separate generators for a run and for code that runs between two of its records."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._others: AllRandomState | None = None

    def swap(self) -> None:
        """Go over to the other's generators; the first time, they are what everybody's are."""
        others, self._others = self._others, AllRandomState.now(self._device)
        if others is not None:
            others.restore()


def seed_everything(seed: int) -> None:
    """Start the generators of Python, NumPy and torch, on every device, from `seed`."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # NumPy takes 32 bits
    torch.manual_seed(seed)


def capture_randomness(device: torch.device) -> dict[str, Any]:
    """Return the state of the generators of Python, NumPy, torch and `device`."""
    version, terms, gauss = random.getstate()
    _, key, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": {"version": version, "words": torch.tensor(terms), "gauss": gauss},
        "numpy": {
            "key": torch.tensor(np.asarray(key, dtype=np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "gauss": float(cached),
        },
        "torch": torch.get_rng_state(),
        "device": {"type": device.type, "state": device_state(device)},
    }


def restore_randomness(state: dict[str, Any], device: torch.device) -> bool:
    """Restore the generators; return whether the state of `device` was among them."""
    python, numpy, on_device = state["python"], state["numpy"], state["device"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    key = numpy["key"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", key, numpy["position"], numpy["has_gauss"], numpy["gauss"]))
    torch.set_rng_state(state["torch"])
    if on_device["type"] != device.type:
        return False
    match device.type:
        case "cuda":
            torch.cuda.set_rng_state(on_device["state"], device)
        case "mps":
            torch.mps.set_rng_state(on_device["state"])
    return True


def device_state(device: torch.device) -> Tensor | None:
    """Return the state of a device's generator; None if it uses torch's CPU generator."""
    match device.type:
        case "cuda":
            return torch.cuda.get_rng_state(device)
        case "mps":
            return torch.mps.get_rng_state()
        case _:
            return None
