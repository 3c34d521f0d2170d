"""What `narrowcast genomics` is asked for, checked before anything takes long; without torch."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import final

from narrowcast.config.problems import shown_path
from narrowcast.errors import ConfigError
from narrowcast.plain_files import expand_path
from narrowcast.runs.writing import written_atomically

_SETTING = re.compile(r"[a-z_]+(\.[a-z_]+)*=")


@final
@dataclass(frozen=True)
class Output:
    """Where a command writes: a file, or the screen where there is no path."""

    path: Path | None

    @contextmanager
    def opened(self) -> Iterator[Callable[[str], object] | None]:
        """Give what writes to a file, which is put in its place when all of it is there."""
        if self.path is None:
            yield None
            return
        with (
            written_atomically(self.path, hint="or name another file with -o") as extra,
            extra.open("w", encoding="utf-8", newline="") as file,
        ):
            yield file.write


def output_named(name: str, *, reads: Sequence[str | None]) -> Output:
    """Return where to write; refuse at once what could not be written in the end."""
    if name == "-":
        return Output(None)
    path = expand_path(name)
    if not name.strip() or path.is_dir() or not path.parent.is_dir():
        why = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise ConfigError(f"{name} cannot be written: {why}. Write a file in an existing folder.")
    for read in (expand_path(each) for each in reads if each is not None):
        if path.exists() and read.exists() and path.samefile(read):
            raise ConfigError(
                f"The output {shown_path(path)} is also an input. Write another file with -o."
            )
    return Output(path)


def parse_overrides(overrides: Sequence[str]) -> list[str]:
    """Return the words of a recipe that files and KEY=VALUE words stand for."""
    settings = [
        word for word in overrides if _SETTING.match(word) and not expand_path(word).is_file()
    ]
    files = [word for word in overrides if word not in settings]
    if not files:
        raise ConfigError(
            "pretrain needs sequences. Give one or more FASTA, FASTQ or GenBank files."
        )
    if clash := [word for word in settings if word.startswith(("data.path=", "data.more="))]:
        raise ConfigError(f"{clash[0]} is set by the files on the command line. Leave it out.")
    first, *more = (json.dumps(name, ensure_ascii=False) for name in files)
    also = [f"data.more=[{', '.join(more)}]"] if more else []
    return [f"data.path={first}", *also, *settings]
