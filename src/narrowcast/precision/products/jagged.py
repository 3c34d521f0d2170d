"""Rows of several lengths, in one of torch's jagged tensors: they lie one after the other."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from narrowcast.errors import UnsupportedError


def of_jagged_rows(product: Callable[[Tensor, Tensor], Tensor], x: Any, weight: Tensor) -> Tensor:
    """Return the product of each row and a weight, in rows of the same lengths."""
    if x._ragged_idx != 1:
        raise UnsupportedError(
            "A linear layer needs jagged tensors whose lengths differ in dimension 1, got "
            f"dimension {x._ragged_idx}. Transpose the input back."
        )
    return torch.nested.nested_tensor_from_jagged(
        product(x.values(), weight),
        x.offsets(),
        x.lengths(),
        min_seqlen=x._maybe_min_seqlen,
        max_seqlen=x._maybe_max_seqlen,
    )
