"""What a checkpoint holds of a run: how far it is, and the state of each of its parts."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, final

from narrowcast.config.sections import Recipe
from narrowcast.errors import CheckpointError, RecipeError
from narrowcast.hardware.randomness import capture_randomness, restore_randomness
from narrowcast.precision.step.prepared import Prepared
from narrowcast.runs import FindingRecord
from narrowcast.training.checkpoints.parts import part_of
from narrowcast.training.checkpoints.resume import require_same_model, shapes
from narrowcast.training.task import Hook, Task


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run is."""

    step: int = 0
    batches: int = 0
    evaluated: int = 0
    """The step of the last evaluation."""

    def after(self, batches: int) -> "Progress":
        """Return the progress after a step of so many batches."""
        return replace(self, step=self.step + 1, batches=self.batches + batches)


class Part(Protocol):
    """A part of a run that has a state."""

    def state_dict(self) -> dict[str, Any]:
        """Return what decides what it does from now on."""


@final
class RunState:
    """Captures and restores a run."""

    def __init__(
        self, prepared: Prepared, task: Task, recipe: Recipe, *, parts: Mapping[str, Part]
    ) -> None:
        """Take the parts by the names they have in a checkpoint."""
        self._prepared, self._task, self._recipe = prepared, task, recipe
        self._parts = {**parts, "prepared": prepared}
        self._hooks = {hook.name: hook for hook in task.hooks if hook.state_dict is not None}
        self._device = next(prepared.model.parameters()).device

    def captured(self, progress: Progress) -> dict[str, Any]:
        """Return the state of the whole run. Waits for the device."""
        return {
            **asdict(progress),
            "samples": len(self._task.train_data),
            "shapes": shapes(self._prepared.model),
            "random": capture_randomness(self._device),
            "hooks": {name: _saved(hook) for name, hook in self._hooks.items()},
            **{name: part.state_dict() for name, part in self._parts.items()},
        }

    def require_own(self, state: dict[str, Any]) -> None:
        """Refuse a checkpoint that this run cannot be the continuation of; load nothing."""
        step = state["step"]
        if missing := [name for name in self._parts if name not in state]:
            raise CheckpointError(
                f"the checkpoint of step {step} was saved by an older version of narrowcast (it "
                f"lacks {', '.join(missing)}); resume it with that version, or start a new run"
            )
        require_same_model(state["shapes"], self._prepared.model, step=step)
        if set(saved := state.get("hooks", {})) != set(self._hooks):
            raise CheckpointError(
                f"the checkpoint of step {step} keeps the state of the hooks "
                f"{', '.join(saved) or 'none'}, and the task has {', '.join(self._hooks) or 'none'}"
                "; resume it with the version of the workload it was begun with"
            )
        samples = len(self._task.train_data)
        if samples != state["samples"]:
            raise CheckpointError(
                f"the checkpoint of step {step} was trained on {state['samples']} samples, and the "
                f"data has {samples} now, so its order cannot be continued; put the data back, or "
                "start a new run"
            )
        if step > self._recipe.steps:
            raise RecipeError(
                f"steps={self._recipe.steps}: the run is at step {step} already; "
                f"write steps={step} or more"
            )

    def restore(self, state: dict[str, Any]) -> tuple[Progress, list[FindingRecord]]:
        """Take up a state; return how far it is, and what of it does not fit this device.

        The model is in the formats it was saved in: schedule and adapter are restored before.
        """
        for name in ("observer", "prepared", "investigator"):
            part: Any = self._parts[name]
            with part_of(state["step"], name):
                part.load_state_dict(state[name])
        for name, hook in self._hooks.items():
            assert hook.load_state_dict is not None
            with part_of(state["step"], f"hook {name}"):
                hook.load_state_dict(state["hooks"][name])
        progress = Progress(
            step=state["step"], batches=state["batches"], evaluated=state["evaluated"]
        )
        with part_of(progress.step, "random state"):
            if restore_randomness(state["random"], self._device):
                return progress, []
            saved_on = state["random"]["device"]["type"]
        return progress, [
            FindingRecord(
                step=progress.step,
                since=progress.step,
                module="",
                role="random state",
                what=f"random numbers on {self._device.type} do not continue those of the run",
                why=f"the checkpoint was saved on {saved_on}",
                action=f"started them from seed={self._recipe.seed}",
                advice=f"resume on {saved_on} to continue them bit for bit",
            )
        ]


def _saved(hook: Hook) -> dict[str, Any]:
    assert hook.state_dict is not None
    return hook.state_dict()
