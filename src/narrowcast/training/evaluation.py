"""An evaluation in the middle of a run, of which the run notices nothing."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from narrowcast.errors import ConfigError, blamed_on
from narrowcast.hardware.randomness import preserve_rng
from narrowcast.precision.step.prepared import Prepared
from narrowcast.runs import FindingRecord, TaskInfo
from narrowcast.runs.task_info import AVERAGED
from narrowcast.runs.vitals import WEIGHTS_NOT_FINITE
from narrowcast.training.task import Task


def evaluate(prepared: Prepared, task: Task) -> dict[str, float]:
    """Return what the task measures, and `ema_…` the same for the average of the weights if kept.

    Runs in the formats of training. Leaves weights, modes and random generators as they were.
    Refuses metrics that the task has not declared, and an evaluation without the headline.
    """
    model = prepared.model
    device = next(model.parameters()).device
    with preserve_rng(device), in_eval_mode(model), torch.no_grad():
        with prepared.autocast():
            metrics = _measured(task, model)
        _require_declared(metrics, task.info)
        if prepared.has_ema:
            with prepared.use_ema(), prepared.autocast():
                averaged = _measured(task, model)
            metrics |= {f"{AVERAGED}{key}": value for key, value in averaged.items()}
    return metrics


def not_finite(
    metrics: Mapping[str, float], weights: str, *, step: int, lr: str
) -> Iterator[FindingRecord]:
    """Say which numbers of an evaluation are none, if any, and whether weights are to blame.

    `weights` says which of them are not finite. They may be although every such gradient was
    skipped: an update can overflow by itself. `lr` is how the learning rate is written.
    """
    if weights:
        yield _finding(
            step,
            role="weight",
            what=WEIGHTS_NOT_FINITE,
            why=weights,
            advice=f"go back to an earlier checkpoint, and try a lower {lr}",
        )
    bad = [f"{name} is {value}" for name, value in metrics.items() if not math.isfinite(value)]
    if bad:
        yield _finding(
            step,
            role="evaluation",
            what="evaluation not finite",
            why=f"{', '.join(bad)}: its passes run in the formats of training, on weights that "
            + ("are not finite" if weights else "are finite"),
            advice=""
            if weights
            else "look at the steps skipped before it, or at the data it is made with; try a wider "
            "precision.policy",
        )


def _finding(step: int, *, role: str, what: str, why: str, advice: str) -> FindingRecord:
    return FindingRecord(
        step=step,
        since=step,
        module="",
        role=role,
        what=what,
        why=why,
        action="",
        advice=advice,
    )


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Put every module in eval mode, and each back into the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _measured(task: Task, model: nn.Module) -> dict[str, float]:
    with blamed_on("the task's evaluation"):
        metrics = task.evaluate(model)
    return _numbers(metrics)


def _numbers(metrics: object) -> dict[str, float]:
    """Return metrics as plain numbers; tensors and NumPy's scalars are, if of one element."""
    if not isinstance(metrics, Mapping):
        raise ConfigError(
            f"the task's evaluation returned a {type(metrics).__name__}; return a dict of numbers "
            'by name, e.g. {"accuracy": 0.9}'
        )
    result = {}
    for name, value in metrics.items():
        try:
            if isinstance(value, bool | str):
                raise TypeError
            result[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise ConfigError(
                f"the task's evaluation returned {name}={value!r}, which is not a number; return "
                "one, e.g. tensor.mean().item()"
            ) from None
    return result


def _require_declared(metrics: Mapping[str, float], info: TaskInfo) -> None:
    declared = [metric.name for metric in info.metrics]
    if unknown := [name for name in metrics if name not in declared]:
        raise ConfigError(
            f"the task's evaluation returned {', '.join(unknown)}, and info.metrics declares "
            f"{', '.join(declared)}; add a Metric for each, which says whether higher is better"
        )
    if info.headline.name not in metrics:
        raise ConfigError(
            f"the task's evaluation returned {', '.join(metrics) or 'nothing'}, and not "
            f"{info.headline.name}, the first of info.metrics, by which runs are compared"
        )
