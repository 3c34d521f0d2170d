"""Memory that is cheap to touch for the first time.

A large result is written once, into pages the system has yet to hand out one by one: for 64 MiB
that takes as long as the rounding itself. Asked for large pages, Linux hands out 512 at a time.
numpy asks for its own arrays in the same way.
"""

import ctypes
import mmap
import sys

import torch
from torch import Tensor

# What numpy uses. Below, there are too few whole large pages to matter.
SMALLEST_BYTES = 4 * 2**20


def empty_like(x: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Return what `torch.empty_like` does, on large pages where that can help."""
    out = torch.empty_like(x, dtype=dtype)
    # A subclass may have no memory of its own, as torch's fake tensors.
    plain = type(out) is Tensor and out.device.type == "cpu"
    if sys.platform == "linux" and plain and out.nbytes >= SMALLEST_BYTES:
        first = -(-out.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        # A hint: a system that does not follow it has lost nothing, so the answer is not looked at.
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(first),
            ctypes.c_size_t(out.data_ptr() + out.nbytes - first),
            mmap.MADV_HUGEPAGE,
        )
    return out
