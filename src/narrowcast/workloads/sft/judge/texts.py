"""The beginnings of text files that a recipe names."""

import io
from pathlib import Path
from typing import NamedTuple

from narrowcast.config.files import matching
from narrowcast.config.problems import Problems, shown_path
from narrowcast.errors import ConfigError
from narrowcast.plain_files import expand_path, open_plain, stat_or_none


class Text(NamedTuple):
    """A document, and where it was found."""

    path: Path
    text: str


def read_texts(names: tuple[str, ...], *, most_bytes: int) -> list[Text]:
    """Return at least the first `most_bytes` bytes of each file that paths or globs name.

    What is wrong with any of them is said at once.
    """
    problems, matches = Problems(), list[Text]()
    for path in dict.fromkeys(path for name in names for path in _matches(name, problems)):
        try:
            matches.append(Text(path, _beginning(path, most_bytes)))
        except ConfigError as error:
            problems.add(str(error))
    if problems:
        lines = [f"eval_tasks.perplexity: {line}" for line in problems.lines()]
        advice = "Write eval_tasks.perplexity=FILE, a path or glob of UTF-8 text."
        raise ConfigError("\n".join([*lines, advice]))
    return matches


def _matches(name: str, problems: Problems) -> list[Path]:
    path, shown = expand_path(name), shown_path(name)
    try:
        # A path that exists is meant as it stands, whatever * or [ it contains.
        result = [path] if stat_or_none(path) is not None else matching(path)
    except OSError as error:
        problems.add(f"{shown} cannot be read: {error.strerror}")
        return []
    except ValueError as error:  # of ** beside other characters
        problems.add(f"{shown}: {error}")
        return []
    if not result:
        problems.add(f"{shown}: no such file")
    return result


def _beginning(path: Path, most_bytes: int) -> str:
    shown = shown_path(path)
    try:
        with io.BufferedReader(open_plain(path, follow=True)) as file:
            data = file.read(most_bytes)
            # A character that was cut is read to its end.
            while data and (more := file.peek(1)[:1]) and more[0] & 0xC0 == 0x80:
                data += file.read(1)
    except OSError as error:
        raise ConfigError(f"{shown} cannot be read: {error.strerror}.") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{shown} is not UTF-8 text: byte {data[error.start]:#04x} at {error.start}. Convert "
            "it (iconv -f latin1 -t utf-8), or decompress it."
        ) from error
    if "\0" in text:
        raise ConfigError(f"{shown} is a binary file: zero byte at {data.index(0)}.")
    if not text.strip():
        raise ConfigError(f"{shown} has only whitespace." if data else f"{shown} is empty.")
    return text
