"""Values of many tensors, evenly spaced, copied to the rows of one matrix in one launch.

A copy for each tensor would be a few hundred launches of a few kilobytes each: milliseconds that
one launch for all of a dtype does not take.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowcast.kernels.grad_norm import TYPES
from narrowcast.kernels.launch import launch_kernel
from narrowcast.kernels.tables import HostTable, upload

BLOCK = 1024
"""Values a program copies."""


Spacing = tuple[int, int, int]
"""Which values of a tensor are taken: its number of elements, how many neighbours lie together, and
every which such run is taken. A tensor that has fewer than are taken begins again."""


class SampleKernel:
    """Copies values of tensors that have one place each in a list, whose shapes do not change."""

    def __init__(self, spacings: Sequence[Spacing], device: torch.device) -> None:
        self._device = device
        self._spacings = upload(torch.tensor(spacings, dtype=torch.int64).view(-1, 3), device)
        self._addresses = HostTable(len(spacings), device, dtype=torch.int64)
        self._rows: dict[tuple[torch.dtype | None, ...], dict[torch.dtype, Tensor]] = {}

    def __call__(self, tensors: Sequence[Tensor | None], into: Tensor) -> None:
        """Fill a row of the fp32 matrix `into` for each tensor; with zeros where there is none."""
        here = [None if t is None else t.contiguous() for t in tensors]
        dtypes = tuple(None if t is None else t.dtype for t in here)
        if dtypes not in self._rows:
            self._rows[dtypes] = self._sorted(dtypes)
        self._addresses.write([0 if t is None else t.data_ptr() for t in here])
        width = into.shape[1]
        for dtype, rows in self._rows[dtypes].items():
            launch_kernel(
                _copy,
                (len(rows), triton.cdiv(width, BLOCK)),
                rows,
                self._spacings,
                self._addresses.tensor,
                into,
                width,
                TYPE=TYPES[dtype],
                BLOCK=BLOCK,
            )

    def _sorted(self, dtypes: Sequence[torch.dtype | None]) -> dict[torch.dtype, Tensor]:
        # A tensor that is not there is a row of zeros, whatever its type would be.
        known = [dtype or torch.float32 for dtype in dtypes]
        return {
            dtype: upload(
                torch.tensor([i for i, each in enumerate(known) if each == dtype]), self._device
            )
            for dtype in dict.fromkeys(known)
        }


@triton.jit
def _copy(rows, spacings, addresses, into, width, TYPE: tl.constexpr, BLOCK: tl.constexpr):
    """Copy a part of one tensor's sample."""
    row = tl.load(rows + tl.program_id(0))
    count = tl.load(spacings + row * 3)
    run = tl.load(spacings + row * 3 + 1)
    stride = tl.load(spacings + row * 3 + 2)
    address = tl.load(addresses + row)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = at.to(tl.int64)
    place = (place // run * run * stride + place % run) % count
    inside = at < width
    pointer = address.to(tl.pointer_type(TYPE))
    x = tl.load(pointer + place, mask=inside & (address != 0), other=0.0)
    tl.store(into + row * width + at, x.to(tl.float32), mask=inside)
