"""Weights that are sharded over devices (DTensors), and the part of them that lies on this one."""

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any, cast

import torch
from torch import Tensor, nn

from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.kernels.launch import PLAIN


def as_sharded(tensor: Tensor) -> Any:
    """Return `x` as a DTensor if it is one, else None.

    Does not import its module, which takes a second: if there is a DTensor, it is imported already.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return tensor if module is not None and isinstance(tensor, module.DTensor) else None


def shard_index(tensor: Tensor) -> int:
    """Return the number of this rank's part among those of a sharded tensor; 0 without shards."""
    sharded, index = as_sharded(tensor), 0
    if sharded is None:
        return 0
    coordinate = sharded.device_mesh.get_coordinate() or [0] * sharded.device_mesh.ndim
    sizes = zip(coordinate, sharded.device_mesh.shape, sharded.placements, strict=True)
    for position, size, placement in sizes:
        if placement.is_shard():
            index = index * size + position
    return index


def check_sharded(
    model: nn.Module, formats: Mapping[nn.Parameter, str], *, grads_format: str
) -> None:
    """Raise if sharded weights cannot be trained in these storage formats."""
    if _modules(model, "FullyShardedDataParallel"):
        raise UnsupportedError(
            "FullyShardedDataParallel (FSDP1) flattens the weights, and each process would see "
            "only the gradients of its own part. Use FSDP2: nc.fully_shard(model, mesh, "
            "policy=...), or torch.distributed.fsdp.fully_shard."
        )
    taken = set[nn.Parameter]()
    for name, unit in reversed(_modules(model, "FSDPModule")):  # inner modules come last
        own = {
            p: name
            for name, p in unit.named_parameters()
            if p.requires_grad and p not in taken and as_sharded(p) is not None
        }
        taken |= own.keys()
        stored = {formats.get(p, "fp32"): n for p, n in own.items()}
        if grads_format == "fp32" and set(stored) - {"fp32"}:
            raise UnsupportedError(
                "fully_shard() stores gradients in the dtype of their weights, got grads=fp32 for "
                f"{next(iter(stored.values()))}. Leave grads out: reduce=fp32, the default, adds "
                "them up in fp32."
            )
        if len(stored) > 1:
            each = ", ".join(f"{n} in {saved}" for saved, n in stored.items())
            raise UnsupportedError(
                "fully_shard() needs one dtype for all weights that it shards together, got "
                f"{each} in {name or 'the model'}. Use nc.fully_shard(model, mesh, policy=...), "
                "which shards the modules with fp32 weights (norms) by themselves."
            )


def check_dtypes_stay(
    model: nn.Module, *, doing: str, instead: str, after_forward: bool = False
) -> None:
    """Raise if FSDP, which remembers the dtypes of its first forward pass, shards the model.

    `after_forward` raises only if there was one.
    """
    units = _modules(model, "FSDPModule")
    if after_forward:
        units = [
            each for each in units if cast(Any, each[1])._get_fsdp_state()._is_root is not None
        ]
    if units:
        raise UnsupportedError(
            f"{doing} changes the dtype of weights, which fully_shard() does not follow. {instead}."
        )


def local_part(tensor: Tensor) -> Tensor:
    """Return what of a tensor lies on this device: all of it, unless it is sharded."""
    sharded = as_sharded(tensor)
    if sharded is not None and type(sharded._local_tensor) in PLAIN:
        local: Tensor = sharded._local_tensor.detach()  # to_local() takes ten times as long
        return local
    return _local_shard(tensor).detach()


def local_shards(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the same of many, with their part in autograd: every weight, several times a step."""
    matches = list(tensors)
    if PLAIN.issuperset(map(type, matches)):
        return matches
    return [_local_shard(tensor) for tensor in matches]


def replace_values(parameter: nn.Parameter, values: Tensor) -> None:
    """Give a parameter other values, of another dtype perhaps; its shard too if it is sharded."""
    parameter.data = values
    sharded = as_sharded(parameter)
    if sharded is not None:
        # torch changes the wrapper alone; FSDP replaces the shard in it in this way too.
        sharded._local_tensor = local_part(values)


def reshard(model: nn.Module) -> set[nn.Parameter]:
    """Free the weights that a forward pass without backward left gathered, and return them."""
    units = _modules(model, "FSDPModule")
    before = set(model.parameters()) if units else set()
    for _, unit in units:
        cast(Any, unit).reshard()
    return before - set(model.parameters()) if units else before


@contextlib.contextmanager
def gathered_root(model: nn.Module) -> Iterator[None]:
    """Hold what FSDP gathers for the outermost module, for methods that only call inner ones.

    Such as `generate` of a PEFT model. All ranks enter it.
    """
    root: Any = dict(_modules(model, "FSDPModule")).get("")
    if root is None:
        yield
        return
    root._get_fsdp_state()._lazy_init()  # else an inner module that is called first becomes root
    root.unshard()
    try:
        yield
    finally:
        root.reshard()


def check_not_gathered(gathered: Set[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Raise if an optimizer holds weights that FSDP had gathered for a forward pass."""
    held = {p for group in optimizer.param_groups for p in group["params"]}
    if gathered & held:
        raise ConfigError(
            f"The {type(optimizer).__name__} was built after a forward pass of the sharded model, "
            f"got {len(gathered & held)} gathered weights in it. Build the optimizer before the "
            "first forward pass, or call model.reshard() before you build it."
        )


def gather_anew(model: nn.Module) -> None:
    """Make FSDP gather the values that sharded weights were given by `replace_values`."""
    reshard(model)  # a root module keeps what it gathered for the next forward pass
    for _, unit in _modules(model, "FSDPModule"):
        state = cast(Any, unit)._get_fsdp_state()
        # torch 2.11 has one group per module.
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        for group in filter(None, groups):
            for each in group.fsdp_params:
                each.reset_sharded_param()  # as torch does after load_state_dict


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


def sharded_like(tensor: Tensor, other: Tensor) -> Tensor:
    """Redistribute a sharded tensor like `other`; return any other tensor unchanged."""
    sharded, wanted = as_sharded(tensor), as_sharded(other)
    if sharded is None or wanted is None:
        return tensor
    whole: Tensor = sharded.redistribute(wanted.device_mesh, wanted.placements)
    return whole


def _local_shard(tensor: Tensor) -> Tensor:
    if type(tensor) in PLAIN:
        return tensor
    sharded = as_sharded(tensor)
    local: Tensor = tensor if sharded is None else sharded.to_local()
    return local


def _modules(model: nn.Module, kind: str) -> list[tuple[str, nn.Module]]:
    """Return the modules of a class of torch.distributed.fsdp, by name, outer ones first."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # as in `as_sharded`
    if fsdp is None:
        return []
    return [each for each in model.named_modules() if isinstance(each[1], getattr(fsdp, kind))]
