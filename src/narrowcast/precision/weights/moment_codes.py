"""Moments brought into another format: numbers made codes of 8 bits, and codes numbers."""

from typing import Any

import torch
from torch import Tensor

from narrowcast.errors import CheckpointError
from narrowcast.kernels.adamw.twin import decode, encode
from narrowcast.kernels.tables import laid_like
from narrowcast.precision.dtensor import local_part
from narrowcast.precision.weights.master import SCALE

FIRST = "exp_avg"
"""What torch calls the first moment, whose codes have a sign."""


def convert(state: dict[str, Any], name: str, weight: Tensor, dtype: torch.dtype) -> None:
    """Give a moment another dtype, and the layout of its weight; codes have scales beside them."""
    inputs = local_part(state[name])
    local = laid_like(inputs, local_part(weight)).as_strided((inputs.numel(),), (1,))
    state[name] = torch.zeros_like(weight.detach(), dtype=dtype)
    if dtype in (torch.int8, torch.uint8):
        middle = torch.full(local.shape, 2**15, dtype=torch.int64, device=local.device)
        local, state[name + SCALE] = encode(local.float(), middle, signed=name == FIRST)
    local_part(state[name]).as_strided((local.numel(),), (1,)).copy_(local)


def undo_cast(state: dict[str, Any], name: str, dtype: torch.dtype) -> None:
    """Make codes bytes again: torch's `load_state_dict` gives all of a state the weight's dtype.

    Where moments are kept in another format than codes, they become fp32, without scales.
    """
    if state[name + SCALE].dtype != torch.float32:
        raise CheckpointError(
            "optimizer.load_state_dict() rounded the scales of 8-bit moments. Load the state with "
            "run.load_state_dict() instead."
        )
    codes = torch.int8 if name == FIRST else torch.uint8
    state[name] = state[name].to(codes)
    if dtype != codes:
        local = local_part(state[name])
        flat = decode(local.as_strided((local.numel(),), (1,)), state.pop(name + SCALE))
        state[name] = like(state[name], flat)


def like(state: Tensor, flat: Tensor) -> Tensor:
    """Return fp32 values in the shape and order of a moment."""
    wide = torch.zeros_like(state, dtype=torch.float32)
    local_part(wide).as_strided((flat.numel(),), (1,)).copy_(flat)
    return wide
