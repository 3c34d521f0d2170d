"""Deterministic kernels, which give the same bits every time and may be slower."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

CUBLAS_WORKSPACE = ":4096:8"
"""What torch requires of cuBLAS before it calls its products deterministic."""


@contextmanager
def deterministic_kernels(requested: bool) -> Iterator[None]:
    """Use only deterministic kernels inside the block, if requested.

    On a GPU the backward pass of attention sums in any order, so two runs of one recipe, or a run
    and its resumption, differ in their last bits. Deterministic steps take up to twice as long.
    """
    if not requested:
        yield
        return
    # Read by cuBLAS when it starts, and by torch at every product.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACE)
    before = torch.are_deterministic_algorithms_enabled()
    settings: Any = torch.utils.deterministic  # torch has no types for what is in it
    filled = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False  # costs time, and changes no result
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        settings.fill_uninitialized_memory = filled
