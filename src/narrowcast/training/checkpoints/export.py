"""Output of a finished run: its weights in one safetensors file, and the files of its task."""

import contextlib
import copy
import hashlib
import json
import stat
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from narrowcast.errors import CheckpointError, ConfigError, UnsupportedError, blamed_on
from narrowcast.plain_files import open_plain
from narrowcast.precision.dtensor import as_sharded
from narrowcast.precision.step.prepared import Prepared
from narrowcast.precision.weights.master import Full
from narrowcast.runs.commands import resume_command
from narrowcast.runs.folder import CHECKPOINTS, RECORDS
from narrowcast.runs.lock import LOCK
from narrowcast.runs.strict_json import peek_json
from narrowcast.runs.writing import (
    explain_write_error,
    replace_file,
    sync_file,
    written_atomically,
)
from narrowcast.training.checkpoints.ranks import CheckpointRanks
from narrowcast.training.checkpoints.run_checkpoint import whole_state
from narrowcast.training.checkpoints.tree import tensor_file_header
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


def take_part_in_results(
    prepared: Prepared, task: Task, *, best: Mapping[str, Tensor] = MappingProxyType({})
) -> None:
    """Take part in what rank 0 computes in `write_results` with sharded weights; write nothing."""
    with tempfile.TemporaryDirectory(prefix="narrowcast-") as scratch:
        if not task.weights_path:
            export_weights(prepared, Path(scratch, WEIGHTS), best=best)
        if task.write_results is not None:
            with blamed_on("write_results of the task"):
                task.write_results(Path(scratch), prepared)


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
    full = prepared.engine.weights.full

    def get_value(name: str, value: Tensor) -> Tensor:
        return best[name] if name in best else _value(value, full)

    hint, model = "the last checkpoint holds the same weights", prepared.model
    # By the state: parameters may be those that FSDP gathered for an evaluation.
    sharded = any(as_sharded(v) is not None for v in model.state_dict(keep_vars=True).values())
    # Where each rank has the whole model, the main one exports it alone.
    _write_whole(model, path, get_value, hint=hint, ranks=CheckpointRanks() if sharded else None)


def whole_weights(prepared: Prepared, *, trained: bool = False) -> dict[str, Tensor] | None:
    """Return the model's state by name in full precision, or only what is `trained`.

    With sharded weights, all ranks call it. Rank 0 gets whole tensors on the host, others None.
    """
    weights = prepared.engine.weights.full_by_name()
    if trained:
        held = set(prepared.engine.weights.names)
        weights = {name: value for name, value in weights.items() if name in held}
    if not any(as_sharded(value) is not None for value in weights.values()):
        return weights
    is_first = CheckpointRanks().rank == 0
    weights = whole_state(weights, needed=is_first)
    return weights if is_first else None


def save_model(
    run: Prepared | nn.Module,
    path: str | Path,
    *,
    weights: Literal["trained", "ema", "eval"] = "trained",
    dtype: torch.dtype | None = None,
) -> None:
    """Write the whole model of a run, sharded or not, for plain torch or transformers.

    With a process group, every rank must call it, and rank 0 writes. Shards are put together one
    tensor at a time, so no rank holds more than its shards and one whole tensor.

    Args:
        run: The prepared run, or a model.
        path: A file that ends with `.safetensors`; or a folder, which gets `model.safetensors` and,
            for a transformers model, the configuration that `from_pretrained` reads.
        weights: The trained weights, their EMA, or the evaluation weights of a lookahead.
        dtype: Cast floating-point tensors to it. None: unchanged, and fp32 for 16-bit weights
            with master weights.

    Raises:
        CheckpointError: The file cannot be written. All ranks raise.
        ConfigError: The run has no such weights.
        UnsupportedError: A folder is requested for a PEFT model.
    """
    path = Path(path).expanduser().absolute()
    model = run.model if isinstance(run, Prepared) else run
    is_file = path.suffix == ".safetensors"
    if not is_file and hasattr(model, "peft_config"):
        raise UnsupportedError(
            f"save_model() writes folders for models without adapters, got {path} for a PEFT "
            "model. Write a path that ends with .safetensors, or merge the adapter first."
        )
    full = _choose_weights(run, weights)

    def get_value(name: str, value: Tensor) -> Tensor:
        result = _value(value, full)
        return result.to(dtype) if dtype and result.is_floating_point() else result

    file = path if is_file else path / WEIGHTS
    ranks, hint = CheckpointRanks(), "the weights in memory are unchanged"
    ranks.first_does(lambda: _make_folder(file))
    _write_whole(model, file, get_value, hint=hint, ranks=ranks)
    if not is_file and hasattr(model, "config"):
        ranks.first_does(lambda: _write_config(model, path, dtype))


def _choose_weights(run: Prepared | nn.Module, which: str) -> Full:
    """Return a function from a parameter to the value to write."""
    if isinstance(run, nn.Module):
        if which != "trained":
            raise ConfigError(f"weights={which!r} needs a prepared run, got a model. Pass the run.")
        return lambda parameter: parameter.detach()
    trained = run.engine.weights
    trained.ownership.check_not_swapped(doing="save_model()")
    choices = {"trained": trained.full, "ema": trained.averaged, "eval": trained.answer}
    if which not in choices:
        raise ConfigError(f"weights must be {', '.join(choices)}, got {which!r}.")
    if (which == "ema" and not run.has_ema) or (which == "eval" and not run.has_lookahead):
        needed = "ema_decay" if which == "ema" else "lookahead"
        raise ConfigError(f"weights={which!r} needs {needed} in prepare(). Pass weights='trained'.")
    return choices[which]


def _make_folder(file: Path) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"Cannot write {file}: {explain_write_error(error)}.") from error


def _value(value: Tensor, full: Full) -> Tensor:
    return full(value) if isinstance(value, nn.Parameter) else value.detach()


def _write_whole(
    model: nn.Module,
    path: Path,
    get_value: Callable[[str, Tensor], Tensor],
    *,
    hint: str,
    ranks: CheckpointRanks | None,
) -> None:
    """Write a model's state tensor by tensor, by this process or together with all ranks.

    Of tied weights the file has the first.
    """
    tied = tied_names(model)
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    tensors = {name: v for name, v in state.items() if name not in tied and isinstance(v, Tensor)}
    outline = dict[str, tuple[torch.dtype, torch.Size]]()
    for name, value in tensors.items():
        result = get_value(name, value)
        outline[name] = result.dtype, result.shape
    # Wider ones first: readers map the file, and values are aligned then.
    order = sorted(outline, key=lambda name: -outline[name][0].itemsize)
    values = (get_value(name, tensors[name]) for name in order)
    # Every rank has a part in each; what rank 0 cannot write is read all the same.
    whole = (v if as_sharded(v) is None else as_sharded(v).full_tensor() for v in values)

    def write() -> None:
        with written_atomically(path, hint=hint) as extra:
            with extra.open("wb") as file:
                file.write(tensor_file_header({name: outline[name] for name in order}))
                for tensor in whole:
                    flat = tensor.cpu().contiguous().reshape(-1)
                    file.write(flat.view(torch.uint8).numpy().data)
            sync_file(extra)

    if ranks is None:
        write()
        return

    def take_part() -> None:
        try:
            if ranks.rank == 0:
                write()
        finally:
            for _ in whole:
                pass

    ranks.together(take_part)


def _write_config(model: Any, folder: Path, dtype: torch.dtype | None) -> None:
    """Write the configuration of a transformers model."""
    if not hasattr(model.config, "save_pretrained"):
        return
    config = copy.deepcopy(model.config)
    # FSDP and prepare() change the class of a model; transformers looks for its own.
    ours = ("narrowcast.", "torch.distributed.")
    own = next(each for each in type(model).__mro__ if not each.__module__.startswith(ours))
    config.architectures = [own.__name__]
    config.dtype = dtype or torch.float32
    config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None and model.can_generate():
        model.generation_config.save_pretrained(folder)


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
