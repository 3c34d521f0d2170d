"""Fine-tune genomics models from Python, one class per task.

Each class runs its recipe (such as `genomics/variant_effect`) with settings passed by name. The run
folder works with every command.

    tuner = VariantEffect("variants.csv", out="runs/variants", reference="hg19.fa.gz")
    print(tuner.fine_tune()["auroc"], tuner.precision_stats()["overflow_rate"])
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from narrowcast.config.keywords import as_arguments, full_name
from narrowcast.config.section import Section
from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.hardware import detect_hardware
from narrowcast.precision.gradients.loss_scale import LossScale
from narrowcast.precision.plan.memory import Memory, plan_memory
from narrowcast.precision.plan.tasks import TaskPrecision, optimal_precision
from narrowcast.precision.step.prepared import Prepared, prepare
from narrowcast.runner.run import Run, train
from narrowcast.runs import EvalRecord, Record, RunFolder, StepRecord
from narrowcast.workloads.genomics.settings import (
    GenomicData,
    GenomicLora,
    GenomicModelSection,
    Objective,
    Tuning,
)

SECTIONS: dict[str, type[Section]] = {
    "data": GenomicData,
    "model": GenomicModelSection,
    "objective": Objective,
    "tuning": Tuning,
    "lora": GenomicLora,
}


class FineTuner:
    """A fine-tuning task with its data and settings; use a subclass."""

    recipe: ClassVar[str]
    """Name of its recipe, after `genomics/`."""
    task: ClassVar[str]
    """Its `precision.task`."""
    dropout: ClassVar[float]
    """Dropout that `optimize_for_task` sets."""
    from_base: ClassVar[dict[str, Any]]
    """Default settings when it starts from a pretrained run."""

    def __init__(
        self,
        data: str | Path | None = None,
        *,
        out: str | Path,
        validation: str | Path | None = None,
        test: str | Path | None = None,
        base: str | Path | None = None,
        **settings: Any,
    ) -> None:
        """Describe a run; nothing is read yet.

        Args:
            data: Training file; None for synthetic sequences.
            out: Run folder.
            validation: Validation file; None holds out a share of `data`.
            test: File evaluated once after training.
            base: Folder of a finished run to start from, or a published checkpoint.
            settings: Recipe settings by name, such as `max_length=512`. Use the full name if
                several sections share it, or for other sections: `**{"optimizer.lr": 1e-4}`.

        Raises:
            ConfigError: A file is not a path, or a name belongs to several sections.
        """
        self.out = Path(out)
        files = {"data.path": data, "data.validation": validation, "data.test": test}
        files["model.path"] = base
        for key, file in files.items():
            if file is not None and not isinstance(file, str | Path):
                raise ConfigError(
                    f"{key} must be a path, got a {type(file).__name__}. Write a DataFrame to a "
                    "file with frame.to_csv(path, index=False), and give its path."
                )
        self.settings: dict[str, Any] = {} if base is None else dict(self.from_base)
        self.settings |= {key: str(file) for key, file in files.items() if file is not None}
        self.settings |= {full_name(name, SECTIONS): value for name, value in settings.items()}

    @property
    def overrides(self) -> list[str]:
        """The settings as KEY=VALUE arguments of the command line."""
        return as_arguments(self.settings, SECTIONS)

    def run(self) -> Run:
        """Return the run; iterate over it to train and get every record."""
        return train(f"genomics/{self.recipe}", self.overrides, out=self.out)

    def fine_tune(self, on_record: Callable[[Record], None] | None = None) -> dict[str, float]:
        """Train to the end.

        Args:
            on_record: Called with every record.

        Returns:
            The metrics of the last evaluation.
        """
        measured: dict[str, float] = {}
        with self.run() as run:
            for record in run:
                if isinstance(record, EvalRecord):
                    measured = dict(record.metrics)
                if on_record is not None:
                    on_record(record)
        return measured

    def precision_stats(self) -> dict[str, Any]:
        """Return precision statistics of the run in `out`.

        Returns:
            The policy, loss scale, and counts of steps and overflows. `history` has the gradient
            norm, the scale and the overflows so far for every step. An overflow is a step that
            was skipped because its gradients were not finite.
        """
        with RunFolder.open(self.out) as folder:
            steps = [each for each in folder.records() if isinstance(each, StepRecord)]
            plan = folder.read_json("plan.json")
        return {"mode": str(plan["policy"]), **_counted(steps, plan)}

    def precision(self, model: nn.Module) -> TaskPrecision:
        """Return the precision for this task, model and device.

        Memory savers that the model does not support are left out; `left_out` says why.
        """
        hardware = detect_hardware(str(next(model.parameters()).device))
        size = sum(parameter.numel() for parameter in model.parameters())
        chosen = optimal_precision(self.task, size, hardware)
        memory = Memory(
            activation_checkpointing=chosen.activation_checkpointing, offload=chosen.offload
        )
        try:
            plan_memory(model, memory, hardware=hardware, sizes={})
        except (ConfigError, UnsupportedError) as error:
            why = (
                *chosen.left_out,
                f"memory.activation_checkpointing={chosen.activation_checkpointing}: {error}",
            )
            return replace(chosen, activation_checkpointing="none", offload=(), left_out=why)
        return chosen

    def optimize_for_task(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **more: Any
    ) -> Prepared:
        """Prepare your own model for your own loop, with the precision of the task.

        Args:
            model: Changed in place, as by `narrowcast.prepare`.
            optimizer: None for AdamW.
            more: Further arguments of `narrowcast.prepare`.

        Returns:
            What `narrowcast.prepare` returns.
        """
        chosen = self.precision(model)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = self.dropout
        inputs: dict[str, Any] = {"policy": chosen.policy, "clip_norm": chosen.clip_norm}
        if chosen.policy == "fp16":
            inputs["loss_scale"] = LossScale(growth_interval=chosen.growth_interval)
        if chosen.offload or chosen.activation_checkpointing != "none":
            inputs["memory"] = Memory(
                activation_checkpointing=chosen.activation_checkpointing, offload=chosen.offload
            )
        if optimizer is None:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
        return prepare(model, optimizer, **{**inputs, **more})


class GenomeAnnotation(FineTuner):
    """Predict a class per base."""

    recipe, task, dropout = "annotation", "genome_annotation", 0.0
    from_base: ClassVar = {"optimizer.lr": 3e-5, "data.max_length": 8192}


class SequenceClassification(FineTuner):
    """Predict a class, labels or a number for a sequence, beside a linear baseline."""

    recipe, task, dropout = "classify", "classify", 0.2
    from_base: ClassVar = {"optimizer.lr": 2e-4}


class VariantEffect(FineTuner):
    """Predict the effect of a variant from the sequence without and with it."""

    recipe, task, dropout = "variant_effect", "variant_effect", 0.1
    from_base: ClassVar = {"optimizer.lr": 2e-5, "data.max_length": 1024}


class ProteinFunction(FineTuner):
    """Predict GO terms (`function="go"`) or EC classes (`function="ec"`) of a protein."""

    recipe, task, dropout = "protein_function", "protein_function", 0.1
    from_base: ClassVar = {"optimizer.lr": 1e-5, "data.max_length": 2048}


class GenomeGeneration(FineTuner):
    """Predict the next base of a genome."""

    recipe, task, dropout = "generation", "generation", 0.1
    from_base: ClassVar = {"optimizer.lr": 5e-6, "data.max_length": 4096}


class DomainAdaptation(FineTuner):
    """Adapt a classifier to another domain, unfrozen stage by stage."""

    recipe, task, dropout = "domain_adaptation", "domain_adaptation", 0.2
    from_base: ClassVar = {"optimizer.lr": 5e-6}


def _counted(steps: list[StepRecord], plan: dict[str, Any]) -> dict[str, Any]:
    """Return the statistics of loss scale and overflows."""
    parameters = sum(int(module["parameters"]) for module in plan["modules"])
    overflows, history = 0, dict[int, dict[str, float]]()
    for record in steps:
        overflows += not record.applied
        history[record.step] = {
            "gradient_norm": record.grad_norm,
            "param_count": parameters,
            "scale": record.loss_scale,
            "overflow_count": overflows,
        }
    scales = [record.loss_scale for record in steps]
    scale = scales[-1] if scales else 1.0
    return {
        "enabled": plan["policy"] != "compute=fp32",
        "scale": scale,
        "current_scale": scale,
        "overflow_count": overflows,
        "scale_updates": sum(a != b for a, b in itertools.pairwise(scales)),
        "total_steps": len(steps),
        "training_steps": len(steps) - overflows,
        "overflow_rate": overflows / len(steps) if steps else 0.0,
        "history": history,
    }
