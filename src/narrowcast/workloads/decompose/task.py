"""The task: components that add up to a target's weights, few of which matter at a time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from narrowcast.config.sections import Recipe
from narrowcast.hardware.randomness import preserve_rng
from narrowcast.precision.step.prepared import Prepared
from narrowcast.runs import Metric, TaskInfo
from narrowcast.training.evaluation import in_eval_mode
from narrowcast.training.task import Hook, LossParts, Task
from narrowcast.workloads.decompose.build import Parts, build_parts
from narrowcast.workloads.decompose.component_files import COMPONENTS, save_components, start_from
from narrowcast.workloads.decompose.judging import (
    DecompositionResult,
    judge,
    mean_measures,
    task_metrics,
    worst_masks,
)
from narrowcast.workloads.decompose.losses.adversary import step_form
from narrowcast.workloads.decompose.losses.penalties import unfaithfulness
from narrowcast.workloads.decompose.losses.total import total
from narrowcast.workloads.decompose.model import DecompositionModel, clip_each_seed
from narrowcast.workloads.decompose.results import write_result
from narrowcast.workloads.decompose.settings import DecompositionSection, EvalTasksSection


@dataclass
class Course:
    """How far a run has come, which the loss of its next step depends on."""

    step: int = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step = int(state["step"])


def collate(samples: Any) -> dict[str, Tensor]:
    """Return a batch as a dict, to which `together` adds the progress of the run."""
    return {"inputs": torch.as_tensor(samples)}


def build_task(recipe: Recipe, *, device: torch.device) -> Task:
    """Return the task of a decompose recipe."""
    parts = build_parts(recipe, device=device)
    earlier = recipe.section(DecompositionSection).start_from
    if earlier and device.type != "meta":
        start_from(parts, earlier)
    return Decompose(recipe=recipe, parts=parts, device=device).task()


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Decompose:
    """Components of a target, their loss, and their evaluation."""

    recipe: Recipe
    parts: Parts
    device: torch.device
    course: Course = field(default_factory=Course)

    def task(self) -> Task:
        recipe, losses, subject = self.recipe, self.parts.losses, self.parts.subject
        return Task(
            model=self.parts.model,
            train_data=subject.train_data(recipe.batch_size),
            collate=collate,
            loss=self.loss,
            evaluate=self.evaluate,
            items=lambda batch: batch["inputs"].numel(),
            gemm_rows=recipe.batch_size * subject.length,
            info=TaskInfo(
                unit=subject.unit,
                metrics=self.metrics,
                loss_parts=tuple(loss.name for loss in losses),
                notes=self.notes,
            ),
            data_digest=lambda: subject.digest,
            prepare_microbatches=self.together,
            hooks=self.hooks,
            write_results=self.write_results,
            weights_path=COMPONENTS,
        )

    @property
    def metrics(self) -> tuple[Metric, ...]:
        sites = self.parts.model.decomposition.sites
        return task_metrics(self.parts.subject, sites, self.recipe.section(EvalTasksSection).groups)

    @property
    def notes(self) -> tuple[str, ...]:
        sites = ", ".join(
            f"{site.name} ({site.d_in} x {site.d_out}, {site.components} components)"
            for site in self.parts.model.decomposition.sites
        )
        seeds = self.parts.model.seeds
        return (f"{self.parts.subject.name}, {seeds} seed{'s' * (seeds > 1)}: {sites}",)

    def together(self, batches: Sequence[Any]) -> Sequence[Any]:
        """Add the progress of the run and the form of the step to each batch."""
        step, steps = self.course.step, self.recipe.steps
        progress = torch.full((), step / steps, device=self.device)
        form = step_form(self.parts.losses, step, steps)
        return [{**batch, "progress": progress, "form": form} for batch in batches]

    def loss(self, model: nn.Module, batch: Any) -> LossParts:
        """Return the sum over seeds of all terms, and each term's mean over them."""
        assert isinstance(model, DecompositionModel)
        x = self.parts.subject.shown(batch["inputs"])
        step = model(x, progress=batch["progress"])
        everything, parts = total(self.parts.losses, step, batch["form"])
        left_out = [loss.name for loss in self.parts.losses if loss.name not in parts]
        if left_out:
            parts |= dict.fromkeys(left_out, torch.zeros((), device=x.device))
        return LossParts(total=everything, parts=parts)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return mean_measures(self.judged(model), self.recipe.section(EvalTasksSection).groups)

    def judged(self, model: nn.Module) -> DecompositionResult:
        """Evaluate a decomposition on the same samples each time."""
        assert isinstance(model, DecompositionModel)
        return judge(model, self.parts.subject, self.recipe)

    @property
    def hooks(self) -> tuple[Hook, ...]:
        return (
            Hook(
                name="course",
                before_first_step=self.warm_up,
                after_backward=self.after_backward if self._edits else None,
                after_step=self.count,
                state_dict=self.course.state_dict,
                load_state_dict=self.course.load_state_dict,
            ),
        )

    @property
    def _edits(self) -> bool:
        settings = self.recipe.section(DecompositionSection)
        clips = settings.clip_components is not None or settings.clip_importance is not None
        return clips or len(self.parts.model.adversaries) > 0

    def warm_up(self, prepared: Prepared) -> None:
        """Train components on faithfulness alone, before the first step."""
        settings = self.recipe.section(DecompositionSection)
        if settings.start_from:
            return
        decomposition = self.parts.model.decomposition
        trained = list(decomposition.components.parameters())
        optimizer = torch.optim.AdamW(
            trained, lr=settings.warmup_lr, weight_decay=settings.warmup_weight_decay
        )
        with torch.enable_grad():
            for _ in range(settings.warmup_steps):
                gradients = torch.autograd.grad(unfaithfulness(decomposition).sum(), trained)
                for parameter, gradient in zip(trained, gradients, strict=True):
                    parameter.grad = gradient
                optimizer.step()
        for parameter in trained:
            parameter.grad = None

    def after_backward(self, prepared: Prepared) -> None:
        """Clip components and importance functions per seed, and move persistent adversaries."""
        settings = self.recipe.section(DecompositionSection)
        limits = {"components": settings.clip_components, "importance": settings.clip_importance}
        for name, parameters in self.parts.model.clipped().items():
            limit = limits[name]
            if limit is not None:
                clip_each_seed(parameters, limit)
        for adversary in self.parts.model.adversaries.values():
            adversary.ascend()  # type: ignore[operator]

    def count(self, prepared: Prepared, applied: Tensor) -> None:
        self.course.step += 1

    def write_results(self, folder: Path, prepared: Prepared) -> None:
        """Write the data of the report, and the components."""
        model = prepared.model
        assert isinstance(model, DecompositionModel)
        with preserve_rng(self.device), in_eval_mode(model), prepared.autocast():
            result = self.judged(model)
            worst = worst_masks(model, self.parts.subject, self.recipe)
        write_result(folder, result, self.parts, self.recipe, worst=worst)
        save_components(folder, prepared.engine.weights.full_by_name(), result, self.parts)
