"""The run folder: settings, environment, records and output, never half written.

Only the last line of `records.jsonl` may be torn after a kill or a full disk.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self, final

from narrowcast.errors import CheckpointError, ConfigError
from narrowcast.plain_files import read_plain
from narrowcast.runs import strict_json
from narrowcast.runs.commands import resume_command
from narrowcast.runs.records import Record
from narrowcast.runs.records_file import RecordsFile
from narrowcast.runs.shape import Shape, misfit, unreadable
from narrowcast.runs.task_info import BEFORE_TASK_JSON, TaskInfo
from narrowcast.runs.writing import NO_SPACE, explain_write_error, replace_file

RECIPE = "recipe.yaml"
RESOLVED = "resolved.json"
ENVIRONMENT = "environment.json"
RECORDS = "records.jsonl"
TASK = "task.json"
CHECKPOINTS = "checkpoints"


@final
class RunFolder:
    """The folder of one run; a context manager, because it keeps the records file open."""

    def __init__(self, path: Path) -> None:
        """Use `create` or `open`, which check the path."""
        self.path = path
        self._records = RecordsFile(path / RECORDS)

    @classmethod
    def create(
        cls,
        path: str | Path,
        *,
        recipe_text: str,
        resolved: dict[str, Any],
        environment: dict[str, Any],
    ) -> Self:
        """Create the folder of a new run; raise if it is not empty."""
        run = cls(Path(path))
        _require_free(run.path)
        made: list[Path] = []
        try:
            _make_folders(run.path, made)
            _claim(run.path, recipe_text, made)
            made.append(run.checkpoints)
            run.checkpoints.mkdir()
            made += [run.path / name for name in (RESOLVED, ENVIRONMENT, RECORDS)]
            run.write_json(RESOLVED, resolved)
            run.write_json(ENVIRONMENT, {"sessions": [environment]})
            (run.path / RECORDS).touch()
        except (OSError, CheckpointError, ConfigError) as error:
            _undo(made)
            if not isinstance(error, OSError):
                raise
            refusal = CheckpointError if error.errno in NO_SPACE else ConfigError
            raise refusal(
                f"Cannot create a run folder at {path}: {explain_write_error(error)}, or choose "
                "another --out."
            ) from error
        return run

    @classmethod
    def open(cls, path: str | Path, *, needs: Sequence[str] = (RECORDS, RESOLVED)) -> Self:
        """Open the folder of an existing run, or raise CheckpointError."""
        path = Path(path)
        if not path.is_dir():
            result = "is a file" if path.exists() else "does not exist"
            raise CheckpointError(f"{path} {result}. Name the --out folder of a run.")
        for name in needs:
            if not (path / name).is_file():
                raise CheckpointError(_no_run(path, name))
        return cls(path)

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    @property
    def recipe_text(self) -> str:
        try:
            return read_plain(self.path / RECIPE).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"Cannot read {self.path / RECIPE}: {error}.") from error

    def write(self, record: Record) -> None:
        """Append a record, which survives a kill of the process from here on."""
        self._records.append(record)

    def records(self) -> list[Record]:
        """Return every record; a torn last line is left out, any other raises."""
        return self._records.read()

    def rewind(self, step: int, *, saved_bytes: int | None = None) -> list[Record]:
        """Drop the records after the checkpoint of `step`, and a torn line; return the rest."""
        return self._records.rewind(step, saved_bytes=saved_bytes)

    def write_json(self, name: str, value: object) -> None:
        """Write a JSON file of this folder atomically."""
        target = self._file_called(name)
        text = strict_json.dumps(value, indent=2) + "\n"
        try:
            replace_file(target, text.encode())
        except OSError as error:
            raise CheckpointError(
                f"Cannot write {target}: {explain_write_error(error)}."
            ) from error

    def read_json(self, name: str, shape: Shape = dict) -> Any:
        """Return the content of a JSON file; raise CheckpointError if it has another shape."""
        target = self._file_called(name)
        try:
            matched = strict_json.loads(read_plain(target).decode())
        except OSError as error:
            raise CheckpointError(f"Cannot read {target}: {error.strerror}.") from error
        except (ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{target} is damaged: {error}. Restore it from a copy."
            ) from error
        if wrong := unreadable(matched) or misfit(matched, shape):
            raise CheckpointError(f"{target} is damaged: {wrong}. Restore it from a copy.")
        return matched

    def task_info(self) -> TaskInfo:
        """Return units and metrics of the run; without `task.json`, of a language model."""
        if not (self.path / TASK).exists():
            return BEFORE_TASK_JSON
        return TaskInfo.from_json(self.read_json(TASK))

    def require_task_info(self, info: TaskInfo) -> None:
        """Raise if this is the folder of a run with other units or metrics."""
        if (self.path / TASK).exists() and (before := self.task_info()).judged_by != info.judged_by:
            raise CheckpointError(
                f"{self.path} is a run of another task: it counts {before.units}, with "
                f"{_describe_owner(before)}. This task counts {info.units}, with "
                f"{_describe_owner(info)}. Resume it with the version of the workload it was "
                "started with, or start a new run."
            )

    def set_task_info(self, info: TaskInfo) -> None:
        """Write `task.json` of a new run; raise if a resumed run has another."""
        self.require_task_info(info)
        if not (self.path / TASK).exists():
            self.write_json(TASK, info.to_json())

    def add_session(self, environment: dict[str, Any]) -> list[str]:
        """Add the environment of a process that resumes this run; return notices about it."""
        try:
            result = self.read_json(ENVIRONMENT)
        except CheckpointError:
            result = None
        if isinstance(result, dict) and isinstance(result.get("sessions"), list):
            self.write_json(ENVIRONMENT, {"sessions": [*result["sessions"], environment]})
            return []
        aside = self.path / f"{ENVIRONMENT}.damaged"
        message = (
            f"{ENVIRONMENT} was damaged or missing, so the environment of the run's start is not "
            "known"
        )
        if (self.path / ENVIRONMENT).exists():
            (self.path / ENVIRONMENT).replace(aside)
            message += f". It was renamed to {aside.name}"
        self.write_json(ENVIRONMENT, {"sessions": [environment]})
        return [message]

    def began_in(self) -> str | None:
        """Return the working directory of the process that started the run, if known."""
        try:
            match self.read_json(ENVIRONMENT):
                case {"sessions": [{"folder": str(folder)}, *_]}:
                    return folder
        except CheckpointError:
            pass
        return None

    def claim(self) -> None:
        """Become the only process that writes to this folder; change nothing else."""
        self._records.claim()

    def close(self) -> None:
        """Close the records; another process may then write to this folder."""
        self._records.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _file_called(self, name: str) -> Path:
        plain = Path(name).name == name and "\\" not in name and "\0" not in name
        if not plain or not name.endswith(".json") or name.startswith("."):
            raise CheckpointError(
                f"The name of a file in a run folder must be like plan.json, got {name!r}."
            )
        return self.path / name


def _no_run(path: Path, name: str) -> str:
    """Return why a folder without the file `name` is not a run, as text."""
    around = next((p for p in path.absolute().parents[:2] if (p / RECORDS).is_file()), None)
    if around is not None:
        return f"{path} is part of the run in {around}. Name that folder."
    if any((path / CHECKPOINTS).glob("step-*")):
        word = "settings" if name == RESOLVED else "records"
        return (
            f"{path} has lost its {name}. Restore it from a copy, or add --accept {word} to "
            "`narrowcast resume` to continue from the checkpoint without it."
        )
    return f"{path} is not a run folder, because it has no {name}. Name the --out folder of a run."


def _describe_owner(info: TaskInfo) -> str:
    parts = f" and the loss parts {', '.join(info.loss_parts)}" if info.loss_parts else ""
    metrics = ", ".join(f"{m.name} ({m.better} is better)" for m in info.metrics)
    return f"the metrics {metrics}{parts}"


def _require_free(path: Path) -> None:
    if (path / RESOLVED).exists() or (path / RECORDS).exists():
        raise holds_a_run(path)
    if path.is_dir() and any(path.iterdir()):
        raise ConfigError(
            f"{path} has files that are not a run of narrowcast. Choose another --out, or empty it."
        )
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{path} must be a folder, got a file. Choose another --out.")


def holds_a_run(path: Path) -> ConfigError:
    """Return the error for a folder with a run in it."""
    return ConfigError(
        f"{path} already has a run. Choose another --out, or resume it with "
        f"`{resume_command(path)}`."
    )


def _make_folders(path: Path, made: list[Path]) -> None:
    """Create `path` and its parents, and add new ones to `made`."""
    made += [folder for folder in (path, *path.parents) if not folder.exists()][::-1]
    path.mkdir(parents=True, exist_ok=True)


def _claim(path: Path, recipe_text: str, made: list[Path]) -> None:
    """Write the recipe first; of two runs that start at once, one raises here."""
    try:
        file = (path / RECIPE).open("xb")
    except FileExistsError:
        raise holds_a_run(path) from None
    made.append(path / RECIPE)
    with file:
        file.write(recipe_text.encode())


def _undo(made: list[Path]) -> None:
    """Remove what was created, newest first, if it is empty."""
    for path in reversed(made):
        with contextlib.suppress(OSError):
            if path.is_dir():
                path.rmdir()
            else:
                path.unlink(missing_ok=True)
