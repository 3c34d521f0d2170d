"""The weights of the best evaluation, in a file of the run folder until the run ends.

A file stays while a checkpoint refers to it, because a killed run resumes with it.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from safetensors import SafetensorError, safe_open
from torch import Tensor

from narrowcast.config.common_sections import EvalSection
from narrowcast.config.sections import Recipe
from narrowcast.errors import CheckpointError
from narrowcast.hardware.transfers import to_host
from narrowcast.plain_files import open_plain
from narrowcast.precision.nested import map_tensors
from narrowcast.precision.step.prepared import Prepared
from narrowcast.precision.step.saved_state import collect_weights, put_weights
from narrowcast.runs import Record, TaskInfo
from narrowcast.runs.improvement import Improvement
from narrowcast.runs.writing import written_atomically
from narrowcast.training.checkpoints.checkpoint import checkpoint_step, checkpoints
from narrowcast.training.checkpoints.export import RunEnd
from narrowcast.training.checkpoints.frozen import FrozenWeights
from narrowcast.training.checkpoints.run_checkpoint import sharded_state, whole_state
from narrowcast.training.checkpoints.tree import flatten, unflatten, write_tensors
from narrowcast.training.parallel import ALONE, RunRanks, is_sharded

FOLDER = "best"
_NAME = re.compile(r"step-([0-9]{1,18})\.safetensors")


@final
class BestWeights:
    """The weights of the best evaluation so far, if the run exports them."""

    def __init__(
        self,
        prepared: Prepared,
        frozen: FrozenWeights,
        *,
        folder: Path | None,
        wanted: bool,
        ranks: RunRanks = ALONE,
    ) -> None:
        self._ranks = ranks
        self._prepared, self._frozen, self._folder, self._wanted = prepared, frozen, folder, wanted
        self.step = 0
        """Step of the weights; 0 if there are none."""
        self._sha256 = ""
        self._held: dict[str, Any] | None = None
        """The weights in memory, if there is no folder."""

    def keep(self, step: int, *, answer: Callable[[], Mapping[str, Tensor]] = dict) -> None:
        """Save the current weights, or those that a strategy returns as `answer`. Synchronises."""
        if not self._wanted:
            return
        now = collect_weights(self._prepared.engine)
        now["weights"] |= answer()
        # Frozen weights do not change; trained ones are saved with every digit.
        state, _ = self._frozen.split_frozen(now)
        if is_sharded(self._prepared.model):
            state = whole_state(state, needed=self._ranks.is_main or self._folder is None)
        if self._folder is None:
            self._held = map_tensors(state, lambda tensor: tensor.detach().cpu().clone())
        else:
            digest = ""
            if self._ranks.is_main:
                digest = _write(_weights_path(self._folder, step), state)
                _remove_useless(self._folder, before=self.step, now=step)
            self._sha256 = self._ranks.from_main(digest)
        self.step = step

    def load_into_model(self) -> dict[str, Tensor]:
        """Load them into the model; return them by name in full precision."""
        if not self.step:
            return {}
        state = self._held
        if self._folder is not None:
            state = self._read(self._folder)
            if self._ranks.is_main:
                _remove_useless(self._folder, before=self.step, now=self.step)
        assert state is not None
        weights: dict[str, Tensor] = state["weights"]
        if is_sharded(self._prepared.model):
            state = sharded_state(self._prepared, state)
        put_weights(self._prepared.engine, state)
        return weights

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to read them."""
        return {"wanted": self._wanted, "step": self.step, "sha256": self._sha256}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict()` after checking its file."""
        if not self._wanted:
            return
        if not state["wanted"]:
            raise CheckpointError(
                "eval.keep_best cannot be switched on for a run that was started without it. Leave "
                "out eval.keep_best=true, or start a new run with it."
            )
        self.step, self._sha256 = int(state["step"]), str(state["sha256"])
        if not self.step:
            return
        if self._folder is None:
            raise CheckpointError(
                "The best weights are in the run folder, and this run has none. Pass folder=."
            )
        self._require_whole(_weights_path(self._folder, self.step))

    def _require_whole(self, file: Path) -> None:
        try:
            whole = _digest(file) == self._sha256
        except OSError:
            whole = False
        if not whole:
            raise CheckpointError(
                f"{file}, the weights of the best evaluation, is missing or was changed. Restore "
                "it from a copy, or add eval.keep_best=false to export the last weights."
            )

    def _read(self, folder: Path) -> dict[str, Any]:
        file = _weights_path(folder, self.step)
        self._require_whole(file)
        try:
            with safe_open(file, framework="pt") as opened:
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
                tree = json.loads(opened.metadata()["tree"])
            state: dict[str, Any] = unflatten(tree, tensors)
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}.") from error
        return state


def _weights_path(folder: Path, step: int) -> Path:
    return folder / FOLDER / f"step-{step:06d}.safetensors"


def _write(file: Path, state: dict[str, Any]) -> str:
    """Write a file atomically, and return its digest."""
    tree, held = flatten(state)
    tensors = to_host(held)
    with written_atomically(file, hint="the last checkpoint is unchanged") as extra:
        file.parent.mkdir(parents=True, exist_ok=True)
        # One entry: of several, safetensors writes whichever first, and bytes would differ.
        write_tensors(extra, tensors, metadata={"tree": json.dumps(tree)})
        return _digest(extra)


def _digest(file: Path) -> str:
    with open_plain(file) as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _remove_useless(folder: Path, *, before: int, now: int) -> None:
    """Remove all best weights except `now` and those that checkpoints refer to.

    A checkpoint refers to the newest up to it, or to the one before if it was saved ahead of its
    evaluation. Those after `before` are from steps the run went back from.
    """
    with suppress(OSError):
        named = [(_NAME.fullmatch(path.name), path) for path in (folder / FOLDER).iterdir()]
        results = {int(match[1]): path for match, path in named if match}
        own = sorted(step for step in results if step <= before)
        needed = {now}
        for saved in map(checkpoint_step, checkpoints(folder / "checkpoints")):
            needed.update([step for step in own if step <= saved][-1:])
            needed.update([step for step in own if step < saved][-1:])
        for step in results.keys() - needed:
            results[step].unlink(missing_ok=True)


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
        return self.improvement.to_json()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.improvement = Improvement(**state)
