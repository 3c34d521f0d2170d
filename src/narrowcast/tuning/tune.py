"""`nc.tune`: the fastest policy for a model under a budget on loss, memory and time."""

import itertools
import logging
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from narrowcast.errors import ConfigError
from narrowcast.hardware import Hardware, detect_hardware
from narrowcast.hardware.catalog import named_hardware
from narrowcast.precision.estimate.dry_run import estimate_step, without_values
from narrowcast.precision.plan.gains import ASSUMED_ROWS, Execution
from narrowcast.precision.plan.plan import make_plan
from narrowcast.precision.plan.policy import Policy
from narrowcast.tuning.budget import Budget
from narrowcast.tuning.check import CheckRuns, CheckSettings, check_choice
from narrowcast.tuning.choosing import Chooser
from narrowcast.tuning.measuring import GroupMeter, Progress
from narrowcast.tuning.optimizers import fresh_optimizer
from narrowcast.tuning.options import Rates
from narrowcast.tuning.result import TuneResult
from narrowcast.tuning.updates import LossFunction, UpdateMeter, total_loss

_log = logging.getLogger(__name__)


def tune(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: LossFunction,
    *,
    budget: str | Budget | Iterable[str] = "loss=1%",
    optimizer: torch.optim.Optimizer | None = None,
    hardware: str | Hardware | None = None,
    gemm_rows: int = ASSUMED_ROWS,
    execution: Execution = "eager",
    measure_batches: int = 3,
    check_steps: int = 40,
    clip_norm: float | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> TuneResult:
    """Find the fastest policy for a model under a budget.

    Measures how far the update moves from that in fp32 for every group of layers and every kind of
    product, in emulated formats. Adds the time and memory of each choice on the hardware, and
    searches exactly. A short training run then confirms or withdraws the choice. The model and the
    optimizer are left as they were.

    Args:
        model: The model, not prepared.
        batches: Batches for `loss_fn`, on the device of the model. The first `measure_batches`
            measure updates; the next ones train in the check run. They may be endless.
        loss_fn: Called with the model and a batch; returns the mean loss.
        budget: `loss=0.5%` (progress per step that may be lost), `memory=20GiB`, and
            `time=12ms` or `time=80%` (products of the linear layers, absolute or against 16 bits).
            With a limit on loss the fastest policy is chosen, else the most accurate one.
        optimizer: The optimizer whose updates count, with its settings and state. None: AdamW.
        hardware: The GPU to tune for: `h200`, …, or a `Hardware`. None: the model's device.
        gemm_rows: Rows that a linear layer multiplies at once, for example tokens per micro-batch.
        execution: How the model will run: "eager", "compiled" or "graphed".
        measure_batches: Batches that measure updates. More of them cost time and give less noise.
        check_steps: Steps of the check run. 0: no check.
        clip_norm: Gradient clipping in the check run.
        seed: Seed of the random numbers that the model draws.
        progress: Called with a line of text as the search goes on. None: a terminal shows it.

    Returns:
        The policy with its reasons. Print it, or `save` it as a policy file.

    Raises:
        ConfigError: An argument is invalid, or no policy is within the budget.
        UnsupportedError: The optimizer is not supported.

    Example:
        >>> result = nc.tune(model, loader, loss_fn, budget="loss=0.5%", hardware="h200")
        >>> result.save("policy.yaml")
    """
    if measure_batches < 1:
        raise ConfigError(f"measure_batches must be at least 1, got {measure_batches}.")
    if check_steps < 0:
        raise ConfigError(f"check_steps must be at least 0, got {check_steps}.")
    limits, target, tell = Budget.parse(budget), _hardware(hardware, model), progress or _show
    source = iter(batches)
    first = list(itertools.islice(source, measure_batches))
    if not first:
        raise ConfigError("batches must have at least one batch, got none.")
    rates = Rates(hardware=target, rows=gemm_rows, execution=execution)
    if limits.limits_time and not rates.source:
        raise ConfigError(
            f"A budget of time needs the rates of a GPU, got {limits} on {target.name}. Write "
            "hardware=h200, or leave time out."
        )
    peak = None
    if limits.memory is not None:
        # Measured batches may be smaller than those of a step.
        batch = next(source, first[0])
        source = itertools.chain([batch], source)
        peak = _peak_predictor(model, batch, loss_fn, rates=rates, optimizer=optimizer)
    tell("measuring the update in fp32")
    updates = UpdateMeter(model, first, loss_fn, optimizer=optimizer, seed=seed)
    try:
        meter = GroupMeter(model, rates, updates, tell=tell)
        groups, outside = meter.groups(), meter.outside()
        storage = None
        if limits.memory is not None:
            storage = updates.error(Policy(params="bf16", master="split")).lost
        chooser = Chooser(
            model,
            groups,
            meter,
            budget=limits,
            rates=rates,
            lost_outside=outside,
            lost_by_storage=storage,
            peak=peak,
        )
        result = chooser.choose(updates, tell=tell)
    finally:
        updates.close()
    if not check_steps or not result.time_source:
        return result
    settings = CheckSettings(steps=check_steps, seed=seed, clip_norm=clip_norm, rates=rates)
    runs = CheckRuns(model, source, loss_fn, optimizer=optimizer, settings=settings, tell=tell)
    check = check_choice(result, runs)
    result = replace(result, check=check)
    return chooser.with_preset(result, check.instead) if check.instead else result


def _peak_predictor(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFunction,
    *,
    rates: Rates,
    optimizer: torch.optim.Optimizer | None,
) -> Callable[[Policy], int]:
    """Return a function that predicts the memory of a step under a policy, by a dry run."""
    shapes = without_values(model)
    names = {id(weight): name for name, weight in model.named_parameters()}

    def peak(policy: Policy) -> int:
        plan = make_plan(
            shapes,
            policy,
            hardware=rates.hardware,
            gemm_rows=rates.rows,
            execution=rates.execution,
        )
        estimate = estimate_step(
            shapes,
            plan,
            batch=batch,
            loss=lambda made, each: total_loss(loss_fn(made, each)),
            optimizer=lambda made: fresh_optimizer(made, optimizer, names=names),
        )
        return estimate.memory.needed

    return peak


def _hardware(requested: str | Hardware | None, model: nn.Module) -> Hardware:
    if isinstance(requested, Hardware):
        return requested
    if requested is not None:
        return named_hardware(requested)
    first = next(model.parameters(), None)
    if first is None:
        raise ConfigError("The model has no weights to train. Pass a model with parameters.")
    return detect_hardware(str(first.device))


def _show(line: str) -> None:
    """Show progress on a terminal, else log it."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[Ktune: {line[:100]}")
        sys.stderr.flush()
    else:
        _log.info(line)
