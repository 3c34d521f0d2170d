"""Memory of training that a trial does not need: gradients, and the optimizer's state.

A trial passes forward only, so both can be elsewhere meanwhile. What a captured CUDA graph may know
by its address stays where it is: freed memory is given to others, and nobody can ask for the same
addresses again. Else the tensors stay the same objects, and their memory is freed and given anew,
at other addresses perhaps.
"""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from narrowcast.precision.step.prepared import Prepared

SMALLEST_BYTES = 4096
"""Tensors below are left where they are: counts of steps, whose copies cost more than they free."""


@dataclass(frozen=True)
class Freed:
    """What is not on the device inside the block."""

    gradient_bytes: int
    moment_bytes: int
    """Of the optimizer's state; as many lie in the host's memory."""
    same_addresses: bool
    """Whether the optimizer's state was left in its place, because a graph may know it."""


@final
class Parked:
    """The memory of tensors, copied to the host and freed where they are, until `bring_back`.

    Views of one memory are parked with it, once. Waits for the device.
    """

    def __init__(self, tensors: Iterable[Tensor], *, smallest_bytes: int = 1) -> None:
        found = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
        self._storages = [s for s in found.values() if s.nbytes() >= smallest_bytes]
        self._copies: list[Tensor] = []
        for storage in self._storages:
            pinned = storage.device.type == "cuda"
            copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned)
            self._copies.append(copy.copy_(_raw(storage), non_blocking=True))
        _wait(self._storages)
        for storage in self._storages:
            storage.resize_(0)

    def bytes(self) -> int:
        """Return what was freed."""
        return sum(copy.nbytes for copy in self._copies)

    def bring_back(self) -> None:
        """Give every tensor memory again, with the bits that it had. Waits for the device."""
        for storage, copy in zip(self._storages, self._copies, strict=True):
            storage.resize_(copy.nbytes)
            _raw(storage).copy_(copy, non_blocking=True)
        _wait(self._storages)
        self._storages, self._copies = [], []


@contextlib.contextmanager
def offloaded(prepared: Prepared, *, graph_knows: bool) -> Iterator[Freed]:
    """Free gradients and move the optimizer's state to the host inside the block, and back after.

    Bit for bit, also where the block raises; gradients are gone for good, so call it between two
    steps. With `graph_knows` (the run replays captured steps) the state stays on the device. On a
    CPU there is nowhere to move it to, and nothing is moved.
    """
    weights = prepared.engine.weights
    gradients = sum(p.grad.nbytes for p in weights.all if p.grad is not None)
    weights.forget_gradients()
    state = [] if graph_knows else _state_on(prepared, weights.device)
    parked = Parked(state, smallest_bytes=SMALLEST_BYTES)
    try:
        yield Freed(gradients, parked.bytes(), graph_knows)
    finally:
        parked.bring_back()
        if weights.fused is not None and state:
            weights.fused.forget_bindings()  # the kernel knows addresses


def _state_on(prepared: Prepared, device: torch.device) -> list[Tensor]:
    """Return the optimizer's tensors that lie on a device; none for the host itself."""
    if device.type == "cpu":
        return []
    states = prepared.engine.optimizer.state.values()
    values = (value for state in states for value in state.values())
    return [v for v in values if isinstance(v, Tensor) and v.device == device]


def _raw(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _wait(storages: Iterable[torch.UntypedStorage]) -> None:
    for device in {storage.device for storage in storages if storage.device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()
