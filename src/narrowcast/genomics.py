"""Five fine-tuners for programs: data in, a run folder out, with the defaults of their recipes.

Each is its recipe (`genomics/variant_effect` …) with settings given by name, so that whatever works
on the command line works here, and the folder is one that every command takes.

    tuner = VariantEffect("variants.csv", out="runs/variants", reference="hg19.fa.gz")
    print(tuner.fine_tune()["auroc"], tuner.precision_stats()["overflow_rate"])
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from narrowcast.config.section import Section
from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.hardware import detect_hardware
from narrowcast.precision.gradients.loss_scale import LossScale
from narrowcast.precision.plan.memory import Memory, plan_memory
from narrowcast.precision.plan.tasks import TaskPrecision, optimal_precision
from narrowcast.precision.step.prepare import prepare
from narrowcast.precision.step.prepared import Prepared
from narrowcast.runner.run import Run, train
from narrowcast.runs import EvalRecord, Record, RunFolder, StepRecord
from narrowcast.workloads.genomics.settings import (
    GenomicData,
    GenomicModelSection,
    Objective,
    Tuning,
)

SECTIONS: dict[str, type[Section]] = {
    "data": GenomicData,
    "model": GenomicModelSection,
    "objective": Objective,
    "tuning": Tuning,
}


class FineTuner:
    """A task with its data and settings; subclasses name the task."""

    recipe: ClassVar[str]
    """What its recipe is called, after `genomics/`."""
    task: ClassVar[str]
    """What `precision.task` calls it."""
    dropout: ClassVar[float]
    """What `optimize_for_task` sets every dropout to."""
    from_base: ClassVar[dict[str, Any]]
    """Settings of a network that goes on from a base, which learns slower than a new one."""

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
        """Take files, and settings by name: of a section (`max_length=512`) or of the recipe.

        `base` is the folder of a finished run to go on from. A setting that sections share, or one
        of a section of the engine, is written with it: `**{"optimizer.lr": 1e-4}`.
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
        self.settings |= {_key(name): value for name, value in settings.items()}

    @property
    def overrides(self) -> list[str]:
        """Its settings as the command line takes them."""
        return [f"{key}={_text(value)}" for key, value in self.settings.items()]

    def run(self) -> Run:
        """Return the run, ready to be iterated over: every record as it comes."""
        return train(f"genomics/{self.recipe}", self.overrides, out=self.out)

    def fine_tune(self, on_record: Callable[[Record], None] | None = None) -> dict[str, float]:
        """Train to the end, and return the last evaluation; `on_record` is told of every record."""
        measured: dict[str, float] = {}
        with self.run() as run:
            for record in run:
                if isinstance(record, EvalRecord):
                    measured = dict(record.metrics)
                if on_record is not None:
                    on_record(record)
        return measured

    def precision_stats(self) -> dict[str, Any]:
        """Return how the formats of the run in `out` did so far, by the names of other programs.

        `history` has, for every step, the norm of the gradients, the scale, and the overflows
        until then. An overflow is a step whose gradients were not finite: it was skipped.
        """
        with RunFolder.open(self.out) as folder:
            steps = [each for each in folder.records() if isinstance(each, StepRecord)]
            plan = folder.read_json("plan.json")
        return {"mode": str(plan["policy"]), **_counted(steps, plan)}

    def precision(self, model: nn.Module) -> TaskPrecision:
        """Return the precision that suits the task for a model, where the model is.

        What would save memory and the model cannot have is left out, and `left_out` says why.
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
        """Prepare a model of your own for a loop of your own: formats, clipping, dropout, memory.

        Changes the model in place, as `narrowcast.prepare` does, which takes `more`.
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
    """A class for every base."""

    recipe, task, dropout = "annotation", "genome_annotation", 0.0
    from_base: ClassVar = {"optimizer.lr": 3e-5, "data.max_length": 8192}


class VariantEffect(FineTuner):
    """What a variant does, from the sequence without it and with it."""

    recipe, task, dropout = "variant_effect", "variant_effect", 0.1
    from_base: ClassVar = {"optimizer.lr": 2e-5, "data.max_length": 1024}


class ProteinFunction(FineTuner):
    """What a protein is for: GO terms (`function="go"`) or EC numbers (`function="ec"`)."""

    recipe, task, dropout = "protein_function", "protein_function", 0.1
    from_base: ClassVar = {"optimizer.lr": 1e-5, "data.max_length": 2048}


class GenomeGeneration(FineTuner):
    """The next base of a genome."""

    recipe, task, dropout = "generation", "generation", 0.1
    from_base: ClassVar = {"optimizer.lr": 5e-6, "data.max_length": 4096}


class DomainAdaptation(FineTuner):
    """A classifier of one domain learns another's, thawed stage by stage."""

    recipe, task, dropout = "domain_adaptation", "domain_adaptation", 0.2
    from_base: ClassVar = {"optimizer.lr": 5e-6}


def _key(name: str) -> str:
    """Return the dotted key of a setting that is named without its section."""
    if "." in name:
        return name
    homes = [section for section, kind in SECTIONS.items() if name in kind.model_fields]
    if len(homes) > 1:
        terms = " or ".join(f"{section}.{name}" for section in homes)
        raise ConfigError(f"{name} is a setting of several sections. Write {terms}.")
    return f"{homes[0]}.{name}" if homes else name


def _text(value: Any) -> str:
    """Write a value as a word does: text as it is, all else as JSON, in which names are quoted."""
    if isinstance(value, str | Path):
        return str(value)
    if isinstance(value, Iterable) and not isinstance(value, Mapping):
        value = list(value)
    return json.dumps(value, default=str)


def _counted(steps: list[StepRecord], plan: dict[str, Any]) -> dict[str, Any]:
    """Return what the records of a run say of its loss scale."""
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
