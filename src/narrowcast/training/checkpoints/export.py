"""Output of a finished run: its weights in one safetensors file, and the files of its task."""

import contextlib
import hashlib
import json
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from safetensors.torch import load_file
from torch import Tensor, nn

from narrowcast.errors import CheckpointError, ConfigError, blamed_on
from narrowcast.plain_files import open_plain
from narrowcast.precision.step.prepared import Prepared
from narrowcast.runs.commands import resume_command
from narrowcast.runs.folder import CHECKPOINTS, RECORDS
from narrowcast.runs.lock import LOCK
from narrowcast.runs.strict_json import peek_json
from narrowcast.runs.writing import explain_write_error, replace_file, written_atomically
from narrowcast.training.checkpoints.tree import flatten, write_tensors
from narrowcast.training.task import Task

WEIGHTS = "model.safetensors"
RESULTS = "finished.json"
"""Written last: the step, and the size and checksum of each output file."""
NOT_OF_TASKS = frozenset({RECORDS, CHECKPOINTS, LOCK, "tensorboard", "wandb"})
MOST_BYTES = 16 * 2**20
"""Largest size of that file, enough for a hundred thousand outputs."""


@dataclass(frozen=True, kw_only=True)
class RunEnd:
    """Where and why a run ended."""

    step: int
    requested_steps: int
    """Steps in the recipe."""
    why: str = ""
    """Why it ended before the last step."""
    exported: int = 0
    """Step of the exported weights, if those of the best evaluation are exported."""
    measured: Mapping[str, float] = field(default_factory=dict)
    """Headline metric of that evaluation, by name."""
    extendable: bool = True
    """Whether more steps continue it like a longer run; not if its LR depends on their number."""

    def to_json(self) -> dict[str, Any]:
        """Return its part of `finished.json`."""
        best = {"exported": {"step": self.exported, **self.measured}}
        return {
            "step": self.step,
            **({"ended_early": self.ending_text} if self.why else {}),
            **(best if self.exported else {}),
        }

    @property
    def ending_text(self) -> str:
        """Why the run ended early, as text, or ""."""
        return (
            f"ended early at step {self.step} of {self.requested_steps}: {self.why}"
            if self.why
            else ""
        )


def write_results(
    prepared: Prepared,
    task: Task,
    folder: Path,
    *,
    end: RunEnd,
    best: Mapping[str, Tensor] = MappingProxyType({}),
) -> None:
    """Write the weights (or `best`), then the task's own files, then `finished.json`."""
    weights = folder / (task.weights_path or WEIGHTS)
    files = set[Path]()
    if not task.weights_path:
        export_weights(prepared, weights, best=best)
        files = {weights}
    if task.write_results is not None:
        safe = folder / CHECKPOINTS if task.weights_path else weights
        before = _seen(folder)
        with blamed_on(
            f"write_results of the task (the weights are safe in {safe}; once it is fixed, "
            f"`{resume_command(folder)}` writes the rest)"
        ):
            task.write_results(folder, prepared)
        files |= {path for path, seen in _seen(folder).items() if before.get(path) != seen}
    if not any(file.is_relative_to(weights) for file in files):
        raise ConfigError(
            "write_results of the task must save the weights to its weights_path, got nothing in "
            f"{weights}. The weights are safe in {folder / CHECKPOINTS}. Fix write_results, then "
            f"run `{resume_command(folder)}`."
        )
    listed = {file.relative_to(folder).as_posix(): _fingerprint(file) for file in sorted(files)}
    try:
        text = json.dumps({**end.to_json(), "files": listed}, indent=2)
        replace_file(folder / RESULTS, f"{text}\n".encode())
    except OSError as error:
        raise CheckpointError(
            f"Cannot write {folder / RESULTS}: {explain_write_error(error)}. Then run "
            f"`{resume_command(folder)}`."
        ) from error


def results_are_whole(folder: Path, *, step: int, exported: int = 0) -> bool:
    """Return whether the output of a run of `step` steps with weights of `exported` is whole."""
    match peek_json(folder / RESULTS, most_bytes=MOST_BYTES):
        case {"step": int(written), "files": {**files}, **rest} if written == step and files:
            best = rest.get("exported", {})
            if (best.get("step", 0) if isinstance(best, dict) else None) != exported:
                return False
            return all(_is_as_written(folder / str(name), files[name]) for name in files)
        case _:
            return False


def exported_tensors(folder: Path) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of each safetensors file that a finished run wrote."""
    match peek_json(folder / RESULTS, most_bytes=MOST_BYTES):
        case {"files": {**files}}:
            names = [str(name) for name in files if str(name).endswith(".safetensors")]
            return {name: load_file(folder / name) for name in names}
        case _:
            return {}


def export_weights(
    prepared: Prepared, path: Path, *, best: Mapping[str, Tensor] = MappingProxyType({})
) -> None:
    """Write the model's state to `path`, every weight in full precision.

    For tied weights the file has the first name, as `safetensors.torch.load_model` expects.
    """
    tied, weights = tied_names(prepared.model), {**prepared.engine.weights.full_by_name(), **best}
    _, tensors = flatten({name: weights[name] for name in weights if name not in tied})
    with written_atomically(path, hint="the last checkpoint holds the same weights") as extra:
        write_tensors(extra, tensors, metadata={"format": "pt"})


def tied_names(model: nn.Module) -> set[str]:
    """Return the names of tied weights except their first."""
    first: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    return {name for name, each in named if first.setdefault(id(each), name) != name}


def _seen(folder: Path) -> dict[Path, tuple[int, int]]:
    """Return modification time and size of each file, except records, checkpoints and trackers."""
    result = {}
    for path in folder.rglob("*"):
        others = path.relative_to(folder).parts[0] in NOT_OF_TASKS
        with contextlib.suppress(OSError):  # gone by now
            status = path.lstat()
            if stat.S_ISREG(status.st_mode) and not others:
                result[path] = (status.st_mtime_ns, status.st_size)
    return result


def _fingerprint(file: Path) -> dict[str, Any]:
    with open_plain(file) as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    return {"bytes": file.stat().st_size, "sha256": digest}


def _is_as_written(file: Path, written: object) -> bool:
    try:
        return _fingerprint(file) == written
    except OSError:
        return False
