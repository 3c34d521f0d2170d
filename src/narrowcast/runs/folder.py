"""The run folder: what was asked, where it ran, and what happened, never half written.

A record is one line appended to `records.jsonl`; every other file is written beside itself,
synced and renamed. So after a kill or a full disk each file is either the old or the new one, and
at most the last line of the records is torn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
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
    """One run's folder; a context manager, because it keeps the records open once written."""

    def __init__(self, path: Path) -> None:
        """Take `path` as it is; use `create` or `open`, which check it."""
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
        """Make the folder of a new run, or refuse a path that holds anything."""
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
                f"cannot make a run folder at {path}: {explain_write_error(error)}, "
                "or choose another --out"
            ) from error
        return run

    @classmethod
    def open(cls, path: str | Path, *, needs: Sequence[str] = (RECORDS, RESOLVED)) -> Self:
        """Open the folder of a run that was begun before, or raise CheckpointError."""
        path = Path(path)
        if not path.is_dir():
            result = "is a file" if path.exists() else "does not exist"
            raise CheckpointError(f"{path} {result}; name the --out folder of a run")
        for name in needs:
            if not (path / name).is_file():
                raise CheckpointError(_no_run(path, name))
        return cls(path)

    @property
    def checkpoints(self) -> Path:
        """The folder the run's checkpoints lie in."""
        return self.path / CHECKPOINTS

    @property
    def recipe_text(self) -> str:
        """The recipe as it was given."""
        try:
            return read_plain(self.path / RECIPE).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"cannot read {self.path / RECIPE}: {error}") from error

    def write(self, record: Record) -> None:
        """Append `record`; when this returns, it survives the death of the process."""
        self._records.append(record)

    def records(self) -> list[Record]:
        """Read every whole record; a torn last line is left out, any other is an error."""
        return self._records.read()

    def rewind(self, step: int, *, saved_bytes: int | None = None) -> list[Record]:
        """Drop the records after the checkpoint of `step`, and a torn line; return the rest."""
        return self._records.rewind(step, saved_bytes=saved_bytes)

    def hold(self) -> None:
        """Become the one process that writes to this folder; refused where another is."""
        self._records.hold()

    def is_at(self, path: Path) -> bool | None:
        """Say whether `path` is the folder this run writes to, and its records are in it.

        None where the disk does not tell.
        """
        return self._records.is_at(path / RECORDS)

    def move_to(self, path: Path) -> None:
        """Go on in the folder `path`, with the records so far in it, wherever they are now."""
        self.path = path
        self._records.move_to(path / RECORDS)
        self.checkpoints.mkdir(exist_ok=True)

    def write_json(self, name: str, value: object) -> None:
        """Write `value` to the file `name` of this folder, whole or not at all."""
        target = self._file_called(name)
        text = strict_json.dumps(value, indent=2) + "\n"
        try:
            replace_file(target, text.encode())
        except OSError as error:
            raise CheckpointError(f"cannot write {target}: {explain_write_error(error)}") from error

    def read_json(self, name: str, shape: Shape = dict) -> Any:
        """Read the file `name` of this folder, or raise CheckpointError if it has another shape."""
        target = self._file_called(name)
        try:
            matched = strict_json.loads(read_plain(target).decode())
        except OSError as error:
            raise CheckpointError(f"cannot read {target}: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{target} is damaged: {error}; put it back from a copy"
            ) from error
        if wrong := unreadable(matched) or misfit(matched, shape):
            raise CheckpointError(f"{target} is damaged: {wrong}; put it back from a copy")
        return matched

    def task_info(self) -> TaskInfo:
        """Return what the run counts and how it is judged.

        A folder without `task.json` is of a version that knew language models only.
        """
        if not (self.path / TASK).exists():
            return BEFORE_TASK_JSON
        return TaskInfo.from_json(self.read_json(TASK))

    def require_task_info(self, info: TaskInfo) -> None:
        """Refuse to be the folder of a run that counts or is judged otherwise."""
        if (self.path / TASK).exists() and (before := self.task_info()).judged_by != info.judged_by:
            raise CheckpointError(
                f"{self.path} is a run of another task: it counts {before.units}, with "
                f"{_describe_owner(before)}; the task here counts {info.units}, with "
                f"{_describe_owner(info)}. Resume "
                "it with the version of its workload that it was begun with, or start a new run"
            )

    def set_task_info(self, info: TaskInfo) -> None:
        """Write it when the run begins; refuse another one when it is continued."""
        self.require_task_info(info)
        if not (self.path / TASK).exists():
            self.write_json(TASK, info.to_json())

    def add_session(self, environment: dict[str, Any]) -> list[str]:
        """Note the environment of one more process that continues this run.

        Where the earlier ones cannot be read they are put aside, and that is what is returned: they
        tell about the run, and nothing of it depends on them.
        """
        try:
            result = self.read_json(ENVIRONMENT)
        except CheckpointError:
            result = None
        if isinstance(result, dict) and isinstance(result.get("sessions"), list):
            self.write_json(ENVIRONMENT, {"sessions": [*result["sessions"], environment]})
            return []
        aside = self.path / f"{ENVIRONMENT}.damaged"
        message = f"{ENVIRONMENT} was damaged or missing, so what the run began on is not known"
        if (self.path / ENVIRONMENT).exists():
            (self.path / ENVIRONMENT).replace(aside)
            message += f"; it is kept as {aside.name}"
        self.write_json(ENVIRONMENT, {"sessions": [environment]})
        return [message]

    def began_in(self) -> str | None:
        """Return the working directory of the process that began the run, where that is known."""
        try:
            match self.read_json(ENVIRONMENT):
                case {"sessions": [{"folder": str(folder)}, *_]}:
                    return folder
        except CheckpointError:
            pass
        return None

    def claim(self) -> None:
        """Become the one process that writes to this folder, or refuse to; change nothing else."""
        self._records.claim()

    def close(self) -> None:
        """Let go of the records; another process may then write to this folder."""
        self._records.close()

    def __enter__(self) -> Self:
        """Return the folder itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the folder."""
        self.close()

    def _file_called(self, name: str) -> Path:
        plain = Path(name).name == name and "\\" not in name and "\0" not in name
        if not plain or not name.endswith(".json") or name.startswith("."):
            raise CheckpointError(
                f"{name!r} is not the name of a file in a run folder; write e.g. plan.json"
            )
        return self.path / name


def _no_run(path: Path, name: str) -> str:
    """Say what a folder without the file `name` is, as far as can be seen."""
    around = next((p for p in path.absolute().parents[:2] if (p / RECORDS).is_file()), None)
    if around is not None:
        return f"{path} is a part of the run in {around}; name that folder"
    if any((path / CHECKPOINTS).glob("step-*")):
        word = "settings" if name == RESOLVED else "records"
        return (
            f"{path} has lost its {name}; put it back from a copy, or let `narrowcast resume` go "
            f"on from the checkpoint without it: add --accept {word}"
        )
    return f"{path} is not a run folder: it has no {name}; name the --out folder of a run"


def _describe_owner(info: TaskInfo) -> str:
    parts = f" and the loss parts {', '.join(info.loss_parts)}" if info.loss_parts else ""
    metrics = ", ".join(f"{m.name} ({m.better} is better)" for m in info.metrics)
    return f"the metrics {metrics}{parts}"


def _require_free(path: Path) -> None:
    if (path / RESOLVED).exists() or (path / RECORDS).exists():
        raise holds_a_run(path)
    if path.is_dir() and any(path.iterdir()):
        raise ConfigError(
            f"{path} holds files that are not a run of narrowcast; choose another --out, "
            "or empty it"
        )
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{path} is a file, not a folder; choose another --out")


def holds_a_run(path: Path) -> ConfigError:
    """Return the refusal of a folder that holds a run already."""
    return ConfigError(
        f"{path} already holds a run; choose another --out, or continue it with "
        f"`{resume_command(path)}`"
    )


def _make_folders(path: Path, made: list[Path]) -> None:
    """Make `path` and its parents, and add those that were not there to `made`."""
    made += [folder for folder in (path, *path.parents) if not folder.exists()][::-1]
    path.mkdir(parents=True, exist_ok=True)


def _claim(path: Path, recipe_text: str, made: list[Path]) -> None:
    """Write the recipe as the first file; of two runs that start at once, one is refused here."""
    try:
        file = (path / RECIPE).open("xb")
    except FileExistsError:
        raise holds_a_run(path) from None
    made.append(path / RECIPE)
    with file:
        file.write(recipe_text.encode())


def _undo(made: list[Path]) -> None:
    """Remove what was made, newest first; what somebody else put there meanwhile stays."""
    for path in reversed(made):
        with contextlib.suppress(OSError):
            if path.is_dir():
                path.rmdir()
            else:
                path.unlink(missing_ok=True)
