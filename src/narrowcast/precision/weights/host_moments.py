"""Moments in host memory that are on the device only while they are updated.

They are copied to one of two places on the device and back, while the next are copied to the other.
Random numbers depend on a weight's place among all, so bits do not depend on the pieces.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

from narrowcast.hardware.transfers import Lane, Mark, mark_now, on_host, wait_for
from narrowcast.kernels.adamw.twin import Ahead, Hyper, Weight, lost_fraction

BUCKET_BYTES = 2**26
"""Moments that are copied together; there are two such places on the device."""
ALIGNED = 256
MOMENTS = ("first", "second", "first_scale", "second_scale")


def keep_on_host(state: dict[str, Any], names: Sequence[str]) -> None:
    """Move the moments of an optimizer to host memory. Synchronises with the device."""
    for name in names:
        value = state.get(name)
        if isinstance(value, Tensor) and not _is_on_host(value):
            state[name] = on_host(value).copy_(value)


def _is_on_host(value: Tensor) -> bool:
    return value.device.type == "cpu" and (value.is_pinned() or not torch.cuda.is_available())


@final
class OffloadedAdam:
    """Like `AdamKernel`, for weights whose moments are on the host; `make` gets their offset."""

    def __init__(
        self,
        weights: Sequence[Weight],
        make: Callable[[Sequence[Weight], int], Any],
        *,
        device: torch.device,
    ) -> None:
        self._device, self._up, self._down = device, Lane(device), Lane(device)
        cut = _cut(weights)
        largest = max(sum(_padded(t) for t in _moments(weights[a:b])) for a, b in cut)
        self._slots = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(2)]
        self._buckets = []
        for number, (a, b) in enumerate(cut):
            staged, pairs = _staged(weights[a:b], self._slots[number % 2])
            self._buckets.append(_MomentBucket(first=a, last=b, pairs=pairs, adam=make(staged, a)))

    def write_hyper(self, groups: Sequence[Hyper], *, ahead: Ahead | None = None) -> None:
        """As `AdamKernel.write_hyper`."""
        for bucket in self._buckets:
            bucket.adam.write_hyper(groups, ahead=ahead)

    def step(
        self,
        gradients: Sequence[Tensor | None],
        *,
        factor: Tensor | None,
        finite: Tensor | None,
        metered: bool,
    ) -> Tensor | None:
        """As `AdamKernel.step`. What follows in the computation comes after the last copy."""
        begun = mark_now(self._device)  # after the copies back of the step before
        ready = [self._fetch(bucket, begun) for bucket in self._buckets[:2]]
        done: Mark = None
        for number, bucket in enumerate(self._buckets):
            wait_for(ready[number], self._device)
            some = slice(bucket.first, bucket.last)
            bucket.adam.step(
                gradients[some],
                factor=factor if factor is None or factor.dim() == 0 else factor[some],
                finite=finite,
                metered=metered,
            )
            updated = mark_now(self._device)
            back = [(host, staged) for staged, host in bucket.pairs]
            done = self._down.copy(back, after=[updated])
            if number + 2 < len(self._buckets):
                ready.append(self._fetch(self._buckets[number + 2], done))
        # Waiting for the last copy is enough: after the step all moments are there.
        wait_for(done, self._device)
        if not metered:
            return None
        return lost_fraction(torch.stack([bucket.adam.counts() for bucket in self._buckets]).sum(0))

    def _fetch(self, bucket: "_MomentBucket", after: Mark) -> Mark:
        return self._up.copy(bucket.pairs, after=[after])


@dataclass(frozen=True)
class _MomentBucket:
    """Weights that are updated together, and where their moments are meanwhile."""

    first: int
    last: int
    pairs: list[tuple[Tensor, Tensor]]
    """On the device and on the host, flat."""
    adam: Any


def _cut(weights: Sequence[Weight]) -> list[tuple[int, int]]:
    """Return where buckets begin and end; one weight at least is in each."""
    cut, first, size = [], 0, 0
    for i, weight in enumerate(weights):
        own = sum(map(_padded, _moments([weight])))
        if i > first and size + own > BUCKET_BYTES:
            cut.append((first, i))
            first, size = i, 0
        size += own
    return [*cut, (first, len(weights))]


def _staged(
    weights: Sequence[Weight], slot: Tensor
) -> tuple[list[Weight], list[tuple[Tensor, Tensor]]]:
    """Return weights with moments in a place on the device, and those with their homes."""
    staged, pairs, offset = [], [], 0
    for weight in weights:
        places: dict[str, Any] = {}
        for name in MOMENTS:
            host = getattr(weight, name)
            if host is not None:
                flat = slot[offset : offset + host.nbytes].view(host.dtype)
                pairs.append((flat, host.as_strided((host.numel(),), (1,))))
                places[name] = flat.as_strided(host.shape, host.stride())
                offset += _padded(host)
        staged.append(replace(weight, **places))
    return staged, pairs


def _moments(weights: Sequence[Weight]) -> list[Tensor]:
    matches = [getattr(weight, name) for weight in weights for name in MOMENTS]
    return [tensor for tensor in matches if tensor is not None]


def _padded(tensor: Tensor) -> int:
    return -(-tensor.nbytes // ALIGNED) * ALIGNED
