"""Text to train on, from files or from Python itself, and to validate on, kept apart from it."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from narrowcast.errors import RecipeError
from narrowcast.workloads.lm.settings import TOPICS

STRETCHES = 10
"""Each part of a split has a piece of every tenth: a text changes its subject as it goes."""


class Split(NamedTuple):
    """One text in two parts that share nothing."""

    train: str
    validation: str


def read_text(sources: Sequence[str]) -> str:
    """Join the files that `sources` name, by path or glob; `TOPICS` stands for Python's help text.

    What is wrong with any of them is said at once.
    """
    texts: list[str] = []
    problems: list[str] = []
    for source in sources:
        if source == TOPICS:
            texts.append(_topics())
            continue
        paths = _matches(source)
        if not paths:
            problems.append(f"{source}: no such file")
        for path in paths:
            try:
                texts.append(_read(path))
            except RecipeError as error:
                problems.append(str(error))
    if not sources:
        problems.append("no source is given")
    if problems:
        raise RecipeError(
            "\n".join(f"data.text: {problem}" for problem in problems)
            + f"\nwrite data.text=FILE, a path or glob of UTF-8 text, or data.text={TOPICS}"
        )
    return "\n".join(texts)


def split_text(text: str, *, validation_share: float) -> Split:
    """Keep the last `validation_share` of each tenth of `text` for validation."""
    train: list[str] = []
    validation: list[str] = []
    for number in range(STRETCHES):
        start = number * len(text) // STRETCHES
        end = (number + 1) * len(text) // STRETCHES
        cut = end - round((end - start) * validation_share)
        train.append(text[start:cut])
        validation.append(text[cut:end])
    return Split("".join(train), "".join(validation))


def _matches(source: str) -> list[Path]:
    path = Path(source)
    # A path that exists is meant as it stands, whatever * or [ it contains.
    if path.exists():
        return [path]
    anchor = Path(path.anchor)
    return sorted(anchor.glob(str(path.relative_to(anchor))))


def _read(path: Path) -> str:
    if path.is_dir():
        raise RecipeError(f"{path} is a folder; write data.text={path}/*.txt for the files in it")
    try:
        data = path.read_bytes()
        # Some editors begin a file with a byte order mark; it is no part of the text.
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise RecipeError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RecipeError(
            f"{path} is not UTF-8 text: byte {data[error.start]:#04x} at {error.start}; convert it "
            f"(iconv -f latin1 -t utf-8), or unpack it if it is compressed"
        ) from error
    if "\0" in text:
        raise RecipeError(f"{path} is a binary file: a zero byte at {data.index(0)}")
    if not text.strip():
        raise RecipeError(f"{path} is empty" if not data else f"{path} holds nothing but blanks")
    return text


def _topics() -> str:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise RecipeError(
            f"data.text={TOPICS}: this Python came without its help text (pydoc_data); "
            f"write data.text=FILE with a UTF-8 text file"
        ) from error
    # Topics quote each other: "compound statements" repeats every statement's own page. A paragraph
    # counts once, or validation would find what training has read.
    paragraphs = (part for topic in topics.values() for part in topic.split("\n\n"))
    return "\n\n".join(dict.fromkeys(part.strip("\n") for part in paragraphs if part.strip()))
