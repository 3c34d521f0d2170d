"""The end of a run that has stopped improving, before all of its steps are done."""

from collections.abc import Mapping
from typing import Any, final

from narrowcast.config.common_sections import EvalSection
from narrowcast.config.sections import Recipe
from narrowcast.runs import Record, TaskInfo
from narrowcast.runs.improvement import Improvement
from narrowcast.training.checkpoints.export import RunEnd


def run_end(stopping: "EarlyStopping", recipe: Recipe, *, step: int) -> RunEnd:
    """Return how a run ends at `step`, and with the weights of which."""
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
    """Whether the headline of evaluations still improves, as `eval.patience` has it."""

    def __init__(self, settings: EvalSection, info: TaskInfo) -> None:
        self._settings, self.metric = settings, info.headline
        self.improvement = Improvement()
        """The best evaluation so far, and how many there were since the last that was better."""

    def note(self, record: Record) -> None:
        """Take in a record, in the order in which they are handed on."""
        self.improvement = self.improvement.after(
            record, metric=self.metric, min_delta=self._settings.min_delta
        )

    @property
    def why(self) -> str:
        """Why the run ends here; empty while it goes on."""
        return self.improvement.why_over(metric=self.metric, patience=self._settings.patience)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run goes on from."""
        return self.improvement.to_json()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where a saved run stood."""
        self.improvement = Improvement(**state)
