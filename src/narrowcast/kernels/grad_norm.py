"""The norms of many gradients in one read of each, in fp32 and bit for bit reproducible.

Sums have a fixed order and no atomics. A gradient whose square overflows fp32 has an infinite norm.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowcast.kernels.launch import (
    ALIGNMENT,
    HostTable,
    Launcher,
    TensorAddresses,
    chunk_table,
    is_capturing,
    is_dense,
    upload,
)

CHUNK = 16384
"""Elements a program sums: 32 KiB of bf16, sixteen loads of 16 bytes in each of 128 threads."""
WARPS = 4
JOIN_WIDTH = 1024
SETS = 8
"""Sets of gradients whose tables are kept: weights may have gradients in every other step only."""
_DTYPE = attrgetter("dtype")
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class NormKernel:
    """Takes the norms of gradients, and remembers the tables of the last few sets of them."""

    def __init__(self, device: torch.device, *, chunk: int = CHUNK, warps: int = WARPS) -> None:
        self._device, self._chunk, self._warps = device, chunk, warps
        self._known: dict[tuple[_Make, ...], _Tables] = {}
        self._captured: list[_Tables] = []
        self._partial: tuple[list[int], list[torch.dtype], list[bool]] = [], [], []
        self._last: _Tables | None = None
        self.places: TensorAddresses | None = None
        """Where the gradients of the last call are, until the caller has used it."""

    def __call__(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the fp32 norm of each gradient, in a new tensor on the device."""
        dense = gradients
        if not all(map(Tensor.is_contiguous, gradients)):
            # The order of elements is of no account, gaps between them are.
            dense = [g if is_dense(g) else g.contiguous() for g in gradients]
        addresses, sizes = list(map(Tensor.data_ptr, dense)), list(map(Tensor.numel, dense))
        dtypes = list(map(_DTYPE, dense))
        tables = self._tables_for(addresses, sizes, dtypes)
        if is_capturing(self._device):
            self._captured.append(tables)
        tables.addresses.write(addresses)
        table, partial = tables.addresses.tensor, tables.partial
        self.places = TensorAddresses(dense, addresses, dtypes, table)
        for chunks, first, constants in tables.launches:
            grid = len(chunks), 1, 1
            _launch_sums(grid, (chunks, table, partial), (first,), constants, num_warps=self._warps)
        norms = torch.empty(len(dense), device=self._device)
        constants = tables.rounds, JOIN_WIDTH
        _launch_join((len(dense), 1, 1), (partial, tables.ranges, norms), (), constants)
        return norms

    def _tables_for(
        self, addresses: list[int], sizes: list[int], dtypes: list[torch.dtype]
    ) -> "_Tables":
        # As `is_aligned`, of addresses and sizes that are at hand.
        aligned = [not (a | n) % ALIGNMENT for a, n in zip(addresses, sizes, strict=True)]
        matches = sizes, dtypes, aligned
        if matches == self._partial and self._last is not None:
            return self._last
        makes = tuple(zip(sizes, dtypes, aligned, strict=True))
        if makes not in self._known:
            if len(self._known) == SETS:
                del self._known[next(iter(self._known))]
            self._known[makes] = self._cut(makes)
        self._partial, self._last = matches, self._known[makes]
        return self._last

    def has_replayed(self) -> None:
        """Forget the addresses of the last gradients: a replayed graph used others."""
        for tables in (*self._known.values(), *filter(None, [self._last])):
            tables.addresses.has_replayed()

    def make_room(self) -> None:
        """Have memory to spare for the addresses of gradients that a capture is about to keep."""
        for tables in self._known.values():
            tables.addresses.make_room()

    def _cut(self, makes: "Sequence[_Make]") -> "_Tables":
        launches = []
        ranges = torch.zeros((len(makes), 2), dtype=torch.int32)
        first = 0
        for make in dict.fromkeys((dtype, aligned) for _, dtype, aligned in makes):
            mine = [i for i, other in enumerate(makes) if other[1:] == make]
            chunks = chunk_table([m[0] for m in makes], mine, chunk=self._chunk)
            counts = torch.tensor([-(-makes[i][0] // self._chunk) for i in mine])
            ranges[mine, 0] = (first + counts.cumsum(0) - counts).int()
            ranges[mine, 1] = counts.int()
            constants = TYPES[make[0]], make[1], self._chunk
            if len(chunks):
                launches.append((upload(chunks, self._device), first, constants))
            first += len(chunks)
        # A power of two: then few kernels are compiled, however the sizes change.
        longest = -(-int(ranges[:, 1].max()) // JOIN_WIDTH)
        return _Tables(
            addresses=HostTable(len(makes), self._device, dtype=torch.int64),
            launches=launches,
            partial=torch.zeros(max(first, 1), device=self._device),
            ranges=upload(ranges, self._device),
            rounds=1 << max(longest - 1, 0).bit_length(),
        )


_Make = tuple[int, torch.dtype, bool]


@dataclass(frozen=True, kw_only=True)
class _Tables:
    addresses: HostTable
    launches: list[tuple[Tensor, int, tuple[Any, ...]]]
    """Chunks, where their sums begin, and what the kernel is compiled for."""
    partial: Tensor
    ranges: Tensor
    """Where each tensor's sums begin, and how many they are."""
    rounds: int


@triton.jit
def _sum_squares(
    chunks,
    addresses,
    partial,
    first,
    TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    record = chunks + tl.program_id(0).to(tl.int64) * 4
    t = tl.load(record)
    begin = tl.load(record + 1).to(tl.int64) * CHUNK
    left = tl.load(record + 2)
    pointer = tl.load(addresses + t).to(tl.pointer_type(TYPE))
    if ALIGNED:
        left = tl.multiple_of(left, 16)
        pointer = tl.multiple_of(pointer, 16)
    at = tl.arange(0, CHUNK)
    x = tl.load(pointer + begin + at, mask=at < left, other=0.0).to(tl.float32)
    tl.store(partial + first + tl.program_id(0), tl.sum(x * x, axis=0))


@triton.jit
def _join(partial, ranges, norms, ROUNDS: tl.constexpr, WIDTH: tl.constexpr):
    t = tl.program_id(0)
    first = tl.load(ranges + t * 2)
    count = tl.load(ranges + t * 2 + 1)
    total = tl.zeros([WIDTH], tl.float32)
    for i in range(ROUNDS):
        at = i * WIDTH + tl.arange(0, WIDTH)
        total += tl.load(partial + first + at, mask=at < count, other=0.0)
    tl.store(norms + t, tl.sqrt(tl.sum(total, axis=0)))


_launch_sums, _launch_join = Launcher(_sum_squares), Launcher(_join)
