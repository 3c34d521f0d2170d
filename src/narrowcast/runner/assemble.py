"""From a recipe to a prepared model; errors are raised before anything is trained."""

from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from narrowcast.config import Recipe
from narrowcast.config.files import check_files
from narrowcast.config.phases import PhaseSection
from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.hardware import Hardware, detect_hardware
from narrowcast.hardware.catalog import GPUS_PER_NODE, find_data_sheet
from narrowcast.numerics import FORMATS
from narrowcast.precision.plan.plan import Plan, with_losses
from narrowcast.precision.plan.policy import Policy, policy_from
from narrowcast.precision.plan.rank_costs import RankCosts, choose_strategy, rank_costs
from narrowcast.precision.step.prepared import Prepared
from narrowcast.report.phrases import size
from narrowcast.runs import Record
from narrowcast.strategies.hybrid.phase_formats import phase_policies
from narrowcast.strategies.hybrid.plan import STRATEGY, described, phase_plans
from narrowcast.strategies.hybrid.strategy import HybridStrategy
from narrowcast.training.data import batch_order
from narrowcast.training.parallel import ALONE, RunRanks
from narrowcast.training.phase_plans import each_phase, get_phases, phases_json, plan_phases
from narrowcast.training.setup import check_ranks, prepare_recipe, sharding
from narrowcast.training.strategy import PLAIN, Strategy
from narrowcast.training.task import Task
from narrowcast.training.train_loop import train_loop
from narrowcast.workloads import build_task


@dataclass(frozen=True, kw_only=True)
class Assembled:
    """Everything a run needs except its folder."""

    recipe: Recipe
    """The requested recipe, with epochs converted to steps."""
    task: Task
    prepared: Prepared
    plans: tuple[Plan, ...]
    """One plan per phase; the model is prepared for the first."""
    strategy: Strategy
    """What acts between steps; plain training does nothing."""
    ranks: RunRanks = ALONE

    def records(
        self,
        recipe: Recipe,
        *,
        folder: Path | None,
        resume: dict[str, Any] | None = None,
        accept: Collection[str] = (),
    ) -> Generator[Record]:
        return train_loop(
            self.prepared,
            self.task,
            recipe,
            folder=folder,
            resume=resume,
            accept=accept,
            strategy=self.strategy,
            ranks=self.ranks,
        )


def assemble(recipe: Recipe, *, ranks: RunRanks = ALONE) -> Assembled:
    """Build the task, the prepared model and the strategy of `recipe` on its device."""
    recipe = recipe.model_copy(update={"device": ranks.device(recipe.device)})
    hardware = check_settings(recipe)
    phases = planned(recipe, hardware)
    largest = max(phases, key=lambda plan: sum(plan.bytes.values()))
    if not ranks.several or sharding(recipe, largest, ranks) == "ddp":
        _require_memory(largest)
    task = build_task(recipe, device=torch.device(hardware.device))
    phases = tuple(with_losses(plan, task.model) for plan in phases)
    # The trainer would find a batch that is too large only once the run has begun.
    batch_order(len(task.train_data), recipe, rank=ranks.rank, ranks=ranks.size)
    if ranks.several:
        for plan in phases:
            check_ranks(recipe, task, policy=plan.policy)
    recipe = recipe.for_samples(len(task.train_data))
    prepared = prepare_recipe(recipe, task, plan=phases[0], ranks=ranks)
    strategy: Strategy = PLAIN
    if recipe.strategy.is_hybrid:
        strategy = HybridStrategy(prepared, task, recipe, ranks=ranks)
    return Assembled(
        recipe=recipe, task=task, prepared=prepared, plans=phases, strategy=strategy, ranks=ranks
    )


def check_settings(recipe: Recipe) -> Hardware:
    """Raise for a missing device, policy or file before a model is built; return the hardware."""
    hardware = detect_hardware(recipe.device)
    check_policies(recipe, hardware)
    check_files(recipe)
    return hardware


def check_policies(recipe: Recipe, hardware: Hardware) -> None:
    """Raise for a policy that cannot be parsed, in any phase of the run."""

    def parsed(phase: PhaseSection) -> Policy:
        return policy_from(phase.policy or "default", hardware).with_exceptions(phase.overrides)

    phases = get_phases(recipe.precision)
    if len(phases) == 1:
        parsed(phases[0])
    else:
        each_phase(phases, parsed)
    if recipe.strategy.has_phase_policies:
        for phase, text in phase_policies(recipe.strategy, recipe.precision.policy).items():
            try:
                policy_from(text, hardware)
            except ConfigError as error:
                raise ConfigError(f"phase {phase} of the strategy: {error}") from error


def planned(recipe: Recipe, hardware: Hardware) -> tuple[Plan, ...]:
    """Plan each phase of `recipe` from its model's shapes; allocates no weights."""
    check_policies(recipe, hardware)
    task = build_task(recipe, device=torch.device("meta"))
    return plan_phases(recipe, task.model, hardware=hardware, gemm_rows=task.gemm_rows)


def _require_memory(plan: Plan) -> None:
    """Raise if weights, gradients and optimizer alone are larger than the device."""
    hardware, needed = plan.hardware, sum(plan.bytes.values())
    if hardware.memory_bytes is not None and needed > hardware.memory_bytes:
        raise UnsupportedError(
            f"Weights, gradients and optimizer state need {size(needed)}, and {hardware.name} "
            f"({hardware.device}) has {size(hardware.memory_bytes)}. Use a smaller model, or fewer "
            "bytes per weight, for example precision.policy=bf16-pure."
        )


def plan_json(
    recipe: Recipe, plans: Sequence[Plan], *, task_row: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the plan a run starts with, its phases, its task's row and its strategy."""
    info = phases_json(recipe, plans, task_row=task_row)
    strategy = strategy_row(recipe, plans[0])
    ranks = ranks_row(recipe, plans[0])
    info = info if strategy is None else {**info, STRATEGY: strategy}
    return info if ranks is None else {**info, "parallel": ranks}


def costs_per_rank(recipe: Recipe, plan: Plan) -> RankCosts | None:
    """Return what one of `parallel.ranks` stores and sends; None for one rank."""
    settings = recipe.parallel
    if settings.ranks is None or settings.ranks == 1:
        return None
    return rank_costs(
        plan,
        ranks=settings.ranks,
        strategy=choose_strategy(
            plan, settings.strategy, ranks=settings.ranks, per_machine=GPUS_PER_NODE
        ),
        shard=settings.shard or min(GPUS_PER_NODE, settings.ranks),
        micro_batches=recipe.gradient_accumulation_steps,
    )


def ranks_row(recipe: Recipe, plan: Plan) -> dict[str, Any] | None:
    """Return the predicted memory and traffic of one of `parallel.ranks`; None for one rank."""
    costs, gpu = costs_per_rank(recipe, plan), find_data_sheet(plan.hardware)
    if costs is None:
        return None
    row = {**costs.to_json(), "predicted": True}
    if gpu is None:
        return row
    rates = {"link_rate": gpu.link_rate, "network_rate": gpu.network_rate}
    return {**row, **rates, "seconds": costs.seconds(**rates, per_node=GPUS_PER_NODE)}


def strategy_row(recipe: Recipe, plan: Plan) -> dict[str, Any] | None:
    """Return the strategy of a run as plain data; None for plain training."""
    if not recipe.strategy.is_hybrid:
        return None
    grads = FORMATS[plan.policy.grads_format].bytes if plan.policy.params != "fp32" else 4
    return described(
        recipe,
        phase_plans(recipe, plan, build=lambda: build_task(recipe, device=torch.device("meta"))),
        trained_weights=round(plan.bytes.get("grads", 0) / grads),
    )
