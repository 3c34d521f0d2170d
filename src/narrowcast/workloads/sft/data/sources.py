"""What a recipe names as data: local files by path or glob, data sets of the Hub by name."""

import errno
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from narrowcast.config.files import matching
from narrowcast.config.problems import Problems, shown_path
from narrowcast.errors import ConfigError
from narrowcast.plain_files import expand_path, open_plain, stat_or_none
from narrowcast.workloads.sft.data.hub import VALIDATION, hub_splits
from narrowcast.workloads.sft.data.rows import Row, read_rows
from narrowcast.workloads.sft.data.settings import SUMS, SftData, may_be_on_the_hub
from narrowcast.workloads.sft.data.sums import sums


class Source(NamedTuple):
    """Rows of one origin; they have one format."""

    name: str
    rows: Callable[[], Iterator[Row]]
    """Reads them, from the first, each time it is called."""
    file: Path | None = None
    """Where they are, if they are in one."""
    kind: Literal["file", "hub", "made"] = "file"


class Sources(NamedTuple):
    """What is trained on, what is validated on, and what was decided about them."""

    train: tuple[Source, ...]
    validation: tuple[Source, ...]
    notes: tuple[str, ...]


def find_sources(data: SftData) -> Sources:
    """Find everything that is named; what cannot be found is said at once."""
    named = data.validation_sources
    existing = data.use_existing_splits and not named
    train, validation, notes = _resolve(data, data.sources, key="path", existing=existing)
    if named:
        validation, _, more = _resolve(data, named, key="validation_path", existing=False)
        notes += more
    from_hub = any(source.kind == "hub" for source in (*train, *validation))
    if data.dataset_config_name is not None and not from_hub:
        raise ConfigError(
            f"data.dataset_config_name={data.dataset_config_name} is only for datasets of the Hub; "
            "files have no configurations. Leave it out."
        )
    return Sources(tuple(train), tuple(validation), tuple(notes))


_Resolved = tuple[list[Source], list[Source], list[str]]


def _resolve(data: SftData, names: Sequence[str], *, key: str, existing: bool) -> _Resolved:
    problems, files, hub = Problems(), list[Path](), list[str]()
    for name in names:
        if name == SUMS:
            continue
        paths = _matches(name, problems)
        files += paths or ()
        if paths is None:
            hub.append(name)
    if problems:
        raise ConfigError(
            "\n".join(f"data.{key}: {line}" for line in problems.lines())
            + f"\nWrite data.{key}=FILE, a path or glob of .json, .jsonl, .csv or .parquet, or the "
            "name of a dataset on the Hugging Face Hub."
        )
    train, validation, notes = _by_name(list(dict.fromkeys(files)), existing=existing)
    twice = [path for path, count in Counter(files).items() if count > 1]
    notes += [f"{path} is listed more than once and read once" for path in twice]
    train += [Source(SUMS, sums, kind="made")] * (SUMS in names)
    for name in hub:
        chosen = hub_splits(name, data.dataset_config_name, key=key)
        train.append(Source(f"{name} ({chosen.train_name})", chosen.train, kind="hub"))
        if chosen.note:
            notes.append(chosen.note)
        if existing and chosen.validation is not None:
            label = f"{name} ({chosen.validation_name})"
            validation.append(Source(label, chosen.validation, kind="hub"))
    return train, validation, notes


def _by_name(files: list[Path], *, existing: bool) -> _Resolved:
    """Tell files to validate on from the others, as their names say, where there are others."""
    terms = {path: set(re.split(r"[^a-z]+", path.name.lower())) for path in files}
    held = [path for path in files if terms[path] & set(VALIDATION)]
    test = [path for path in files if "test" in terms[path] and path not in held]
    if not existing or len(held) + len(test) == len(files):
        held, test = [], []
    notes = [f"{path} is used for validation because of its name" for path in held]
    notes += [f"{path} is not used: its name marks it as test data" for path in test]
    train = [_make_source(path) for path in files if path not in held and path not in test]
    return train, [_make_source(path) for path in held], notes


def _make_source(path: Path) -> Source:
    return Source(str(path), lambda: read_rows(path), path)


def _matches(name: str, problems: Problems) -> list[Path] | None:
    """Return the files of a path or glob, or None for the name of a data set of the Hub."""
    path, shown = expand_path(name), shown_path(name)
    try:
        # A path that exists is meant as it stands, whatever * or [ it contains.
        if stat_or_none(path) is not None:
            return _plain(path, shown, problems)
        matches = matching(path)
    except OSError as error:
        problems.add(f"{shown} cannot be read: {error.strerror}")
        return []
    except ValueError as error:  # of ** beside other characters
        problems.add(f"{shown}: {error}")
        return []
    if matches:
        return matches
    if may_be_on_the_hub(name):
        return None
    problems.add(f"{shown}: no such file")
    return []


def _plain(path: Path, shown: str, problems: Problems) -> list[Path]:
    """Return a file that can be read at all; that it is a folder or no file is said here."""
    try:
        open_plain(path, follow=True).close()
    except OSError as error:
        inside = f"; write {shown}/*.jsonl for the files in it" if path.is_dir() else ""
        reason = error.strerror or errno.errorcode.get(error.errno or 0, "unknown")
        problems.add(f"{shown} cannot be read: {reason}{inside}")
        return []
    return [path]
