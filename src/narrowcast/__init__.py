"""narrowcast: mixed- and low-precision training for PyTorch.

Names are imported when first used, so that a command that needs no torch does not wait for it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same names, for those who read types rather than run
    from narrowcast.config.workload import Workload as Workload
    from narrowcast.hardware import Hardware as Hardware
    from narrowcast.hardware import detect_hardware as detect_hardware
    from narrowcast.health.audit import Audit as Audit
    from narrowcast.health.audit import audit as audit
    from narrowcast.health.diagnose.diagnosis import Diagnosis as Diagnosis
    from narrowcast.health.diagnose.explain import explain as explain
    from narrowcast.health.monitor import monitor as monitor
    from narrowcast.integrations.accelerate import Accelerator as Accelerator
    from narrowcast.integrations.transformers import TrainerMixin as TrainerMixin
    from narrowcast.integrations.transformers import attach as attach
    from narrowcast.integrations.transformers import trainer_precision as trainer_precision
    from narrowcast.precision.estimate.planning import plan as plan
    from narrowcast.precision.fused.linear_cross_entropy import (
        linear_cross_entropy as linear_cross_entropy,
    )
    from narrowcast.precision.gradients.loss_scale import LossScale as LossScale
    from narrowcast.precision.plan.memory import Memory as Memory
    from narrowcast.precision.plan.plan import Plan as Plan
    from narrowcast.precision.plan.policy import PRESETS as PRESETS
    from narrowcast.precision.plan.policy import Policy as Policy
    from narrowcast.precision.plan.policy import policy_from as policy  # noqa: F401
    from narrowcast.precision.plan.tasks import TASKS as TASKS
    from narrowcast.precision.plan.tasks import TaskPrecision as TaskPrecision
    from narrowcast.precision.plan.tasks import apply_task as apply_task
    from narrowcast.precision.plan.tasks import optimal_precision as optimal_precision
    from narrowcast.precision.sharding import fully_shard as fully_shard
    from narrowcast.precision.sharding import set_reduce_format as set_reduce_format
    from narrowcast.precision.step.outcome import Outcome as Outcome
    from narrowcast.precision.step.prepared import Prepared as Prepared
    from narrowcast.precision.step.prepared import prepare as prepare
    from narrowcast.precision.weights.frozen_base import dequantize_frozen as dequantize_frozen
    from narrowcast.precision.weights.frozen_base import quantize_frozen as quantize_frozen
    from narrowcast.precision.weights.lookahead import Lookahead as Lookahead
    from narrowcast.runner.report_sections import write_run_report as write_report  # noqa: F401
    from narrowcast.runner.run import Run as Run
    from narrowcast.runner.run import RunResult as RunResult
    from narrowcast.runner.run import plan_recipe as plan_recipe
    from narrowcast.runner.run import resume as resume
    from narrowcast.runner.run import train as train
    from narrowcast.runner.tune import tune_recipe as tune_recipe
    from narrowcast.runs import Metric as Metric
    from narrowcast.runs import ReportSection as ReportSection
    from narrowcast.runs import TaskInfo as TaskInfo
    from narrowcast.strategies.hybrid.loop import HybridRun as HybridRun
    from narrowcast.strategies.hybrid.loop import hybrid as hybrid
    from narrowcast.training.checkpoints.data_identity import fingerprint as fingerprint
    from narrowcast.training.checkpoints.export import save_model as save_model
    from narrowcast.training.checkpoints.run_checkpoint import PendingSave as PendingSave
    from narrowcast.training.checkpoints.run_checkpoint import load_checkpoint as load_checkpoint
    from narrowcast.training.checkpoints.run_checkpoint import save_checkpoint as save_checkpoint
    from narrowcast.training.task import EvalBatches as EvalBatches
    from narrowcast.training.task import Hook as Hook
    from narrowcast.training.task import LossParts as LossParts
    from narrowcast.training.task import ParameterGroup as ParameterGroup
    from narrowcast.training.task import Task as Task
    from narrowcast.tuning.tune import tune as tune
    from narrowcast.workloads import load_recipe as load_recipe

__version__ = "0.1.0"

_HOMES = {
    "Audit": "health.audit",
    "Accelerator": "integrations.accelerate",
    "TrainerMixin": "integrations.transformers",
    "attach": "integrations.transformers",
    "trainer_precision": "integrations.transformers",
    "PRESETS": "precision.plan.policy",
    "Hardware": "hardware",
    "EvalBatches": "training.task",
    "Hook": "training.task",
    "HybridRun": "strategies.hybrid.loop",
    "Lookahead": "precision.weights.lookahead",
    "LossParts": "training.task",
    "LossScale": "precision.gradients.loss_scale",
    "Memory": "precision.plan.memory",
    "Metric": "runs",
    "Outcome": "precision.step.outcome",
    "ParameterGroup": "training.task",
    "Plan": "precision.plan.plan",
    "Policy": "precision.plan.policy",
    "Prepared": "precision.step.prepared",
    "ReportSection": "runs",
    "Run": "runner.run",
    "RunResult": "runner.run",
    "TASKS": "precision.plan.tasks",
    "Task": "training.task",
    "TaskInfo": "runs",
    "TaskPrecision": "precision.plan.tasks",
    "Diagnosis": "health.diagnose.diagnosis",
    "Workload": "config.workload",
    "apply_task": "precision.plan.tasks",
    "audit": "health.audit",
    "fully_shard": "precision.sharding",
    "set_reduce_format": "precision.sharding",
    "fingerprint": "training.checkpoints.data_identity",
    "explain": "health.diagnose.explain",
    "hybrid": "strategies.hybrid.loop",
    "quantize_frozen": "precision.weights.frozen_base",
    "linear_cross_entropy": "precision.fused.linear_cross_entropy",
    "load_recipe": "workloads",
    "optimal_precision": "precision.plan.tasks",
    "plan": "precision.estimate.planning",
    "plan_recipe": "runner.run",
    "policy": "precision.plan.policy:policy_from",
    "PendingSave": "training.checkpoints.run_checkpoint",
    "load_checkpoint": "training.checkpoints.run_checkpoint",
    "save_model": "training.checkpoints.export",
    "save_checkpoint": "training.checkpoints.run_checkpoint",
    "prepare": "precision.step.prepared",
    "detect_hardware": "hardware",
    "resume": "runner.run",
    "train": "runner.run",
    "tune": "tuning.tune",
    "tune_recipe": "runner.tune",
    "monitor": "health.monitor",
    "dequantize_frozen": "precision.weights.frozen_base",
    "write_report": "runner.report_sections:write_run_report",
}
"""Every public name, its module, and its name there if that differs."""

_MODULES = ("decompose", "errors", "numerics")
"""Public modules, imported when first used too."""

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"narrowcast.{name}")
    if name not in _HOMES:
        raise AttributeError(f"narrowcast has no {name!r}")
    module, _, attribute = _HOMES[name].partition(":")
    return getattr(import_module(f"narrowcast.{module}"), attribute or name)


def __dir__() -> list[str]:
    return [*__all__, *_MODULES]
