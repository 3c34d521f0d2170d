"""YAML 1.2 to plain values, with the line of every key.

Scalars follow the core schema of YAML 1.2.2 (§10.3.2). ruamel.yaml reads the structure only: its
own table of scalars takes `.1e3` for text.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from narrowcast.errors import ConfigError

DEEPEST = 100
"""Brackets that may be open at once: what ruamel takes for them grows with their square."""

KeyPath = tuple[str, ...]


@dataclass(frozen=True)
class Document:
    """The value of a YAML text, the lines of its keys, and its problems."""

    value: object
    lines: dict[KeyPath, int]
    """The line, counted from 1, of every key of every mapping."""
    problems: list[tuple[int, str]]
    """Line and text of values that were parsed but cannot be used."""


@final
class YamlError(ConfigError):
    """Invalid YAML, and the line of the error."""

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = line


def parse(text: str) -> Document:
    """Return one YAML document, or raise YamlError with what to write instead."""
    # Imported here: 40 ms that help and doctor do not need.
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, ReusedAnchorWarning, YAMLError
    from ruamel.yaml.scanner import Scanner

    class Shallow(Scanner):
        def fetch_flow_collection_start(self, *args: Any, **named: Any) -> None:
            if len(self.flow_context) >= DEEPEST:
                raise RecursionError
            super().fetch_flow_collection_start(*args, **named)

    reader = _Reader()
    yaml = YAML(typ="safe", pure=True)
    yaml.Scanner = Shallow
    try:
        with warnings.catch_warnings():
            # Naming an anchor twice is legal; the later one counts.
            warnings.simplefilter("ignore", ReusedAnchorWarning)
            root = yaml.compose(text)
        value = None if root is None else reader.read_value(root, ())
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise YamlError(_advice(error.problem or ""), mark.line + 1 if mark else 1) from None
    except YAMLError as error:
        raise YamlError(f"not YAML: {str(error).splitlines()[0]}", 1) from None
    except RecursionError:
        raise YamlError("nested too deeply for a recipe", 1) from None
    return Document(value, reader.lines, reader.problems)


def parse_scalar(text: str) -> object:
    """Return the value of the plain scalar `text` in the core schema of YAML 1.2."""
    for pattern, build in _CORE_SCHEMA:
        if pattern.fullmatch(text):
            return build(text)
    return text


def _integer(text: str, base: int = 10) -> int | float:
    # Python refuses to read or to write an int of more than 4300 decimal digits; no setting takes
    # a tenth of that, so it is refused as infinite.
    if len(text) < 400:
        return int(text, base)
    return -math.inf if text.startswith("-") else math.inf


def _infinity(text: str) -> float:
    return float(text.replace(".", ""))


_CORE_SCHEMA: list[tuple[re.Pattern[str], Callable[[str], object]]] = [
    (re.compile(r"null|Null|NULL|~|"), lambda text: None),
    (re.compile(r"true|True|TRUE"), lambda text: True),
    (re.compile(r"false|False|FALSE"), lambda text: False),
    (re.compile(r"[-+]?[0-9]+"), _integer),
    (re.compile(r"0o[0-7]+"), lambda text: _integer(text[2:], 8)),
    (re.compile(r"0x[0-9a-fA-F]+"), lambda text: _integer(text[2:], 16)),
    (re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"), float),
    (re.compile(r"[-+]?\.(inf|Inf|INF)"), _infinity),
    (re.compile(r"\.(nan|NaN|NAN)"), lambda text: float("nan")),
]

_TAG = "tag:yaml.org,2002:"
_NAMES = "map", "seq", "str", "int", "float", "bool", "null", "timestamp", "merge", "value"
_MEANINGFUL = {_TAG + name for name in _NAMES}


@final
class _Reader:
    """Builds plain values from ruamel's nodes, noting lines and problems on the way."""

    def __init__(self) -> None:
        self.lines: dict[KeyPath, int] = {}
        self.problems: list[tuple[int, str]] = []

    def read_value(self, node: Any, path: KeyPath) -> object:
        """Return the value of `node`; an alias to itself ends in a RecursionError."""
        tag = str(node.tag)
        if tag not in _MEANINGFUL:
            text = f"the tag {tag.replace(_TAG, '!!')} is not supported. Leave it out"
            self.problems.append((node.start_mark.line + 1, text))
        match node.id:
            case "mapping":
                return self._mapping(node, path)
            case "sequence":
                return [self.read_value(item, path) for item in node.value]
            case _:
                return self._scalar(node, tag)

    def _mapping(self, node: Any, path: KeyPath) -> dict[str, object]:
        results: dict[str, object] = {}
        here: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if key_node.id != "scalar":
                self.problems.append((line, "a key must be one word, not a list or a mapping"))
                continue
            key = str(key_node.value)
            if key in here:
                dotted = ".".join((*path, key))
                text = f"{dotted} is set twice, also in line {here[key]}. Keep one of them"
                self.problems.append((line, text))
            here[key] = self.lines[(*path, key)] = line
            results[key] = self.read_value(value_node, (*path, key))
        return results

    def _scalar(self, node: Any, tag: str) -> object:
        text = str(node.value)
        if node.style is not None:
            return text
        value = parse_scalar(text)
        # Text that looks like a number: ruamel missed it, unless it was tagged !!str by hand.
        explicit_text = tag == _TAG + "str" and not isinstance(value, float)
        return text if explicit_text else value


def _advice(problem: str) -> str:
    """Return what to write instead, for the slips people make."""
    if "'\\t'" in problem or "tab" in problem:
        return "a tab is used for indentation. Indent with spaces"
    if "alias" in problem:
        return 'a word that begins with * must be in quotes. Write e.g. "*.norm"'
    if "mapping values are not allowed" in problem:
        return "a line has two colons. Put the value in quotes, or begin a new line"
    if "another document" in problem:
        return "a file must hold one recipe, got a second document (---)"
    if "cannot start any token" in problem:
        return f"{problem}. Put the value in quotes"
    return f"not YAML: {problem}"
