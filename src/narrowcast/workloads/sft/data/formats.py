"""Conversations from rows: known column formats and lists of messages."""

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from narrowcast.config.problems import shortened
from narrowcast.errors import ConfigError
from narrowcast.workloads.sft.data.settings import Columns, FormatChoice
from narrowcast.workloads.sft.data.sources import Row

Role = Literal["system", "user", "assistant", "tool", "text"]
"""`text` is plain text without a role."""
ROLES: dict[str, Role] = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "model": "assistant", "bot": "assistant",
    "chatgpt": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool", "ipython": "tool",
}  # fmt: skip
"""Including the names of ShareGPT and others."""
CALLS = ("tool_calls", "function_call")
INSTRUCTION_LIKE = ("instruct", "prompt", "question", "query", "problem", "user", "human", "input")
RESPONSE_LIKE = ("respon", "answer", "output", "completion", "assistant", "reply", "solution")


class Turn(NamedTuple):
    """One message."""

    role: Role
    text: str
    context: str = ""
    """Context of a question, which some templates render separately."""
    learnt: bool = True
    """Whether this has a loss, if it is a response."""
    extra: Mapping[str, Any] | None = None
    """Other fields for chat templates, such as tool calls."""

    @property
    def calls(self) -> Sequence[Mapping[str, Any]]:
        """Names and arguments of the functions that a response calls."""
        return [each["function"] for each in (self.extra or {}).get("tool_calls", ())]

    @property
    def whole(self) -> str:
        return f"{self.text}\n\n{self.context}" if self.context else self.text


class Conversation(NamedTuple):
    """Turns in order, and their location in the data."""

    turns: tuple[Turn, ...]
    location: str
    tools: tuple[Any, ...] = ()
    """JSON schemas of the functions that responses may call."""

    @property
    def is_text(self) -> bool:
        return self.turns[0].role == "text"


def parse_turns(messages: Any, location: str) -> tuple[Turn, ...]:
    """Return the turns of a list of messages."""
    if not isinstance(messages, list) or not messages:
        raise ConfigError(
            f"{location}: messages must be a list with at least one message, such as "
            f'[{{"role": "user", "content": ...}}].'
        )
    turns = tuple(_turn(each, f"{location}, message {n}") for n, each in enumerate(messages, 1))
    late = [turn for turn in turns[1:] if turn.role == "system"]
    if late:
        raise ConfigError(
            f"{location}: a system message must be the first message. Move it to the front, or "
            "remove it."
        )
    return turns


def _turn(message: Any, position: str) -> Turn:
    if not isinstance(message, dict):
        raise ConfigError(f"{position} must be an object with a role and a content.")
    keys = ("role", "content") if "role" in message else ("from", "value")
    who, said = (message.get(key) for key in keys)
    if not isinstance(who, str) or who.lower() not in ROLES:
        raise ConfigError(
            f"{position} must have role system, user, assistant or tool, got "
            f"{shortened(repr(who))}."
        )
    role, extra = ROLES[who.lower()], dict[str, Any]()
    if any(message.get(key) for key in CALLS):
        if role != "assistant":
            raise ConfigError(f"{position} has a tool call, but only the assistant calls tools.")
        extra["tool_calls"] = _tool_calls(message, position)
    if role == "tool":
        extra |= {key: message[key] for key in ("name", "tool_call_id") if message.get(key)}
    return Turn(role, _message_text(said, position), extra=extra or None)


def _tool_calls(message: Mapping[str, Any], position: str) -> list[dict[str, Any]]:
    """Return the tool calls of a message in the form that chat templates expect."""
    calls = message.get("tool_calls") or [{"function": message["function_call"]}]
    result = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, dict) else call
        arguments = function.get("arguments") if isinstance(function, dict) else None
        if isinstance(arguments, str):  # as APIs return them; a template would quote them again
            try:
                arguments = json.loads(arguments)
            except ValueError:
                arguments = None
        if not isinstance(arguments, dict) or not isinstance(function.get("name"), str):
            raise ConfigError(
                f"{position}: a tool call must be a function with a name and arguments as a JSON "
                f"object, got {shortened(repr(call))}."
            )
        made = {"type": "function", "function": {**function, "arguments": arguments}}
        result.append(made | ({"id": call["id"]} if call.get("id") else {}))
    return result


def parse_tools(row: Row) -> tuple[Any, ...]:
    """Return the column `tools` of a row: a list of JSON schemas, or its text."""
    tools = row.values.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError:
            tools = 0
    if tools is None:
        return ()
    if not isinstance(tools, list) or not all(isinstance(each, dict) for each in tools):
        raise ConfigError(f"{row.location}: tools must be a list of JSON schemas of functions.")
    return tuple(tools)


def _message_text(said: Any, location: str) -> str:
    match said:
        case None:
            return ""
        case str():
            return said
        case list():
            return "".join(_part_text(part, location) for part in said)
        case _:
            raise ConfigError(f"{location}: the content must be text, got {type(said).__name__}.")


def _part_text(part: Any, location: str) -> str:
    match part:
        case {"type": "text", "text": str() as text}:
            return text
        case _:
            raise ConfigError(
                f"{location}: every part of the content must be text. Other types are not "
                "supported."
            )


class Format(NamedTuple):
    """Column names by role."""

    name: str
    instruction: str = ""
    response: str = ""
    context: str = ""
    system: str = ""
    messages: str = ""
    text: str = ""
    chosen: str = ""
    rejected: str = ""

    @property
    def keys(self) -> tuple[str, ...]:
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
"""The first match wins: three columns before two, so that a context is not lost; `text` last."""


class Conversations:
    """Rows of one source as conversations."""

    def __init__(self, rows: Iterable[Row], choice: FormatChoice, columns: Columns) -> None:
        self._rows, self._choice, self._columns = rows, choice, columns
        self.format: Format | None = None
        """Known after the first row."""
        self.count = 0
        """Rows so far."""

    def __iter__(self) -> Iterator[Conversation]:
        """Yield conversations; raise for a row with another format than the first."""
        for row in self._rows:
            self.count += 1
            if self.format is None:
                self.format = self._first(row)
            elif self._choice == "auto" and not self._columns.are_set:
                self._require_same(row, self.format)
            tools = parse_tools(row) if self.format.messages else ()
            yield Conversation(_turns(row, self.format), row.location, tools)

    def _first(self, row: Row) -> Format:
        if self._columns.are_set:
            inputs = self._columns.model_dump()
            form = Format("columns", **{what: name or "" for what, name in inputs.items()})
            for key in form.keys:
                _value(row, key)
            return form
        if self._choice == "infer":
            return inferred(row.values, row.location)
        if self._choice != "auto":
            named = [each for each in FORMATS if each.name == self._choice]
            if not named:
                raise ConfigError(
                    f"data.format={self._choice} is for preferences. Write dpo.loss_type=sigmoid, "
                    "or another format."
                )
            return named[0]
        result = detected(row.values)
        if result is None:
            _check_separator(row)
            if {"chosen", "rejected"} <= set(row.values):
                raise ConfigError(
                    f"{row.location} has a chosen and a rejected response. Write "
                    "dpo.loss_type=sigmoid to train on preferences."
                )
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
    """Return the first known format whose columns exist."""
    return next((each for each in FORMATS if all(key in keys for key in each.keys)), None)


def inferred(keys: Collection[str], location: str) -> Format:
    """Return the columns whose names resemble an instruction and a response."""
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
    """Return the columns that contain the first matching word."""
    for word in overrides:
        if matches := [key for key in keys if word in key.lower()]:
            return matches
    return []


def _turns(row: Row, form: Format) -> tuple[Turn, ...]:
    if form.messages:
        return parse_turns(_value(row, form.messages), row.location)
    if form.text:
        return (Turn("text", _text(row, form.text)),)
    # Optional in a requested format; a detected format has them.
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
            return ""  # NaN of pandas and pyarrow for a missing field
        case number:
            return str(number)


def _listed(keys: Collection[str]) -> str:
    return shortened(", ".join(map(str, keys)) or "none", 200)


def _said(matches: list[str]) -> str:
    names = _listed(matches)
    return f"{names} {'looks' if len(matches) < 2 else 'look'}"


def _check_separator(row: Row) -> None:
    """Raise if a .csv was read as one column because of its separator."""
    (first, *others) = row.values
    sign = next((sign for sign in (";", "\t", "|") if sign in first), None)
    if not others and sign is not None:
        raise ConfigError(
            f"{row.location} has one column, {first!r}, which seems to use {sign!r} as its "
            "separator. Save the .csv with commas."
        )
