"""Weights that are sharded over devices (DTensors), and the part of them that lies on this one."""

import sys
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from narrowcast.kernels.launch import PLAIN


def as_sharded(tensor: Tensor) -> Any:
    """Return a tensor that is sharded over devices (a DTensor) as one, and None for any other.

    Whoever has one has imported its module; importing it here would cost everyone else a second.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return tensor if module is not None and isinstance(tensor, module.DTensor) else None


def local_part(tensor: Tensor) -> Tensor:
    """Return what of a tensor lies on this device: all of it, unless it is sharded."""
    return _shard_of(tensor).detach()


def shards_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the same of many, with their part in autograd: every weight, several times a step."""
    found = list(tensors)
    if PLAIN.issuperset(map(type, found)):
        return found
    return [_shard_of(tensor) for tensor in found]


def replace_values(parameter: nn.Parameter, values: Tensor) -> None:
    """Give a parameter other values, of another dtype perhaps; its shard too if it is sharded."""
    parameter.data = values
    sharded = as_sharded(parameter)
    if sharded is not None:
        # torch changes the wrapper alone; FSDP replaces the shard in it in this way too.
        sharded._local_tensor = local_part(values)


def placed_like(local: Tensor, other: Tensor) -> Tensor:
    """Return the tensor whose part on this device is `local`, sharded as `other` is."""
    sharded = as_sharded(other)
    if sharded is None:
        return local
    whole: Tensor = type(sharded.data).from_local(
        local,
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=other.shape,
        stride=other.stride(),
    )
    return whole


def _shard_of(tensor: Tensor) -> Tensor:
    if type(tensor) in PLAIN:
        return tensor
    sharded = as_sharded(tensor)
    local: Tensor = tensor if sharded is None else sharded.to_local()
    return local
