"""Whether a run has diverged: updated from its records, saved with it, checked at its end."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from narrowcast.errors import CheckpointError, DivergedError
from narrowcast.precision.dtensor import local_part
from narrowcast.precision.step.prepared import Prepared
from narrowcast.runs import Record
from narrowcast.runs.commands import resume_command
from narrowcast.runs.vitals import Vitals
from narrowcast.training.checkpoints.checkpoint import checkpoint_step, checkpoints, load_checkpoint
from narrowcast.training.checkpoints.export import WEIGHTS
from narrowcast.training.task import Task


def bad_weights(prepared: Prepared) -> str:
    """Return which trained or averaged weights are not finite, as text, or "". Synchronises."""
    weights = prepared.engine.weights
    names = weights.names
    matches = _not_finite(dict(zip(names, weights.all, strict=True)))
    if matches:
        return f"{len(matches)} of {len(names)} weights are not finite, the first {matches[0]}"
    if weights.average is None:
        return ""
    averages = _not_finite(dict(zip(names, weights.average.averages, strict=True)))
    if not averages:
        return ""
    many = f"the averages of {len(averages)} of {len(names)} weights are not finite"
    return f"{many}, the first that of {averages[0]}"


@final
class VitalSigns:
    """Tracks whether a run diverges."""

    def __init__(self, prepared: Prepared, task: Task, *, folder: Path | None) -> None:
        self._prepared, self._headline, self._folder = prepared, task.info.headline.name, folder
        self._exported = task.weights_path or WEIGHTS
        self._vitals, self._bad_from = Vitals(), 0

    def note(self, record: Record) -> None:
        """Take note of a record; called in order."""
        self._vitals = self._vitals.after(record, headline=self._headline)

    def good_until(self, step: int) -> int:
        """Return the last step whose checkpoint must not make room for nonfinite ones."""
        if not bad_weights(self._prepared):
            self._bad_from = 0
            return step
        self._bad_from = self._bad_from or step
        return self._bad_from - 1

    def require_alive(self, step: int, named: Callable[[DivergedError], DivergedError]) -> None:
        """Raise DivergedError if the run has diverged; `named` adds what led to it."""
        wrong = self._vitals.diverged
        if not wrong:
            return
        terms = self._prepared.engine.log.wording
        if not self._vitals.applied and self._scale_still_falls():
            smaller = terms.loss_scale("init_scale")
            error = DivergedError(
                wrong, f"The loss scale is still falling. Try a smaller {smaller}"
            )
        else:
            error = named(DivergedError(wrong, f"Try a lower {terms.lr} or a wider policy"))
        message = str(error).rstrip(".")
        raise DivergedError(f"The run has diverged: {message}", self._left(step))

    def state_dict(self) -> dict[str, Any]:
        return {**self._vitals.to_json(), "bad_from": self._bad_from}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._bad_from = state.get("bad_from", 0)
        self._vitals = Vitals(**{key: state[key] for key in state if key != "bad_from"})

    def _scale_still_falls(self) -> bool:
        settings, scales = self._prepared.loss_scale, self._prepared.engine.scale_values()
        if settings is None or not settings.dynamic:
            return False
        return any(scale.item() > settings.min_scale for scale in scales)

    def _left(self, step: int) -> str:
        """Return what is in the folder, and which checkpoint to resume from, as text."""
        folder = self._folder
        if folder is None:
            return ""
        exported = folder / self._exported
        notice = "is from an earlier end of this run" if exported.exists() else "was not written"
        if not self._vitals.weights:
            return f"{exported} {notice}. The weights are in the last checkpoint"
        finite = self._newest_finite(folder / "checkpoints", before=step)
        if finite is None:
            return f"{exported} {notice}, and no checkpoint has finite weights"
        resume = f"`{resume_command(folder)}`"
        return (
            f"{exported} {notice}. {finite} is the newest checkpoint with finite weights: remove "
            f"the later ones, then {resume} continues from it"
        )

    def _newest_finite(self, folder: Path, *, before: int) -> Path | None:
        trained = self._prepared.engine.weights.names
        for path in reversed(checkpoints(folder)):
            if checkpoint_step(path) >= before:
                continue
            try:
                saved = load_checkpoint(path)["prepared"]
            except CheckpointError:
                continue
            stored = {name: saved["weights"][name] for name in trained if name in saved["weights"]}
            averages = {str(i): average for i, average in enumerate(saved["average"] or ())}
            if not _not_finite(stored) and not _not_finite(averages):
                return path
        return None


@torch.no_grad()
def _not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    parts = {name: part for name, t in tensors.items() if (part := local_part(t)).numel()}
    if not parts:
        return []
    largest = torch._foreach_norm(list(parts.values()), float("inf"))
    finite = torch.stack([each.float() for each in largest]).isfinite().tolist()
    return [name for name, good in zip(parts, finite, strict=True) if not good]
