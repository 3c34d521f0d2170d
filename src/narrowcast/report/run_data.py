"""What a run folder holds, read once and sorted by kind: all that a page is made from."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Any

from narrowcast.errors import CheckpointError
from narrowcast.report.phrases import policies
from narrowcast.runs.folder import RunFolder
from narrowcast.runs.improvement import Improvement, delta_in, measure_improvement
from narrowcast.runs.records import (
    CheckpointRecord,
    EvalRecord,
    ExponentRecord,
    FindingRecord,
    HealthRecord,
    PrecisionRecord,
    Record,
    StepRecord,
)
from narrowcast.runs.shape import ANY, Shape
from narrowcast.runs.task_info import BEFORE_TASK_JSON, Metric, TaskInfo
from narrowcast.runs.vitals import Vitals, measure_vitals

_TEXT = (str, NoneType)
_COUNT = (int, NoneType)


def _entry(value: Shape) -> Shape:
    return {"value": value, "origin": str}


SETTINGS: Shape = {
    ANY: _entry(object),
    **dict.fromkeys(("name", "workload", "description", "precision.policy"), _entry(_TEXT)),
    **dict.fromkeys(("steps", "seed"), _entry(int)),
    "precision.loss_scale.patience": _entry(_COUNT),
}
"""Of resolved.json."""

_PLAIN = (str, int, float, bool, NoneType)
_MODULE = {ANY: _PLAIN, "name": _TEXT, "bytes": {ANY: int}, "quantized": {ANY: _PLAIN}}

PLAN: Shape = {
    "policy": _TEXT,
    "hardware": _TEXT,
    "modules": [_MODULE],
    "functional": {ANY: _TEXT},
    "bytes": {ANY: int},
    "strategy": {"bytes": {ANY: int}},
    "phases": [{"policy": str, "formats": {ANY: str}}],
    "predicted": {"memory": ({"allocated": int}, NoneType)},
}
"""Of plan.json."""

ENVIRONMENT: Shape = {"sessions": [dict]}
"""Of environment.json."""


@dataclass(frozen=True, kw_only=True)
class RunData:
    """A run as read from its folder; what was not written is empty."""

    steps: tuple[StepRecord, ...] = ()
    evals: tuple[EvalRecord, ...] = ()
    health: tuple[HealthRecord, ...] = ()
    exponents: tuple[ExponentRecord, ...] = ()
    findings: tuple[FindingRecord, ...] = ()
    changes: tuple[PrecisionRecord, ...] = ()
    checkpoints: tuple[CheckpointRecord, ...] = ()
    plan: Mapping[str, Any] | None = None
    settings: Mapping[str, Mapping[str, Any]]
    """Each key of the recipe with its `value` and its `origin`."""
    recipe_text: str
    sessions: tuple[Mapping[str, Any], ...]
    """The environment of the first start and of each resume."""
    task: TaskInfo = BEFORE_TASK_JSON
    """What the run counts, and how it is judged."""
    records: tuple[Record, ...] = ()
    """All of them, in their order, for sections that a workload draws."""

    def setting(self, key: str, default: Any = None) -> Any:
        return self.settings.get(key, {}).get("value", default)

    @property
    def name(self) -> str:
        """What the run is called: its recipe, or failing that its workload."""
        return str(self.setting("name") or self.setting("workload") or "this run")

    @property
    def policy(self) -> str:
        """The requested precision policy."""
        planned = (self.plan or {}).get("policy")
        requested = str(self.setting("precision.policy") or planned or "an unnamed policy")
        return policies(requested, self.setting("precision.schedule"))

    @property
    def headline(self) -> Metric | None:
        """The headline metric of the run; None if it was never evaluated."""
        return headline_metric(self.task, self.metrics)

    @property
    def vitals(self) -> Vitals:
        """What decides whether the run came to anything."""
        records: list[Record] = [*self.steps, *self.evals, *self.findings]
        return measure_vitals(records, headline=self.task.headline.name)

    @property
    def requested_steps(self) -> int:
        return int(self.setting("steps", 0))

    @property
    def improvement(self) -> Improvement:
        min_delta = delta_in(self.setting("eval.min_delta"))
        return measure_improvement(self.evals, metric=self.task.headline, min_delta=min_delta)

    @property
    def ended_early(self) -> str:
        """Why the run ended before all of its steps were done, though nothing went wrong."""
        patience, result = self.setting("eval.patience"), self.improvement
        last = self.steps[-1].step if self.steps else 0
        if not isinstance(patience, int) or not result.evaluated == last < self.requested_steps:
            return ""
        return result.why_over(metric=self.task.headline, patience=patience)

    @property
    def exported(self) -> tuple[int, float] | None:
        """The step of the weights it ended with and their headline, where the best were kept."""
        matched = self.improvement
        stored = self.setting("eval.keep_best") is True and matched.best_step > 0
        return (matched.best_step, matched.best) if stored and self.is_done else None

    @property
    def is_done(self) -> bool:
        """Whether there is nothing left to do."""
        return len(self.steps) >= self.requested_steps > 0 or bool(self.ended_early)

    @property
    def diverged(self) -> str:
        """What is wrong with a run that has done its steps or gave up; nothing if nothing is."""
        if self.is_done:
            return self.vitals.diverged
        return f"it stopped at step {self.steps[-1].step}" if self.gave_up else ""

    @property
    def gave_up(self) -> int:
        """Count the overflows at one scale after which a run gave up; 0 if it did not."""
        patience = self.setting("precision.loss_scale.max_skipped_steps")
        if not self.steps or len(self.steps) >= self.requested_steps:
            return 0
        in_a_row = 0
        for record in reversed(self.steps):
            if record.applied or record.loss_scale != self.steps[-1].loss_scale:
                break
            in_a_row += 1
        enough = isinstance(patience, int) and in_a_row >= max(1, patience)
        return in_a_row if enough else 0

    @property
    def metrics(self) -> list[str]:
        """The metrics that were evaluated, in the order of the task."""
        results = dict.fromkeys(name for record in self.evals for name in record.metrics)
        return _in_order(results, [metric.name for metric in self.task.metrics])

    @property
    def parts(self) -> list[str]:
        """The parts of the loss that were recorded, in the order of the task."""
        results = dict.fromkeys(name for record in self.steps for name in record.loss_parts)
        return _in_order(results, self.task.loss_parts)

    @property
    def modules(self) -> list[Mapping[str, Any]]:
        return list((self.plan or {}).get("modules", []))

    @property
    def phases(self) -> list[Mapping[str, Any]]:
        """The phases of the plan: the policy of each, and what it gives each module."""
        return list((self.plan or {}).get("phases", []))


def read_run(path: Path) -> RunData:
    """Read the folder of a run, at whatever point the run is."""
    with RunFolder.open(path) as run:
        records = run.records()
        settings = run.read_json("resolved.json", SETTINGS)
        plan = run.read_json("plan.json", PLAN) if (path / "plan.json").exists() else None
        has_environment = (path / "environment.json").exists()
        environment = run.read_json("environment.json", ENVIRONMENT) if has_environment else {}
        recipe_text = _recipe_text(run)
        task = run.task_info()
    return RunData(
        **by_kind(records),
        plan=plan,
        settings=settings,
        recipe_text=recipe_text,
        sessions=tuple(environment.get("sessions", [])),
        task=task,
        records=tuple(records),
    )


def _recipe_text(run: RunFolder) -> str:
    """Return the recipe as it was written, or "" without the file."""
    try:
        return run.recipe_text
    except CheckpointError:
        return ""


def headline_metric(task: TaskInfo, evaluated: Iterable[str]) -> Metric | None:
    """Return the first metric of a task that was evaluated, or else the first that was."""
    names = list(dict.fromkeys(evaluated))
    declared = next((metric for metric in task.metrics if metric.name in names), None)
    return declared or next((replace(task.metric(n), name=n) for n in names), None)


def _in_order(result: Iterable[str], order: Sequence[str]) -> list[str]:
    """Sort names as `order` has them; those it does not have come last, as they were found."""
    return sorted(result, key=lambda name: order.index(name) if name in order else len(order))


def by_kind(records: Iterable[Record]) -> dict[str, Any]:
    """Sort records into the fields of a RunData."""
    matches = list(records)
    kinds = {
        "steps": StepRecord,
        "evals": EvalRecord,
        "health": HealthRecord,
        "exponents": ExponentRecord,
        "findings": FindingRecord,
        "changes": PrecisionRecord,
        "checkpoints": CheckpointRecord,
    }
    return {field: tuple(r for r in matches if type(r) is kind) for field, kind in kinds.items()}
