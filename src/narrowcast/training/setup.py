"""From a recipe and a plan to a prepared model."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.lr_scheduler import LambdaLR

from narrowcast.config.common_sections import (
    LossScaleSection,
    LrScheduleSection,
    ParallelSection,
)
from narrowcast.config.sections import Recipe
from narrowcast.config.strategy import StrategySection
from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.hardware.catalog import find_data_sheet
from narrowcast.hardware.profile import StepProfile
from narrowcast.health.faults.faults import Fault, Faults
from narrowcast.precision.gradients.loss_scale import LossScale
from narrowcast.precision.plan.plan import Plan
from narrowcast.precision.plan.policy import Policy
from narrowcast.precision.plan.rank_costs import choose_strategy
from narrowcast.precision.sharding import fully_shard
from narrowcast.precision.step.prepared import Prepared, prepare
from narrowcast.precision.weights.lookahead import Lookahead
from narrowcast.training.checkpoints.ranks import CheckpointRanks
from narrowcast.training.optimizers import FROZEN_UNTIL, build_optimizer, get_groups
from narrowcast.training.parallel import ALONE, RunRanks
from narrowcast.training.task import Task


def prepare_recipe(recipe: Recipe, task: Task, *, plan: Plan, ranks: RunRanks = ALONE) -> Prepared:
    """Prepare the task's model with a plan and the recipe's optimizer, schedule and loss scale."""
    model, settings = task.model, recipe.precision.loss_scale
    device = next(model.parameters()).device
    if ranks.several and (strategy_name := sharding(recipe, plan, ranks)) != "ddp":
        check_sharding(recipe, task, plan=plan)
        ranks.broadcast_from_main([*model.parameters(), *model.buffers()])  # as DDP does
        mesh = make_mesh(recipe.parallel, ranks, device.type, replicated=strategy_name == "hsdp")
        fully_shard(model, mesh, policy=plan, blocks=recipe.memory.blocks)
    optimizer = build_optimizer(recipe.optimizer, model, device=device, groups=get_groups(task))
    frozen_until = [group[FROZEN_UNTIL] for group in optimizer.param_groups]
    strategy = recipe.strategy
    stretch = strategy.lr_horizon if strategy.is_hybrid else 1.0
    factors = lr_factors(
        recipe.lr_schedule, recipe.steps, frozen_until=frozen_until, stretch=stretch
    )
    prepared = prepare(
        model,
        optimizer,
        policy=plan,
        clip_norm=recipe.clip_norm,
        scheduler=LambdaLR(optimizer, factors),
        loss_scale=make_loss_scales(settings, task) if plan.policy.needs_loss_scale else None,
        scale_groups=settings.scale_groups,
        ema_decay=recipe.ema.decay,
        max_skipped_steps=settings.max_skipped_steps,
        lookahead=make_lookahead(strategy),
    )
    log = prepared.engine.log
    log.wording = replace(log.wording, in_recipe=True)
    return prepared


def check_ranks(recipe: Recipe, task: Task, *, policy: Policy) -> None:
    """Raise if a recipe or a task cannot train on several ranks."""
    alone = "or train on one GPU with parallel.ranks=1"
    norms = [
        name
        for name, module in task.model.named_modules()
        if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm)
    ]
    if recipe.strategy.has_jumps:
        wrong = f"Jumps use one rank. Write strategy.preset=balanced, {alone}."
    elif recipe.precision.adapt.enabled:
        wrong = (
            "precision.adapt.enabled=true uses one rank, because each rank samples other tensors. "
            f"Write precision.adapt.enabled=false, {alone}."
        )
    elif recipe.cuda_graph:
        wrong = f"cuda_graph=true cannot capture collectives. Write cuda_graph=false, {alone}."
    elif task.scaled_losses and policy.needs_loss_scale:
        wrong = (
            "Several losses with a loss scale each need several backward passes, which DDP does "
            f"not support. Write precision.policy=bf16, {alone}."
        )
    elif task.prepare_microbatches is not None and task.loss_terms is None:
        wrong = (
            f"The task {recipe.workload} weighs the micro-batches of one process. Train it with "
            "parallel.ranks=1. In a task of your own, pass loss_terms."
        )
    elif hooks := [hook.name for hook in task.hooks if hook.one_rank]:
        wrong = f"{hooks[0]} of {recipe.workload} uses one rank. Leave it out, {alone}."
    elif norms:
        wrong = (
            f"{norms[0]} is a batch norm, whose statistics would be those of each rank's samples. "
            f"Use torch.nn.SyncBatchNorm or another norm, {alone}."
        )
    else:
        return
    raise UnsupportedError(wrong)


def sharding(recipe: Recipe, plan: Plan, ranks: RunRanks) -> str:
    """Return the parallel strategy: the recipe's, or ddp for what fits and else shards."""
    return choose_strategy(
        plan, recipe.parallel.strategy, ranks=ranks.size, per_machine=ranks.local_size
    )


def check_sharding(recipe: Recipe, task: Task, *, plan: Plan) -> None:
    """Raise if a run cannot shard its weights."""
    narrow = [
        name
        for name, weight in task.model.state_dict(keep_vars=True).items()
        if weight.dtype.itemsize == 1 and weight.dtype != torch.bool
    ]
    if recipe.strategy.is_hybrid:
        wrong = "Hybrid training needs whole weights. Write parallel.strategy=ddp."
    elif task.edits_gradients:
        wrong = f"{recipe.workload} edits whole gradients. Write parallel.strategy=ddp."
    elif narrow:
        wrong = (
            f"{narrow[0]} has 8 bits, which torch cannot gather everywhere. Use frozen weights of "
            "16 bits, such as model.base_dtype=bf16, or write parallel.strategy=ddp."
        )
    elif recipe.precision.adapt.overflows:
        wrong = (
            "precision.adapt.overflows may widen the storage of weights. Leave it out, or write "
            "parallel.strategy=ddp."
        )
    elif {"weight", "grad_weight"} & {fault.role for fault in recipe.fault_injection}:
        wrong = (
            "fault_injection reaches whole weights only. Write role input, output or grad_output, "
            "or parallel.strategy=ddp."
        )
    elif recipe.memory.offload:
        wrong = "memory.offload needs whole weights. Leave it out, or write parallel.strategy=ddp."
    elif recipe.checkpoint.background and not CheckpointRanks().has_own_group:
        wrong = (
            "checkpoint.background=true needs gloo beside the process group of training. Write "
            "checkpoint.background=false."
        )
    else:
        return
    raise UnsupportedError(f"Sharding (fsdp, hsdp) does not support this recipe. {wrong}")


def make_mesh(settings: ParallelSection, ranks: RunRanks, device: str, *, replicated: bool) -> Any:
    """Return the mesh of all ranks: one dimension to shard over, or one more for replicas."""
    from torch.distributed.device_mesh import init_device_mesh

    if not replicated:
        return init_device_mesh(device, (ranks.size,), mesh_dim_names=("shard",))
    shard = settings.shard or ranks.local_size
    if ranks.size % shard or shard == ranks.size:
        raise ConfigError(
            f"parallel.shard must divide the {ranks.size} ranks into several groups, got {shard}. "
            "Write another parallel.shard, or parallel.strategy=fsdp."
        )
    shape = (ranks.size // shard, shard)
    return init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))


def make_lookahead(strategy: StrategySection) -> Lookahead | None:
    """Return the lookahead of a strategy, or None."""
    if not strategy.has_lookahead:
        return None
    settings = strategy.lookahead
    return Lookahead(
        interpolation=settings.interpolation,
        rate=settings.rate,
        storage=settings.storage,
        begins_after=strategy.lookahead_after,
    )


def make_loss_scales(settings: LossScaleSection, task: Task) -> LossScale | dict[str, LossScale]:
    """Return the recipe's loss scale, or one per loss that has its own."""
    scale = LossScale(
        init_scale=settings.init_scale,
        growth_factor=settings.growth_factor,
        backoff_factor=settings.backoff_factor,
        growth_interval=settings.growth_interval,
        min_scale=settings.min_scale,
        max_scale=settings.max_scale,
        hysteresis=settings.hysteresis,
        dynamic=settings.dynamic,
    )
    return dict.fromkeys(task.scaled_losses, scale) or scale


def make_faults(prepared: Prepared, recipe: Recipe) -> Faults | None:
    """Return the recipe's fault injection, or None."""
    requested = [Fault(**section.model_dump()) for section in recipe.fault_injection]
    return Faults(prepared.model, requested, seed=recipe.seed) if requested else None


def make_profile(recipe: Recipe, prepared: Prepared, *, folder: Path | None) -> StepProfile | None:
    """Return the profiler for the recipe's `profile.steps`, or None."""
    if not recipe.profile.steps:
        return None
    if folder is None:
        raise ConfigError(
            "profile.steps needs a run folder for its trace, got "
            f"profile.steps={recipe.profile.steps} without one. Pass out=, or write "
            "profile.steps=0."
        )
    device = next(prepared.model.parameters()).device
    # Compiled code would be compiled again with hooks, and a replayed graph calls no module.
    called = prepared.plan.execution == "eager" or (device.type == "cpu" and not recipe.compile)
    return StepProfile(
        first=recipe.profile.first,
        steps=recipe.profile.steps,
        device=device,
        folder=folder,
        model=prepared.model if called else None,
        gpu=find_data_sheet(prepared.plan.hardware),
    )


def lr_factors(
    settings: LrScheduleSection,
    steps: int,
    *,
    frozen_until: Sequence[float],
    stretch: float = 1.0,
) -> list[Callable[[int], float]]:
    """Return the factor of each parameter group, 0 while the group is frozen."""
    factor = lr_factor(settings, steps, stretch=stretch)

    def after(share: float) -> Callable[[int], float]:
        begins = math.ceil(share * steps)
        return lambda updates: 0.0 if updates < begins else factor(updates)

    return [after(share) if share else factor for share in frozen_until]


def lr_factor(
    settings: LrScheduleSection, steps: int, *, stretch: float = 1.0
) -> Callable[[int], float]:
    """Return the factor on the learning rate as a function of the updates so far, for `LambdaLR`.

    It falls to `settings.min_lr_ratio` after `stretch` times `steps` updates.
    """

    warmup = settings.warmup_steps(steps)

    def factor(updates: int) -> float:
        if updates < warmup:
            return (updates + 1) / warmup
        length = max(round(steps * stretch) - warmup, 1)
        progress = min((updates - warmup) / length, 1.0)
        match settings.name:
            case "constant":
                return 1.0
            case "linear":
                return 1.0 - (1.0 - settings.min_lr_ratio) * progress
            case "cosine":
                fall = (1.0 + math.cos(math.pi * progress)) / 2
                return settings.min_lr_ratio + (1.0 - settings.min_lr_ratio) * fall

    return factor
