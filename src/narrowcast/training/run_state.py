"""The state of a run in a checkpoint: its progress, and the state of each part."""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, final

import torch
from torch import Tensor

from narrowcast.config.load import flat_settings
from narrowcast.config.sections import Recipe
from narrowcast.errors import CheckpointError, ConfigError
from narrowcast.hardware.randomness import (
    capture_randomness,
    restore_randomness,
    seed_everything,
)
from narrowcast.precision.nested import map_tensors
from narrowcast.precision.step.prepared import Prepared
from narrowcast.precision.step.saved_state import OUTLINE, collect_state, state_outline
from narrowcast.runs import FindingRecord
from narrowcast.training.checkpoints.checkpoint import damaged
from narrowcast.training.checkpoints.data_identity import DataIdentity, identify_data
from narrowcast.training.checkpoints.frozen import FrozenWeights
from narrowcast.training.checkpoints.resume import blamed_on_part, require_same_model, shapes
from narrowcast.training.checkpoints.run_checkpoint import StoredShards, sharded_state
from narrowcast.training.checkpoints.settings import (
    decisive_differences,
    difference_text,
    places_in,
)
from narrowcast.training.data import hashed
from narrowcast.training.parallel import ALONE, RunRanks, is_sharded
from narrowcast.training.task import Hook, Task


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run has come."""

    step: int = 0
    batches: int = 0
    evaluated: int = 0
    """Step of the last evaluation."""

    def after(self, batches: int) -> "Progress":
        """Return the progress after a step of so many micro-batches."""
        return replace(self, step=self.step + 1, batches=self.batches + batches)


class StatePart(Protocol):
    """A part of a run that has state."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that later steps depend on."""


@final
class RunState:
    """Captures and restores the state of a run."""

    def __init__(
        self,
        prepared: Prepared,
        task: Task,
        recipe: Recipe,
        *,
        parts: Mapping[str, StatePart],
        frozen: FrozenWeights,
        ranks: RunRanks = ALONE,
    ) -> None:
        """Take the parts by their names in a checkpoint."""
        self._prepared, self._task, self._recipe = prepared, task, recipe
        self._parts = {**parts, "prepared": prepared}
        self._hooks = {hook.name: hook for hook in task.hooks if hook.state_dict is not None}
        self._device = next(prepared.model.parameters()).device
        self._accepted: list[FindingRecord] = []
        self._data: DataIdentity | None = None
        self._frozen, self._ranks = frozen, ranks

    def identify(self) -> None:
        """Fingerprint what a checkpoint does not hold: the data and the frozen weights."""
        self._identify_data()
        self._frozen.identify()

    def _identify_data(self) -> DataIdentity:
        """Return the fingerprint of the data, which is computed once."""
        if self._data is None:
            self._data = identify_data(self._task, workers=self._recipe.data.workers)
        return self._data

    def captured(self, progress: Progress) -> dict[str, Any]:
        """Return the state of the whole run. Synchronises."""
        others = [name for name in self._parts if name != "prepared"]
        parts: dict[str, Any] = {name: self._parts[name].state_dict() for name in others}
        # Not copied here: it is written, or copied to the host, before the next step.
        now, frozen = self._frozen.split_frozen(collect_state(self._prepared.engine))
        parts["prepared"] = now
        if not is_sharded(self._prepared.model):  # or each rank saves its own with its shards
            parts["amax_of_ranks"] = self._amax_of_other_ranks(now["amax"])
        return {
            **asdict(progress),
            "data": self._identify_data().to_json(),
            "settings": flat_settings(self._recipe),
            "shapes": shapes(self._prepared.model),
            **self._captured_randomness(),
            "hooks": {name: _saved(hook) for name, hook in self._hooks.items()},
            "frozen": frozen,
            **parts,
        }

    def _amax_of_other_ranks(self, amax: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        """Return the amax histories of the ranks after the first, which saw other batches."""
        if not amax:
            return []
        return self._ranks.gathered(map_tensors(amax, Tensor.cpu))[1:]

    def _captured_randomness(self) -> dict[str, Any]:
        first, *others = self._ranks.gathered(capture_randomness(self._device))
        of_others = {str(rank): state for rank, state in enumerate(others, start=1)}
        return {"random": first, **({"random_of_ranks": of_others} if others else {})}

    def require_own(self, state: dict[str, Any], *, accept: Collection[str] = ()) -> None:
        """Raise if this run cannot continue from a checkpoint; `accept` may have "data"."""
        step = state["step"]
        self._frozen.identify()
        wanted = [*self._parts, "data", "settings", "records"]
        if missing := [name for name in wanted if name not in state]:
            raise CheckpointError(
                f"The checkpoint of step {step} was saved by an older version of narrowcast and "
                f"has no {', '.join(missing)}. Resume it with that version, or start a new run."
            )
        self._require_settings(state["settings"], step=step)
        require_same_model(state["shapes"], self._prepared.model, step=step)
        self._frozen.require_same(state.get("frozen", {}), step=step)
        if set(saved := state.get("hooks", {})) != set(self._hooks):
            raise CheckpointError(
                f"The checkpoint of step {step} has state for the hooks "
                f"{', '.join(saved) or 'none'}, and the task has the hooks "
                f"{', '.join(self._hooks) or 'none'}. Resume with the version of the workload that "
                "the run started with."
            )
        here = self._identify_data()
        with blamed_on_part(step, "data"):
            difference = here.differs_from(state["data"])
        if difference:
            self._check_data(difference, step=step, accepted="data" in accept)
        if step > self._recipe.steps:
            raise ConfigError(
                f"steps must be at least {step}, the step that the run has reached, got "
                f"{self._recipe.steps}. Write steps={step} or more."
            )

    def _require_settings(self, saved: Mapping[str, Any], *, step: int) -> None:
        here = flat_settings(self._recipe)
        # One that only a newer or an older version has could not be put right.
        both = {key: value for key, value in here.items() if key in saved}
        places = places_in(type(self._recipe.data))
        if keys := decisive_differences({key: saved[key] for key in both}, both, places=places):
            raise CheckpointError(
                f"The checkpoint of step {step} was saved with other settings: "
                f"{difference_text(keys, saved, here)}. Resume with the saved settings, or start a "
                "new run."
            )

    def _check_data(self, difference: str, *, step: int, accepted: bool) -> None:
        if not accepted:
            raise CheckpointError(
                f"The training data differs from that of the checkpoint of step {step}: "
                f"{difference}. Restore the data, add --accept data (in Python accept=['data']) to "
                "continue with the new data, or start a new run."
            )
        self._accepted.append(
            FindingRecord(
                step=step,
                since=step + 1,
                module="",
                role="data",
                what="the run continues with other data",
                why=difference,
                action="accepted",
                advice="losses before and after this step are of different data",
            )
        )

    def restore(self, state: dict[str, Any]) -> Progress:
        """Restore everything but random generators, after the formats; return the progress."""
        step = state["step"]
        for name, shown in _SHOWN_AS.items():
            if name not in self._parts:
                continue
            part: Any = self._parts[name]
            with blamed_on_part(step, shown):
                saved = state[name]
                if part is self._prepared:
                    saved = self._model_state(saved, state.get("frozen", {}))
                    others = state.get("amax_of_ranks", [])
                    saved = {**saved, "amax": self._own_amax(saved["amax"], others)}
                part.load_state_dict(saved)
        for name, hook in self._hooks.items():
            assert hook.load_state_dict is not None
            with blamed_on_part(step, f"hook {name}"):
                hook.load_state_dict(state["hooks"][name])
        return Progress(step=step, batches=state["batches"], evaluated=state["evaluated"])

    def _model_state(
        self, saved: dict[str, Any] | StoredShards, frozen: Mapping[str, str]
    ) -> dict[str, Any]:
        """Return the state of the model placed as this run's, with its frozen weights."""
        if isinstance(saved, StoredShards):
            try:
                state = saved.read(self._prepared)
            except CheckpointError as error:
                raise damaged(saved.path, str(error)) from error
            state = self._frozen.put_back_into(state, frozen)
            return {**state, OUTLINE: state_outline(state)}
        state = self._frozen.put_back_into(saved, frozen)
        if is_sharded(self._prepared.model):
            state = sharded_state(self._prepared, state)
        return state

    def _own_amax(
        self, first: dict[str, Tensor], others: list[dict[str, Tensor]]
    ) -> dict[str, Tensor]:
        """Return this rank's amax histories, or the largest of all on another number of ranks."""
        every = [first, *others]
        if not others or len(every) == self._ranks.size:
            return every[self._ranks.rank if others else 0]
        return {name: torch.stack([each[name] for each in every]).amax(0) for name in first}

    def restore_randomness(self, state: dict[str, Any]) -> list[FindingRecord]:
        """Restore random generators; return findings about what could not be continued."""
        step, rank = state["step"], self._ranks.rank
        of_others = state.get("random_of_ranks", {})
        if rank and len(of_others) + 1 != self._ranks.size:  # another number of ranks than saved
            seed_everything(hashed(f"{self._recipe.seed} rank {rank} step {step}"))
            return self._accepted
        saved = of_others[str(rank)] if rank else state["random"]
        with blamed_on_part(step, "random state"):
            if restore_randomness(saved, self._device):
                return self._accepted
            saved_on = saved["device"]["type"]
        return [
            *self._accepted,
            FindingRecord(
                step=step,
                since=step,
                module="",
                role="random state",
                what=f"random numbers on {self._device.type} do not continue those of the run",
                why=f"the checkpoint was saved on {saved_on}",
                action=f"restarted them from seed={self._recipe.seed}",
                advice=f"resume on {saved_on} for a bit-exact continuation",
            ),
        ]


_SHOWN_AS = {
    "observer": "health readings",
    "prepared": "model state",
    "investigator": "diagnosis state",
    "vital_signs": "vital signs",
    "improvement": "evaluation history",
    "best_weights": "best weights",
    "strategy": "strategy",
}


def _saved(hook: Hook) -> dict[str, Any]:
    assert hook.state_dict is not None
    return hook.state_dict()
