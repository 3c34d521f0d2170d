"""What a file and the words of a command line set: one flat table, and what is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, final

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from narrowcast.config.foreign_keys import pointer
from narrowcast.config.limits import LONGEST_WORD
from narrowcast.config.problems import Problems, shortened
from narrowcast.config.tree import Tree, entry_type, fitted, is_mapping, takes_text
from narrowcast.config.wording import meant, needed, shown, written
from narrowcast.config.yaml_text import Document, KeyPath, YamlError, is_unicode, parse
from narrowcast.errors import ConfigError

COMMAND_LINE = "command line"
LENGTHS: tuple[KeyPath, ...] = (("steps",), ("epochs",))
"""Either says how long a run is."""
BY_NAME: tuple[KeyPath, ...] = (("strategy",),)
"""Sections that may be given their name alone: `strategy: hybrid`."""


@dataclass(frozen=True)
class Setting:
    """A value that somebody gave, and where."""

    value: object
    origin: str
    where: str
    """How a message about it begins: `quick.yaml:3: steps` or `steps=3`."""


@final
@dataclass
class Overrides:
    """Every setting given so far, by path; later ones replace earlier ones."""

    tree: Tree
    settings: dict[KeyPath, Setting] = field(default_factory=dict)
    problems: Problems = field(default_factory=Problems)

    def add_file(self, document: Document, *, origin: str, shown_as: str) -> None:
        """Add what a recipe file sets."""
        for line, text in document.problems:
            self.problems.add(f"{shown_as}:{line}: {text}")
        match document.value:
            case dict():
                source = _File(origin, shown_as, document.lines)
                with self._one_length():
                    self._add(self.tree, (), 0, document.value, source)
            case None:
                raise ConfigError(f"{shown_as} is empty; begin it with e.g. workload: lm")
            case other:
                raise ConfigError(
                    f"{shown_as}: {shown(other)} is not a recipe; write one `key: value` a line"
                )

    def add_resolved(self, resolved: Mapping[str, Mapping[str, Any]], *, shown_as: str) -> None:
        """Add what an earlier run was resolved to, with the origins it had then."""
        for key, entry in resolved.items():
            source = _File(str(entry["origin"]), shown_as, {})
            self._add(self.tree, tuple(key.split(".")), 0, entry["value"], source)

    def add_arguments(self, terms: Iterable[str]) -> None:
        """Add the KEY=VALUE words of a command line."""
        with self._one_length():
            for word in terms:
                self._add_word(word)

    @contextmanager
    def _one_length(self) -> Iterator[None]:
        """Let the last source that says how long a run is be right; it may say so in one way."""
        before = dict(self.settings)
        yield
        now = {path: self.settings[path] for path in LENGTHS if path in self.settings}
        fresh = {path for path in now if now[path] is not before.get(path)}
        said = [path for path in now if path in fresh and now[path].value is not None]
        if len(said) == len(LENGTHS):
            self.problems.add(
                f"{now[said[1]].where}: steps is set too, and one of the two says how long the run "
                "is; leave one of them out"
            )
        elif said:
            for path in now.keys() - fresh:
                del self.settings[path]

    def _add_word(self, word: str) -> None:
        key, equals, text = word.partition("=")
        path = tuple(key.strip().split("."))
        begin = shortened(word)
        if len(word) > LONGEST_WORD:
            self.problems.add(
                f"{begin}: {len(word)} characters are too long for a word; write at most "
                f"{LONGEST_WORD}, or put the setting into a file"
            )
        elif not is_unicode(word):
            self.problems.add(f"{begin!a}: not valid UTF-8")
        elif not equals:
            self.problems.add(f"{begin}: not KEY=VALUE; {self._example(begin)}")
        elif not key.strip():
            self.problems.add(f"{begin}: no key before the =; write KEY=VALUE, e.g. steps=100")
        else:
            self._add(self.tree, path, 0, _Raw.of(text), _Word(word))

    def _add(
        self,
        entry: Tree | FieldInfo | None,
        path: KeyPath,
        done: int,
        value: object,
        source: _File | _Word,
    ) -> None:
        """Add `value` at `path`; `entry` is what the tree has at its first `done` names."""
        match entry:
            case None:
                return
            case FieldInfo():
                self._add_leaf(entry, path, done, value, source)
            case _ if done < len(path):
                if path[done] in entry:
                    self._add(entry[path[done]], path, done + 1, value, source)
                elif done or not self._may_be_a_section(path, value):
                    self.problems.add(lambda: self._unknown(path, done, value, source))
            case _:
                self._add_section(entry, path, value, source)

    def _may_be_a_section(self, path: KeyPath, value: object) -> bool:
        """Say whether a name could be a section of a workload of which nothing is known."""
        return None in self.tree.values() and (len(path) > 1 or isinstance(value, dict))

    def _add_section(self, tree: Tree, path: KeyPath, value: object, source: _File | _Word) -> None:
        if isinstance(value, _Raw) and value.text.lstrip().startswith("{"):
            if isinstance(value.parsed, YamlError):
                self.problems.add(f"{source.where(path)}: {value.parsed}")
                return
            for text in value.problems:
                self.problems.add(f"{source.where(path)}: {text}")
            value = value.parsed
        if path in BY_NAME and isinstance(value, str | _Raw):
            self._add(tree, (*path, "name"), len(path), value, source)
        elif isinstance(value, dict):
            for key, item in value.items():
                self._add(tree, (*path, key), len(path), item, source)
        elif value is not None:  # a file may leave a section empty
            self.problems.add(_section(tree, path, value, source))

    def _add_leaf(
        self, entry: FieldInfo, path: KeyPath, done: int, value: object, source: _File | _Word
    ) -> None:
        leaf, rest = path[:done], path[done:]
        where = source.where(path)
        if rest and not is_mapping(entry.annotation):
            dotted = ".".join(leaf)
            self.problems.add(f"{where}: {dotted} has no settings in it; {_takes(leaf, entry)}")
            return
        annotation = entry_type(entry.annotation) if rest else entry.annotation
        if isinstance(value, _Raw):
            if isinstance(value.parsed, YamlError) and not takes_text(value.parsed, annotation):
                self.problems.add(f"{where}: {value.parsed}")
                return
            for text in value.problems:
                self.problems.add(f"{where}: {text}")
            value = value.fitting(annotation)
        value, origin = fitted(value, annotation), source.origin
        if rest:
            # The names of modules have dots, so what follows the setting is one name.
            before = self.settings.get(leaf)
            entries = before.value if before and isinstance(before.value, dict) else {}
            value = {**entries, ".".join(rest): value}
            if before and before.origin != origin:
                origin = f"{before.origin}, {origin}"
        self.settings[leaf] = Setting(value, origin, where)

    def _unknown(self, path: KeyPath, at: int, value: object, source: _File | _Word) -> str:
        where = source.where(path[: at + 1])
        text = shortened(value.text) if isinstance(value, _Raw) else None
        if len(path) == 1 and (advice := pointer(path[0], self.tree, value=text)):
            return f"{where}: no such setting; {advice}"
        if isinstance(source, _File) and "." in path[at]:
            *sections, name = path[at].split(".")
            if meant(tuple(path[at].split(".")), 0, self.tree) == (*sections, name):
                return (
                    f"{where}: no such setting; dotted keys are for the command line, "
                    f"in a file write {name} under {'.'.join(sections)}:"
                )
        guess = meant(path, at, self.tree)
        if guess is None:
            siblings: Any = self.tree
            for name in path[:at]:
                siblings = siblings[name]
            if None in siblings.values():
                return f"{where}: no such setting without a workload; write e.g. workload: lm"
            here = ".".join(path[:at]) or "a recipe"
            return f"{where}: no such setting; {here} has {', '.join(siblings)}"
        name = guess[at] if guess[:at] == path[:at] and len(guess) == len(path) else ".".join(guess)
        question = f"{where}: no such setting; did you mean {name}?"
        if not isinstance(value, _Raw):
            return question
        return f"{question} Write {'.'.join(guess)}={shortened(value.text)}"

    def _example(self, word: str) -> str:
        entry: Tree | FieldInfo | None = self.tree
        for name in word.split("."):
            entry = entry.get(name) if isinstance(entry, Mapping) else None
        if isinstance(entry, FieldInfo):
            return _takes(tuple(word.split(".")), entry)
        return f"write {word.replace(':', '=', 1)}" if ":" in word else "write e.g. steps=100"


@dataclass(frozen=True)
class _File:
    """A file that settings come from."""

    origin: str
    shown_as: str
    lines: Mapping[KeyPath, int]

    def where(self, path: KeyPath) -> str:
        line = self.lines.get(path)
        return f"{self.shown_as}{f':{line}' if line else ''}: {shortened('.'.join(path))}"


@dataclass(frozen=True)
class _Word:
    """A word of the command line that a setting comes from."""

    word: str
    origin: str = COMMAND_LINE

    def where(self, path: KeyPath) -> str:
        return shortened(self.word)


@dataclass(frozen=True)
class _Raw:
    """The value of a word, whose type depends on the setting it is for."""

    text: str
    parsed: object
    """The value as YAML, or the YamlError why it is not."""
    problems: tuple[str, ...] = ()

    @classmethod
    def of(cls, text: str) -> _Raw:
        try:
            document = parse(text)
        except YamlError as error:
            return cls(text, error)
        return cls(text, document.value, tuple(problem for _, problem in document.problems))

    def fitting(self, annotation: object) -> object:
        """Return the text itself for a setting that takes text, and the YAML value for others.

        As it stands, because YAML would drop what follows ` #` and read `a: b` as a mapping;
        quotes still quote.
        """
        plain = isinstance(self.parsed, str) and self.text.lstrip()[:1] not in ("'", '"')
        if plain or takes_text(self.parsed, annotation):
            return self.text.strip()
        return self.parsed


def _section(tree: Tree, path: KeyPath, value: object, source: _File | _Word) -> str:
    """Say that a section was given a value, and which of its settings would take it."""
    inner = value.parsed if isinstance(value, _Raw) else value
    text = value.text if isinstance(value, _Raw) else None
    names = [name for name, entry in tree.items() if isinstance(entry, FieldInfo)]
    fits = [name for name in names if inner is not None and _accepts(tree[name], value)]
    where, dotted = source.where(path), ".".join(path)
    if not fits:
        return f"{where}: {dotted} is a section; it has {', '.join(tree)}"
    if text is not None:
        return f"{where}: {dotted} is a section; write {dotted}.{fits[0]}={shortened(text)}"
    write = f"{path[-1]}: {{{fits[0]}: {written(inner)}}}"
    return f"{where}: {dotted} is a section; write {write}"


def _accepts(entry: Any, value: object) -> bool:
    if isinstance(value, _Raw):
        value = value.fitting(entry.annotation)
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(Annotated[entry.annotation, entry])
        adapter.validate_json(json.dumps(fitted(value, entry.annotation), default=str), strict=True)
    except ValidationError:
        return False
    return True


def _takes(path: KeyPath, entry: FieldInfo) -> str:
    example = "" if entry.is_required() else written(entry.get_default(call_default_factory=True))
    return f"write {'.'.join(path)}={example or 'VALUE'}, {needed(entry)}"
