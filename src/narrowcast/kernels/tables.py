"""Tables on the device by which one launch walks over many tensors: chunks, and addresses.

A launch has one program for each chunk of each tensor. The chunk table says which tensor and which
part of it (16 bytes a chunk, made once; with 256 elements a chunk, a byte for 16 weights); the
address table says where tensors are (8 bytes each, rewritten only where they moved).
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_

import torch
from torch import Tensor

from narrowcast.errors import UnsupportedError
from narrowcast.kernels.launch import is_capturing

ALIGNMENT = 16
"""Bytes of the widest load: a tensor that begins at a multiple of it, and whose length is one of as
many elements, is read and written in whole ones."""
_CODES = {torch.int64: "q", torch.float64: "d"}
"""What Python calls the numbers of a table."""


def chunk_table(sizes: Sequence[int], tensors: Sequence[int], *, chunk: int) -> Tensor:
    """Return one row per chunk of the chosen tensors: tensor, number of the chunk, elements left.

    What is left is counted from the chunk's beginning and at most `chunk`; an empty tensor has no
    chunk. The table is in the host's memory, as int32 of shape (chunks, 4).
    """
    rows = [_rows(t, sizes[t], chunk) for t in tensors]
    return torch.cat([torch.zeros((0, 4), dtype=torch.int32), *rows])


def upload(table: Tensor, device: torch.device) -> Tensor:
    """Return a table of the host's on the device, without waiting for the copy."""
    if device.type != "cuda":
        return table.to(device)
    # torch gives pinned memory to nobody else before the copy from it is done.
    return table.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True)
class TensorAddresses:
    """Where tensors are and what: looked up once for all launches of a step that walk over them."""

    tensors: Sequence[Tensor]
    addresses: list[int]
    dtypes: list[torch.dtype]
    table: Tensor | None = None
    """The addresses on the device, in what a captured step writes anew whenever it is replayed."""

    def matches(self, tensors: Sequence[Tensor]) -> bool:
        """Say whether these are the very same."""
        return are_same(tensors, self.tensors)


class HostTable:
    """Numbers that the host knows and kernels read; written without waiting, where they changed."""

    def __init__(self, length: int, device: torch.device, *, dtype: torch.dtype) -> None:
        self.tensor = torch.zeros(length, dtype=dtype, device=device)
        self._written: list[float] = [0] * length
        self._stored: list[tuple[list[float], Tensor]] = []
        # Two graphs are captured of a step, and a gradient that has to be copied lies elsewhere in
        # each: they must not read one another's addresses.
        self._spares = [self._pinned(), self._pinned()]

    def write(self, numbers: Sequence[float], *, replayed: bool = True) -> None:
        """Put numbers into the table, unless they are there already.

        A CUDA graph under capture writes them whenever it is replayed: by then others may stand
        there. With `replayed=False` it leaves them alone, so they must be there before.
        """
        capturing = is_capturing(self.tensor.device)
        if numbers == self._written and not (capturing and replayed):
            return
        if capturing and not replayed:
            raise UnsupportedError(
                "Optimizer settings changed during a CUDA graph capture, which would fix them. "
                "Set them before the capture begins."
            )
        self._written = list(numbers)
        host = self._as_tensor(numbers)
        if capturing:
            host = self.stored_for_replays(numbers)
        elif self.tensor.is_cuda:
            # torch gives pinned memory to nobody else before the copy from it is done.
            host = host.pin_memory()
            self.make_room()
        self.tensor.copy_(host, non_blocking=True)

    def has_replayed(self) -> None:
        """Know no more what stands in the table: a replayed graph has written its own there."""
        self._written = []

    def make_room(self) -> None:
        """Have memory to spare for a capture: none can be asked for while it lasts."""
        self._spares += [self._pinned() for _ in range(2 - len(self._spares))]

    def stored_for_replays(self, numbers: Sequence[float]) -> Tensor:
        """Return memory that holds these whenever a graph reads it; none is asked for here.

        With all of it taken since there was last made room, that of the graph before the last is
        written over: it has been captured anew.
        """
        for written, host in self._stored:
            if written == list(numbers):
                return host
        if self._spares:
            host = self._spares.pop(0)
        else:
            host = self._stored.pop(max(0, len(self._stored) - 2))[1]
        host.copy_(self._as_tensor(numbers))
        self._stored.append((list(numbers), host))
        return host

    def _as_tensor(self, numbers: Sequence[float]) -> Tensor:
        """Return numbers as a tensor of the host's: torch takes longer to read a list of them."""
        return torch.frombuffer(array(_CODES[self.tensor.dtype], numbers), dtype=self.tensor.dtype)

    def _pinned(self) -> Tensor:
        return torch.empty(
            self.tensor.shape, dtype=self.tensor.dtype, pin_memory=self.tensor.is_cuda
        )


def are_same(matches: Sequence[object], others: Sequence[object]) -> bool:
    """Say whether these are the very same objects; tensors have another meaning of "equal"."""
    return len(matches) == len(others) and all(map(is_, matches, others))


def is_aligned(*tensors: Tensor) -> bool:
    """Say whether whole loads of `ALIGNMENT` bytes can read these and nothing is left over."""
    return all(t.data_ptr() % ALIGNMENT == 0 and t.numel() % ALIGNMENT == 0 for t in tensors)


def lies_like(tensor: Tensor, other: Tensor) -> bool:
    """Say whether element i in memory is the same element of both, with no gaps in either."""
    if tensor.shape != other.shape:
        return False
    if tensor.is_contiguous() and other.is_contiguous():
        return True
    return tensor.stride() == other.stride() and is_dense(tensor)


def is_dense(tensor: Tensor) -> bool:
    """Say whether the elements fill a stretch of memory, each once, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return tensor.numel() == 0
        expected *= size
    return True


def laid_like(tensor: Tensor, other: Tensor) -> Tensor:
    """Return `tensor` with its elements in memory as those of `other`; itself where they are."""
    if lies_like(tensor, other):
        return tensor
    return torch.empty_like(other, dtype=tensor.dtype).copy_(tensor)


def _rows(tensor: int, size: int, chunk: int) -> Tensor:
    numbers = torch.arange(-(-size // chunk))
    left = (size - numbers * chunk).clamp(max=chunk)
    columns = [torch.full_like(numbers, tensor), numbers, left, torch.zeros_like(numbers)]
    return torch.stack(columns, dim=1).int()
