"""Copies between host and device that overlap with computation."""

from collections.abc import Iterable, Mapping
from typing import final

import torch
from torch import Tensor

KEPT_FREE = 0.05
"""Share of a GPU's memory that copies on it leave free."""

CHUNK = 2**25
"""Bytes that are copied to the host at a time, for a checkpoint."""
ALIGNMENT = 64

Mark = torch.cuda.Event | None
"""A place in a queue, to be waited for by another; none without a GPU, where nothing waits."""


@final
class Lane:
    """A queue of copies that never blocks the host. Without a GPU each is done at once."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]], *, after: Iterable[Mark] = ()) -> Mark:
        """Copy sources into what is paired with them, once others are done; return when it is."""
        if self._stream is None:
            for into, source in pairs:
                into.copy_(source)
            return None
        for mark in after:
            if mark is not None:
                self._stream.wait_event(mark)
        with torch.cuda.stream(self._stream):
            for into, source in pairs:
                into.copy_(source, non_blocking=True)
        done: torch.cuda.Event = self._stream.record_event()
        return done

    def uses(self, tensor: Tensor) -> None:
        """Keep memory from others until this queue is past what it holds now."""
        if self._stream is not None:
            tensor.record_stream(self._stream)


def computing_on(device: torch.device) -> torch.cuda.Stream | None:
    """Return the queue that computes now, and from which memory is taken now."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def mark_now(device: torch.device) -> Mark:
    """Return where the computation is now."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def wait_for(mark: Mark, device: torch.device) -> None:
    """Make the computation, not the host, wait for the mark."""
    if mark is not None:
        torch.cuda.current_stream(device).wait_event(mark)


def on_host(tensor: Tensor) -> Tensor:
    """Return an empty tensor like another in the host's memory, pinned if there is a GPU."""
    pinned = torch.cuda.is_available()
    return torch.empty_like(tensor, device="cpu", pin_memory=pinned)


def to_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors on the host, contiguous and none with the memory of another.

    Those that are there already are not copied. Synchronises.
    """
    results, storages = dict[str, Tensor](), set[int]()
    for name, tensor in tensors.items():
        own = tensor.detach().cpu().contiguous()
        if own.untyped_storage().data_ptr() in storages:
            own = own.clone()
        storages.add(own.untyped_storage().data_ptr())
        results[name] = own
    return results


def free(tensors: dict[str, Tensor]) -> None:
    """Remove tensors one by one: to free gigabytes at once would hold up all other threads."""
    while tensors:
        tensors.popitem()


@final
class HostCopies:
    """Tensors as they are now, on the host once `wait` returns; they may change afterwards.

    On a GPU with room for a second copy the host goes on in milliseconds. Otherwise it waits here
    until they are on the host.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._host: dict[str, Tensor] = {}
        self._pending: list[_DeviceCopy] = []
        by_device: dict[torch.device, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            by_device.setdefault(tensor.device, {})[name] = tensor.detach()
        for device, held in by_device.items():
            if device.type == "cpu":
                self._host |= {name: each.contiguous().clone() for name, each in held.items()}
            elif device.type == "cuda" and (copy := _DeviceCopy.of(held, device)) is not None:
                self._pending.append(copy)
            else:
                self._host |= to_host(held)

    def wait(self) -> dict[str, Tensor]:
        """Return them on the host, contiguous. Any thread may call it."""
        while self._pending:
            self._host |= self._pending.pop().on_host()
        return self._host


@final
class _DeviceCopy:
    """A copy of tensors in one piece of a GPU's memory."""

    def __init__(self, tensors: Mapping[str, Tensor], flat: Tensor) -> None:
        self._flat, self._outline = flat, {n: (t.dtype, t.shape) for n, t in tensors.items()}
        torch._foreach_copy_(list(self._parts(flat).values()), list(tensors.values()))
        self._made = mark_now(flat.device)

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], device: torch.device) -> "_DeviceCopy | None":
        """Copy tensors, or return None if there is no room."""
        free, total = torch.cuda.mem_get_info(device)
        size = sum(_padded(each.nbytes) for each in tensors.values())
        if size > free - KEPT_FREE * total:
            return None
        try:
            flat = torch.empty(size, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:
            return None
        return cls(tensors, flat)

    def on_host(self) -> dict[str, Tensor]:
        """Return the copies on the host, through a small pinned buffer.

        To pin the whole size would make the GPU wait for seconds.
        """
        device, size = self._flat.device, self._flat.numel()
        pinned = torch.empty(min(CHUNK, size), dtype=torch.uint8, pin_memory=True)
        lane, after, results = Lane(device), [self._made], dict[str, Tensor]()
        for name, copy in self._parts(self._flat).items():
            results[name] = host = torch.empty(copy.shape, dtype=copy.dtype)
            for into, source in zip(_chunks(host), _chunks(copy), strict=True):
                part = pinned[: into.numel()]
                done = lane.copy([(part, source)], after=after)
                assert done is not None
                done.synchronize()
                into.copy_(part)
        return results

    def _parts(self, flat: Tensor) -> dict[str, Tensor]:
        parts, begin = dict[str, Tensor](), 0
        for name, (dtype, shape) in self._outline.items():
            size = shape.numel() * dtype.itemsize
            parts[name] = flat[begin : begin + size].view(dtype).view(shape)
            begin += _padded(size)
        return parts


def _chunks(tensor: Tensor) -> list[Tensor]:
    return list(tensor.view(-1).view(torch.uint8).split(CHUNK))


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


@final
class AsyncCopy:
    """The values of a tensor as they are now; they may change afterwards."""

    def __init__(self, tensor: Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        if tensor.is_cuda:
            # `item` later would wait for everything queued by then, not for these numbers alone.
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor.detach(), non_blocking=True)
            self._copied = torch.cuda.Event()
            # The copy is queued on the tensor's device, which need not be the current one.
            self._copied.record(torch.cuda.current_stream(tensor.device))
        else:
            self._host = tensor.detach().clone()

    def wait(self) -> Tensor:
        """Return them, on the host. Waits for the device."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host
