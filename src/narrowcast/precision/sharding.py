"""Gradients and weights over several ranks: FSDP2 by storage format, and how DDP adds up.

`fully_shard` comes before `prepare`, which converts the layers in place and binds master weights,
moments and averages to the shards of this rank. DDP comes after it.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.precision.dtensor import as_sharded
from narrowcast.precision.modules.rewrite import storage_dtype, weight_formats
from narrowcast.precision.plan.memory import block_names, repeated_blocks
from narrowcast.precision.plan.plan import Plan, make_plan
from narrowcast.precision.plan.policy import AnyPolicy, policy_from
from narrowcast.precision.swap import is_swapped

SMALL = 0.01
"""Largest share of a group's weights that stays whole on every rank."""
GROUP = 50_000_000
"""Weights from which a group is large enough: FSDP2 takes about 2 ms of the host per group."""


def fully_shard(
    model: nn.Module,
    mesh: Any = None,
    *,
    policy: AnyPolicy | Plan = "default",
    blocks: Sequence[str] = (),
    **settings: Any,
) -> nn.Module:
    """Shard a model over ranks with FSDP2, in the storage formats of a policy.

    Calls `torch.distributed.fsdp.fully_shard` per block, or per several small blocks that follow
    each other. Gradients are reduced in the policy's `reduce` format.

    FSDP2 gathers one storage format at a time. Modules with another format than the rest of their
    block become a group of their own. If they are small, such as fp32 norms among bf16 layers, they
    stay whole on every rank instead, with the values of the first rank. So do scalar weights.
    `Prepared.step` averages their gradients.

    Build the optimizer and call `prepare` with the same policy afterwards.

    Args:
        model: The model, before `prepare`, on its device.
        mesh: A 1-D `DeviceMesh`, or a 2-D one for HSDP, which replicates over the first dimension
            and shards over the second. None: all ranks.
        policy: As in `prepare`.
        blocks: Globs of the modules to shard one by one. Empty: the modules of each list of
            several modules of one class, together up to 50 million weights.
        **settings: Further arguments of torch's `fully_shard`, such as `reshard_after_forward`
            (False on one rank, else as in torch), `offload_policy` or `ignored_params`.

    Returns:
        The same model.

    Raises:
        ConfigError: The model is sharded or prepared already, or an argument is invalid.
        UnsupportedError: A module holds trainable weights of two storage formats.

    Example:
        ```python
        nc.fully_shard(model, policy="bf16, params=bf16, master=split")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        run = nc.prepare(model, optimizer, policy="bf16, params=bf16, master=split")
        ```
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.fsdp import fully_shard as shard
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    if "mp_policy" in settings:
        raise ConfigError(
            "fully_shard() takes its formats from policy, got mp_policy too. Leave mp_policy out; "
            "params= and reduce= in the policy set what is gathered and reduced."
        )
    if is_swapped(model):
        raise ConfigError(
            "This model is prepared already. Call nc.fully_shard() first, build the optimizer, and "
            "call prepare() last."
        )
    sharded = [name for name, p in model.named_parameters() if as_sharded(p) is not None]
    if sharded:
        raise ConfigError(f"{sharded[0]} is sharded already. Call fully_shard() once per model.")
    plan = policy if isinstance(policy, Plan) else make_plan(model, policy)
    settings["mesh"] = _checked_mesh(mesh, model)
    if settings["mesh"].size(-1) == 1:  # nothing is sharded, and freeing the weights saves no copy
        settings.setdefault("reshard_after_forward", False)
    # Where one rank holds all, nothing is added up, and gradients stay in the format they have.
    reduce = storage_dtype(plan.policy.reduce) if settings["mesh"].size() > 1 else None
    settings["mp_policy"] = MixedPrecisionPolicy(reduce_dtype=reduce)
    trained = {p for p in model.parameters() if p.requires_grad}
    formats = weight_formats(model, plan, trained)
    # torch shards no scalars.
    whole = {p for p in model.parameters() if p.dim() == 0}
    settings["ignored_params"] = ignored = {*whole, *(settings.get("ignored_params") or ())}
    # Without it, torch does not finish a group of which a block was left out, as by layer drop.
    least = GROUP if hasattr(FSDPState, "_force_complete_incomplete_states") else 0
    taken: set[nn.Module] = set()
    for group in (*_groups(model, blocks, least=least), [model]):
        inside = [each for block in group for each in block.modules() if each not in taken]
        taken.update(inside)
        for others in _other_formats(inside, formats, ignored):
            if _are_small(others, group):
                whole.update(p for each in others for p in each.parameters(recurse=False))
                ignored.update(whole)
            else:
                shard(others, **settings)
        shard(group, **settings)
    _broadcast(whole, settings["mesh"])
    return model


def set_reduce_format(
    parallel: DistributedDataParallel, policy: AnyPolicy | Plan = "default"
) -> None:
    """Make DDP add up gradients in the policy's `reduce` format, fp32 by default.

    DDP adds up 16-bit gradients in 16 bits otherwise, and rounds once per rank.

    Args:
        parallel: The wrapper around the prepared model, before its first forward pass.
        policy: As in `prepare`.

    Example:
        ```python
        run = nc.prepare(model, optimizer, policy="bf16, params=bf16, master=split")
        parallel = DistributedDataParallel(model)
        nc.set_reduce_format(parallel, run.plan)
        ```
    """
    requested = policy.policy if isinstance(policy, Plan) else policy_from(policy)
    dtype = storage_dtype(requested.reduce)
    trained = [p for p in parallel.parameters() if p.requires_grad]
    if any((p.grad_dtype or p.dtype) != dtype for p in trained):
        parallel.register_comm_hook((parallel.process_group, dtype), _reduce_bucket)


def _reduce_bucket(
    state: tuple[Any, torch.dtype],
    bucket: torch.distributed.GradBucket,  # type: ignore[name-defined]  # torch lacks its type
) -> torch.futures.Future[Tensor]:
    group, dtype = state
    own = bucket.buffer()
    # Divided first, as DDP does, so that fp16 does not overflow.
    shares = own.to(dtype, copy=True).div_(group.size())
    work: Any = torch.distributed.all_reduce(shares, group=group, async_op=True)
    rounded: torch.futures.Future[Tensor] = work.get_future().then(
        lambda done: own.copy_(done.value()[0])
    )
    return rounded


def _groups(model: nn.Module, globs: Sequence[str], *, least: int) -> list[list[nn.Module]]:
    """Return the blocks that FSDP gathers together: `least` weights of one list, or one block."""
    if globs:
        return [[model.get_submodule(name)] for name in block_names(model, globs)]
    groups, last = list[list[nn.Module]](), ""
    for name, block in repeated_blocks(model):
        parent = name.rpartition(".")[0]
        if not groups or parent != last or sum(map(_size, groups[-1])) >= least:
            groups.append([])
        groups[-1] += [block] if _size(block) else []
        last = parent
    return [group for group in groups if group]


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _other_formats(
    modules: Sequence[nn.Module], formats: dict[nn.Parameter, str], ignored: set[nn.Parameter]
) -> Iterator[list[nn.Module]]:
    """Yield the modules of each storage format but the most common, which FSDP gathers apart."""
    by_format: dict[str, list[nn.Module]] = {}
    sizes: Counter[str] = Counter()
    for module in modules:
        own = [p for p in module.parameters(recurse=False) if p.requires_grad and p not in ignored]
        stored = {formats.get(p, "fp32") for p in own}
        if len(stored) > 1:
            names = ", ".join(f"{n} in {formats.get(p, 'fp32')}" for n, p in
                              module.named_parameters(recurse=False))  # fmt: skip
            raise UnsupportedError(
                "fully_shard() needs one storage format per module, got "
                f"{names} in a {type(module).__name__}. Write params=fp32 for this module in the "
                "policy."
            )
        for name in stored:
            by_format.setdefault(name, []).append(module)
            sizes[name] += sum(p.numel() for p in own)
    common = max(sizes, key=lambda name: sizes[name], default="")
    yield from (some for name, some in by_format.items() if name != common)


def _are_small(modules: Sequence[nn.Module], group: Sequence[nn.Module]) -> bool:
    """Return whether to gather these weights of a group would cost more than to hold them."""
    own = [p for each in modules for p in each.parameters(recurse=False)]
    held = sum(map(_size, group))
    return sum(p.numel() for p in own) <= SMALL * held and not any(p.is_meta for p in own)


@torch.no_grad()
def _broadcast(weights: Iterable[nn.Parameter], mesh: Any) -> None:
    for weight in weights:
        for group in mesh.get_all_groups() if not weight.is_meta else ():
            torch.distributed.broadcast(weight, group_src=0, group=group)


def _checked_mesh(mesh: Any, model: nn.Module) -> Any:
    """Return the mesh to shard over, all ranks if none is given."""
    if not torch.distributed.is_initialized():
        raise ConfigError(
            "fully_shard() needs a process group. Launch with torchrun and call "
            "torch.distributed.init_process_group() first."
        )
    if mesh is None:
        from torch.distributed.device_mesh import init_device_mesh

        device = next(model.parameters()).device.type
        return init_device_mesh(device, (torch.distributed.get_world_size(),))
    if mesh.ndim == 2 and not mesh.mesh_dim_names:
        raise ConfigError(
            "A 2-D mesh for HSDP needs names of its dimensions. Write init_device_mesh(device, "
            'shape, mesh_dim_names=("replicate", "shard")).'
        )
    if mesh.ndim > 2:
        raise ConfigError(
            f"fully_shard() needs a mesh of one or two dimensions, got {mesh.ndim}. Pass a part "
            'of it, such as mesh["replicate", "shard"].'
        )
    return mesh
