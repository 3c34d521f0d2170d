"""The state of every random generator a step may draw from, as plain values and tensors."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from narrowcast.health.diagnose.randomness import device_state


def seed_everything(seed: int) -> None:
    """Start the generators of Python, NumPy and torch, on every device, from `seed`."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # NumPy takes 32 bits
    torch.manual_seed(seed)


def capture_randomness(device: torch.device) -> dict[str, Any]:
    """Return the state of the generators of Python, NumPy, torch and `device`."""
    version, words, gauss = random.getstate()
    _, key, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
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
    """Put the generators back to a captured state; return whether that of `device` was among it.

    It is not when the state was captured on a device of another type.
    """
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


@contextmanager
def randomness_kept(device: torch.device) -> Iterator[None]:
    """Leave the generators, after the context, as they were before it."""
    state = capture_randomness(device)
    try:
        yield
    finally:
        restore_randomness(state, device)
