"""Which columns of a row are what: known names first, and conversations of them."""

import math
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from narrowcast.config.problems import shortened
from narrowcast.errors import ConfigError
from narrowcast.workloads.sft.data.conversation import Conversation, Turn
from narrowcast.workloads.sft.data.messages import parse_turns
from narrowcast.workloads.sft.data.rows import Row
from narrowcast.workloads.sft.data.settings import Columns, FormatChoice


class Format(NamedTuple):
    """Which column is what; those that a row has beside them are left alone."""

    name: str
    instruction: str = ""
    response: str = ""
    context: str = ""
    system: str = ""
    messages: str = ""
    text: str = ""

    @property
    def keys(self) -> tuple[str, ...]:
        """The columns it is known by."""
        return tuple(key for key in self[1:] if key)


FORMATS = (
    Format("instruction+input+output", "instruction", "output", context="input"),
    Format("instruction+context+response", "instruction", "response", context="context"),
    Format("assistant+system+user", "user", "assistant", system="system"),
    Format("context+question+answer", "question", "answer", context="context"),
    Format("input+output", "input", "output"),
    Format("message_1+message_2", "message_1", "message_2"),
    Format("prompt+completion", "prompt", "completion"),
    Format("prompt+response", "prompt", "response"),
    Format("question+answer", "question", "answer"),
    Format("question+response", "question", "response"),
    Format("context+response", "context", "response"),
    Format("Context+Response", "Context", "Response"),
    Format("instruction+response", "instruction", "response"),
    Format("instruction+output", "instruction", "output"),
    Format("messages", messages="messages"),
    Format("conversations", messages="conversations"),
    Format("text", text="text"),
)
"""The first whose columns a row has is its format. Those of three columns come first, so that a
context is not left out by one of two; those with `text` last, which often repeats the rest."""

INSTRUCTION_LIKE = ("instruct", "prompt", "question", "query", "problem", "user", "human", "input")
RESPONSE_LIKE = ("respon", "answer", "output", "completion", "assistant", "reply", "solution")


class Conversations:
    """The rows of one source as conversations, and the format that was found."""

    def __init__(self, rows: Iterable[Row], choice: FormatChoice, columns: Columns) -> None:
        self._rows, self._choice, self._columns = rows, choice, columns
        self.format: Format | None = None
        """Known after the first row."""
        self.count = 0
        """Rows so far."""

    def __iter__(self) -> Iterator[Conversation]:
        """Yield them; a row of another format than the first is refused."""
        for row in self._rows:
            self.count += 1
            if self.format is None:
                self.format = self._first(row)
            elif self._choice == "auto" and not self._columns.are_set:
                self._require_same(row, self.format)
            yield Conversation(_turns(row, self.format), row.location)

    def _first(self, row: Row) -> Format:
        if self._columns.are_set:
            inputs = self._columns.model_dump()
            named = Format("columns", **{what: name or "" for what, name in inputs.items()})
            for key in named.keys:
                _value(row, key)
            return named
        if self._choice == "infer":
            return inferred(row.values, row.location)
        if self._choice != "auto":
            return next(each for each in FORMATS if each.name == self._choice)
        result = detected(row.values)
        if result is None:
            _check_separator(row)
            raise ConfigError(
                f"{row.location} has no known format, got the columns {_listed(row.values)}. Write "
                "data.columns.instruction=COLUMN data.columns.response=COLUMN, or "
                "data.format=infer to infer them from their names."
            )
        return result

    def _require_same(self, row: Row, first: Format) -> None:
        matched = detected(row.values)
        if matched != first:
            other = f"as {matched.name}" if matched else f"as no format, with {_listed(row.values)}"
            raise ConfigError(
                f"{row.location} reads {other}, but the rows before it read as {first.name}. Put "
                f"each format into its own file, or write data.format={first.name}."
            )


def detected(keys: Collection[str]) -> Format | None:
    """Return the first format whose columns are all there."""
    return next((each for each in FORMATS if all(key in keys for key in each.keys)), None)


def inferred(keys: Collection[str], location: str) -> Format:
    """Return the columns whose names look like an instruction and like a response."""
    response = _likest(keys, RESPONSE_LIKE)
    instruction = _likest([key for key in keys if key not in response], INSTRUCTION_LIKE)
    if len(response) != 1 or len(instruction) != 1:
        raise ConfigError(
            f"{location}: {_said(instruction)} like an instruction and {_said(response)} like a "
            f"response, among the columns {_listed(keys)}. Write data.columns.instruction=COLUMN "
            "data.columns.response=COLUMN."
        )
    return Format(f"inferred {instruction[0]}+{response[0]}", instruction[0], response[0])


def _likest(keys: Collection[str], overrides: tuple[str, ...]) -> list[str]:
    """Return the columns that hold the first of `words` that any of them holds."""
    for word in overrides:
        if matches := [key for key in keys if word in key.lower()]:
            return matches
    return []


def _turns(row: Row, form: Format) -> tuple[Turn, ...]:
    if form.messages:
        return parse_turns(_value(row, form.messages), row.location)
    if form.text:
        return (Turn("text", _text(row, form.text)),)
    # Of a format that was asked for, these may be left out; where it was found, they are there.
    context = _text(row, form.context) if form.context in row.values else ""
    system = _text(row, form.system) if form.system in row.values else ""
    return (
        *([Turn("system", system)] if system.strip() else []),
        Turn("user", _text(row, form.instruction), context if context.strip() else ""),
        Turn("assistant", _text(row, form.response)),
    )


def _value(row: Row, key: str) -> object:
    if key not in row.values:
        raise ConfigError(f"{row.location} has no column {key}, got {_listed(row.values)}.")
    return row.values[key]


def _text(row: Row, key: str) -> str:
    match _value(row, key):
        case None:
            return ""
        case str() as text:
            return text
        case bool() | list() | dict() | bytes() as other:
            raise ConfigError(f"{row.location}: {key} must be text, got {type(other).__name__}.")
        case float() as number if not math.isfinite(number):
            return ""  # what pandas and pyarrow make of a field that is not there
        case number:
            return str(number)


def _listed(keys: Collection[str]) -> str:
    return shortened(", ".join(map(str, keys)) or "none", 200)


def _said(matches: list[str]) -> str:
    names = _listed(matches)
    return f"{names} {'looks' if len(matches) < 2 else 'look'}"


def _check_separator(row: Row) -> None:
    """Refuse a table that was read as one column, because other signs than commas part its own."""
    (first, *others) = row.values
    sign = next((sign for sign in (";", "\t", "|") if sign in first), None)
    if not others and sign is not None:
        raise ConfigError(
            f"{row.location} has one column, {first!r}, which seems to use {sign!r} as its "
            "separator. Save the .csv with commas."
        )
