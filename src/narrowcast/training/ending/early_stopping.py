"""Early stopping by the headline metric."""

from collections.abc import Mapping
from typing import Any, final

from narrowcast.config.common_sections import EvalSection
from narrowcast.config.sections import Recipe
from narrowcast.runs import Record, TaskInfo
from narrowcast.runs.improvement import Improvement
from narrowcast.training.checkpoints.export import RunEnd


def run_end(stopping: "EarlyStopping", recipe: Recipe, *, step: int) -> RunEnd:
    """Return how a run ends at `step`, and which weights it exports."""
    requested, best = recipe.steps, stopping.improvement
    return RunEnd(
        step=step,
        requested_steps=requested,
        why=stopping.why if step < requested else "",
        exported=best.best_step if recipe.eval.keep_best else 0,
        measured={stopping.metric.name: best.best},
        extendable=not recipe.depends_on_steps,
    )


@final
class EarlyStopping:
    """Whether evaluations still improve, by `eval.patience`."""

    def __init__(self, settings: EvalSection, info: TaskInfo) -> None:
        self._settings, self.metric = settings, info.headline
        self.improvement = Improvement()
        """The best evaluation so far, and the number of evaluations since."""

    def note(self, record: Record) -> None:
        """Take note of a record; called in order."""
        self.improvement = self.improvement.after(
            record, metric=self.metric, min_delta=self._settings.min_delta
        )

    @property
    def why(self) -> str:
        """Why the run ends here; empty while it continues."""
        return self.improvement.why_over(metric=self.metric, patience=self._settings.patience)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return self.improvement.to_json()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict()`."""
        self.improvement = Improvement(**state)
