"""How much of the device a run used: model FLOPs per second against the peak rate."""

import statistics
from collections.abc import Sequence

import torch
from torch.utils.flop_counter import FlopCounterMode

from narrowcast.config import Recipe
from narrowcast.errors import UnsupportedError
from narrowcast.hardware.catalog import find_data_sheet
from narrowcast.precision.plan.plan import Plan
from narrowcast.precision.plan.policy import FP8_FORMATS
from narrowcast.training.data import batch_order, make_batches
from narrowcast.training.parallel import running_ranks
from narrowcast.training.task import LossParts, Task
from narrowcast.workloads import build_task

WARM_UP = 3
"""Steps that do not count: they compile, capture and allocate."""


def flops_per_item(recipe: Recipe, task: Task) -> float:
    """Return the model FLOPs of both passes per item, from shapes.

    Matrix products, convolutions and attention count. What is computed again does not.

    Raises:
        UnsupportedError: The workload needs values, not shapes, or has no such operations.
    """
    device = torch.device("meta")
    try:
        shapes = build_task(recipe, device=device)
        order = batch_order(len(task.train_data), recipe)
        with make_batches(task, recipe, order, start=0, device=device) as batches:
            batch = task.as_one_step([next(batches)])[0]
            items = batches.items
        with FlopCounterMode(display=False) as counter:
            loss = shapes.loss(shapes.model, batch)
            whole = loss.total if isinstance(loss, LossParts) else loss
            whole.backward()
    except Exception as error:  # the loss of a workload may need values
        text = str(error).partition("\n")[0]
        raise UnsupportedError(f"they need values, not shapes ({text})") from error
    total: int = counter.get_total_flops()
    if not items or not total:
        raise UnsupportedError("no matrix products, convolutions or attention were seen")
    return total / items


def achieved_line(recipe: Recipe, task: Task, plan: Plan, rates: Sequence[float]) -> str:
    """Return what share of the peak rate the median step reached; empty after too few steps.

    `rates` are the items per second of each step.
    """
    rates = rates[WARM_UP:]
    if not rates:
        return ""
    try:
        flops = flops_per_item(recipe, task)
    except UnsupportedError as error:
        return f"no share of the peak rate, because model FLOPs cannot be counted: {error}"
    per_second = statistics.median(rates) / running_ranks()
    rate, hardware = flops * per_second / 1e12, plan.hardware
    text = f"{_rate_text(rate)} of model FLOPs in the median step"
    sheet = find_data_sheet(hardware)
    if sheet is None:
        return f"{text}; the peak rate of {hardware.name} is not known"
    narrow = any(module.policy.forward in FP8_FORMATS for module in plan.modules)
    name = "fp8" if narrow else plan.policy.functional
    peak = sheet.tflops.get(name)
    if peak is None:
        return f"{text}; the data sheet of {hardware.name} has no rate for {name}"
    return f"{rate / peak:.1%} of possible: {text}, of {peak:,.4g} TFLOP/s in {name}"


def _rate_text(tflops: float) -> str:
    return f"{tflops:.3g} TFLOP/s" if tflops >= 1 else f"{tflops * 1e3:.3g} GFLOP/s"
