"""Copy values of many tensors at random positions into one matrix, in one launch per dtype."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowcast.kernels.grad_norm import TYPES
from narrowcast.kernels.launch import HostTable, launch_kernel, upload

BLOCK = 1024
"""Values a program copies."""


Spacing = tuple[int, int, int]
"""Number of elements of a tensor, length of a run, and the alignment of its beginning."""


class SampleKernel:
    """Copies values of tensors that have one place each in a list, whose shapes do not change."""

    def __init__(self, spacings: Sequence[Spacing], *, single: Tensor, runs: Tensor) -> None:
        """Take offsets, in units of 2**-31 of a tensor, of single values and of runs of them."""
        self._device = device = single.device
        self._single, self._runs = single, runs
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
                self._single,
                self._runs,
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
def _copy(
    rows,
    spacings,
    addresses,
    single,
    runs,
    into,
    width,
    TYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.load(rows + tl.program_id(0))
    count = tl.load(spacings + row * 3)
    run = tl.load(spacings + row * 3 + 1)
    alignment = tl.load(spacings + row * 3 + 2)
    address = tl.load(addresses + row)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    # A small tensor as often as it fits; then random offsets.
    location = at.to(tl.int64)
    copied = width // count * count
    rest = location - copied
    drawn = inside & (rest >= 0)
    offset = tl.load(single + rest, mask=drawn & (run == 1), other=0)
    offset += tl.load(runs + rest // run, mask=drawn & (run > 1), other=0)
    begin = (offset * (count // alignment) >> 31) * alignment
    location = tl.where(drawn, begin + rest % run, location) % count
    pointer = address.to(tl.pointer_type(TYPE))
    x = tl.load(pointer + location, mask=inside & (address != 0), other=0.0)
    tl.store(into + row * width + at, x.to(tl.float32), mask=inside)
