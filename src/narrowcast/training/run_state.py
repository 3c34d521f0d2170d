"""What a checkpoint holds of a run: how far it is, and the state of each of its parts."""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, final

from narrowcast.config.load import flat_settings
from narrowcast.config.sections import Recipe
from narrowcast.errors import CheckpointError, ConfigError
from narrowcast.hardware.randomness import capture_randomness, restore_randomness
from narrowcast.precision.step.prepared import Prepared
from narrowcast.precision.step.saved_state import collect_state
from narrowcast.runs import FindingRecord
from narrowcast.training.checkpoints.data_identity import DataIdentity, identify_data
from narrowcast.training.checkpoints.frozen import FrozenWeights
from narrowcast.training.checkpoints.parts import blamed_on_part
from narrowcast.training.checkpoints.resume import require_same_model, shapes
from narrowcast.training.checkpoints.settings import (
    decisive_differences,
    difference_text,
    places_in,
)
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


class StatePart(Protocol):
    """A part of a run that has a state."""

    def state_dict(self) -> dict[str, Any]:
        """Return what decides what it does from now on."""


@final
class RunState:
    """Captures and restores a run."""

    def __init__(
        self,
        prepared: Prepared,
        task: Task,
        recipe: Recipe,
        *,
        parts: Mapping[str, StatePart],
        frozen: FrozenWeights,
    ) -> None:
        """Take the parts by the names they have in a checkpoint."""
        self._prepared, self._task, self._recipe = prepared, task, recipe
        self._parts = {**parts, "prepared": prepared}
        self._hooks = {hook.name: hook for hook in task.hooks if hook.state_dict is not None}
        self._device = next(prepared.model.parameters()).device
        self._accepted: list[FindingRecord] = []
        self._data: DataIdentity | None = None
        self._frozen = frozen

    def identify(self) -> None:
        """Look at what is not saved but made again: data, and weights that are not trained."""
        self._identify_data()
        self._frozen.identify()

    def _identify_data(self) -> DataIdentity:
        """Return which data this is; it is looked at once."""
        if self._data is None:
            self._data = identify_data(self._task, workers=self._recipe.data.workers)
        return self._data

    def captured(self, progress: Progress) -> dict[str, Any]:
        """Return the state of the whole run. Waits for the device."""
        others = [name for name in self._parts if name != "prepared"]
        parts = {name: self._parts[name].state_dict() for name in others}
        # Not copied here: it is written, or copied to the host, before the next step.
        now = collect_state(self._prepared.engine)
        parts["prepared"], frozen = self._frozen.split_frozen(now)
        return {
            **asdict(progress),
            "data": self._identify_data().to_json(),
            "settings": flat_settings(self._recipe),
            "shapes": shapes(self._prepared.model),
            "random": capture_randomness(self._device),
            "hooks": {name: _saved(hook) for name, hook in self._hooks.items()},
            "frozen": frozen,
            **parts,
        }

    def require_own(self, state: dict[str, Any], *, accept: Collection[str] = ()) -> None:
        """Refuse a checkpoint that this run cannot be the continuation of; load nothing.

        `accept` may name "data": other data than the checkpoint was trained on is then gone on
        with, and that is told when it is restored.
        """
        step = state["step"]
        self._frozen.identify()
        wanted = [*self._parts, "data", "settings", "records"]
        if missing := [name for name in wanted if name not in state]:
            raise CheckpointError(
                f"the checkpoint of step {step} was saved by an older version of narrowcast (it "
                f"lacks {', '.join(missing)}); resume it with that version, or start a new run"
            )
        self._require_settings(state["settings"], step=step)
        require_same_model(state["shapes"], self._prepared.model, step=step)
        self._frozen.require_same(state.get("frozen", {}), step=step)
        if set(saved := state.get("hooks", {})) != set(self._hooks):
            raise CheckpointError(
                f"the checkpoint of step {step} keeps the state of the hooks "
                f"{', '.join(saved) or 'none'}, and the task has {', '.join(self._hooks) or 'none'}"
                "; resume it with the version of the workload it was begun with"
            )
        here = self._identify_data()
        with blamed_on_part(step, "data"):
            difference = here.differs_from(state["data"])
        if difference:
            self._check_data(difference, step=step, accepted="data" in accept)
        if step > self._recipe.steps:
            raise ConfigError(
                f"steps={self._recipe.steps}: the run is at step {step} already; "
                f"write steps={step} or more"
            )

    def _require_settings(self, saved: Mapping[str, Any], *, step: int) -> None:
        here = flat_settings(self._recipe)
        # One that only a newer or an older version has could not be put right.
        both = {key: value for key, value in here.items() if key in saved}
        places = places_in(type(self._recipe.data))
        if keys := decisive_differences({key: saved[key] for key in both}, both, places=places):
            raise CheckpointError(
                f"the checkpoint of step {step} is of a run with other settings: "
                f"{difference_text(keys, saved, here)}; resume it with those, or start a new run"
            )

    def _check_data(self, difference: str, *, step: int, accepted: bool) -> None:
        if not accepted:
            raise CheckpointError(
                f"the data is not that of the checkpoint of step {step}: {difference}; put the "
                "data back, add --accept data (in Python accept=['data']) to go on with it as it "
                "is, or start a new run"
            )
        self._accepted.append(
            FindingRecord(
                step=step,
                since=step + 1,
                module="",
                role="data",
                what="the run goes on with other data",
                why=difference,
                action="accepted",
                advice="losses before and after this step are not of the same data",
            )
        )

    def restore(self, state: dict[str, Any]) -> Progress:
        """Take up a state but for its random numbers; return how far it is.

        The model is in the formats it was saved in: schedule and adapter are restored before.
        """
        step = state["step"]
        for name, shown in _SHOWN_AS.items():
            if name not in self._parts:
                continue
            part: Any = self._parts[name]
            with blamed_on_part(step, shown):
                saved = state[name]
                if part is self._prepared:
                    saved = self._frozen.put_back_into(saved, state.get("frozen", {}))
                part.load_state_dict(saved)
        for name, hook in self._hooks.items():
            assert hook.load_state_dict is not None
            with blamed_on_part(step, f"hook {name}"):
                hook.load_state_dict(state["hooks"][name])
        return Progress(step=step, batches=state["batches"], evaluated=state["evaluated"])

    def restore_randomness(self, state: dict[str, Any]) -> list[FindingRecord]:
        """Let random numbers go on where they were; return what the run is not continued by."""
        step = state["step"]
        with blamed_on_part(step, "random state"):
            if restore_randomness(state["random"], self._device):
                return self._accepted
            saved_on = state["random"]["device"]["type"]
        return [
            *self._accepted,
            FindingRecord(
                step=step,
                since=step,
                module="",
                role="random state",
                what=f"random numbers on {self._device.type} do not continue those of the run",
                why=f"the checkpoint was saved on {saved_on}",
                action=f"started them from seed={self._recipe.seed}",
                advice=f"resume on {saved_on} to continue them bit for bit",
            ),
        ]


_SHOWN_AS = {
    "observer": "readings of tensors",
    "prepared": "state of the model",
    "investigator": "state of verdicts",
    "vital_signs": "vital signs",
    "improvement": "improvement of evaluations",
    "best_weights": "best weights",
    "strategy": "strategy",
}


def _saved(hook: Hook) -> dict[str, Any]:
    assert hook.state_dict is not None
    return hook.state_dict()
