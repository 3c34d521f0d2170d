"""What a file and the words of a command line set: one flat table, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

from pydantic.fields import FieldInfo

from narrowcast.config.foreign_keys import pointer
from narrowcast.config.problems import Problems, shortened, shown
from narrowcast.config.tree import Tree, entry_type, fitted, meant, takes_text
from narrowcast.config.yaml_text import Document, KeyPath, YamlError, parse

COMMAND_LINE = "command line"
LENGTHS: tuple[KeyPath, ...] = (("steps",), ("epochs",))
"""Either says how long a run is."""
BY_NAME: tuple[KeyPath, ...] = (("strategy",),)
"""Sections that may be given their name alone: `strategy: hybrid`."""
SWITCHES: dict[KeyPath, tuple[str, object, object]] = {("profile",): ("steps", 5, 0)}
"""Sections that may be switched on and off: which setting that is, and its two values."""


@dataclass(frozen=True)
class Setting:
    """A value that was set, and where."""

    value: object
    origin: str
    where: str
    """How a message about it begins: `quick.yaml:3: steps` or `steps=3`."""


@final
@dataclass
class Overrides:
    """Every setting given so far, by path; later ones replace earlier ones."""

    tree: Tree
    shorthand: Mapping[str, KeyPath] = field(default_factory=dict)
    """Words of the command line that stand for a setting of the workload."""
    settings: dict[KeyPath, Setting] = field(default_factory=dict)
    problems: Problems = field(default_factory=Problems)

    def add_file(self, document: Document, *, origin: str, shown_as: str) -> None:
        for line, text in document.problems:
            self.problems.add(f"{shown_as}:{line}: {text}")
        with self._one_length():
            self._add((), document.value, _File(origin, shown_as, document.lines))

    def add_resolved(self, resolved: Mapping[str, Mapping[str, Any]], *, shown_as: str) -> None:
        """Add what an earlier run was resolved to, with the origins it had then."""
        for key, entry in resolved.items():
            source = _File(str(entry["origin"]), shown_as, {})
            self._add(tuple(key.split(".")), entry["value"], source)

    def add_arguments(self, terms: Iterable[str]) -> None:
        with self._one_length():
            for word in terms:
                self._add_word(word)

    @contextmanager
    def _one_length(self) -> Iterator[None]:
        """Check that a source sets steps or epochs but not both; the last source wins."""
        before = dict(self.settings)
        yield
        now = {path: self.settings[path] for path in LENGTHS if path in self.settings}
        fresh = {path for path in now if now[path] is not before.get(path)}
        said = [path for path in now if path in fresh and now[path].value is not None]
        if len(said) == len(LENGTHS):
            self.problems.add(
                f"{now[said[1]].where}: steps and epochs are both set. Leave one of them out"
            )
        elif said:
            for path in now.keys() - fresh:
                del self.settings[path]

    def _add_word(self, word: str) -> None:
        key, equals, text = word.partition("=")
        if equals and key.strip():
            name = key.strip()
            path = self.shorthand.get(name, tuple(name.split(".")))
            self._add(path, _Raw.of(text), _Word(word))
            return
        fix = word.replace(":", "=", 1) if ":" in word else f"{key.strip() or 'steps'}=VALUE"
        self.problems.add(f"{shortened(word)}: must be KEY=VALUE. Write {shortened(fix)}")

    def _add(self, path: KeyPath, value: object, source: _File | _Word) -> None:
        """Add `value` at `path`: to a setting, or to the settings of a section."""
        entry: Tree | FieldInfo = self.tree
        for done, name in enumerate(path):
            if isinstance(entry, FieldInfo):
                self._add_leaf(entry, path, done, value, source)
                return
            if name not in entry:
                self.problems.add(lambda at=done: self._unknown(path, at, value, source))  # type: ignore[misc]
                return
            entry = entry[name]
        if isinstance(entry, FieldInfo):
            self._add_leaf(entry, path, len(path), value, source)
        else:
            self._add_section(entry, path, value, source)

    def _add_section(self, tree: Tree, path: KeyPath, value: object, source: _File | _Word) -> None:
        if isinstance(value, _Raw) and value.text.lstrip().startswith("{"):
            if isinstance(value.parsed, YamlError):
                self.problems.add(f"{source.where(path)}: {value.parsed}")
                return
            for text in value.problems:
                self.problems.add(f"{source.where(path)}: {text}")
            value = value.parsed
        switch = value.parsed if isinstance(value, _Raw) else value
        if path in SWITCHES and isinstance(switch, bool):
            name, on, off = SWITCHES[path]
            self._add((*path, name), on if switch else off, source)
        elif path in BY_NAME and isinstance(value, str | _Raw):
            self._add((*path, "name"), value, source)
        elif isinstance(value, dict):
            for key, item in value.items():
                self._add((*path, key), item, source)
        elif value is not None:  # a file may leave a section empty
            # The first setting of a section is what people mean: precision=bf16 is its policy.
            first, dotted = next(iter(tree)), ".".join(path)
            fix = f"{path[-1]}: {{{first}: {shown(value)}}}"
            if isinstance(value, _Raw):
                fix = f"{dotted}.{first}={shortened(value.text)}"
            self.problems.add(
                f"{source.where(path)}: {dotted} is a section. Write {fix}, or another of its "
                f"settings: {', '.join(tree)}"
            )

    def _add_leaf(
        self, entry: FieldInfo, path: KeyPath, done: int, value: object, source: _File | _Word
    ) -> None:
        leaf, rest = path[:done], path[done:]
        where = source.where(path)
        annotation = entry_type(entry.annotation) if rest else entry.annotation
        if annotation is None:
            dotted = ".".join(leaf)
            self.problems.add(f"{where}: {dotted} has no settings in it. Write {dotted}=VALUE")
            return
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
        start = f"{source.where(path[: at + 1])}: no such setting."
        text = shortened(value.text) if isinstance(value, _Raw) else None
        if len(path) == 1 and (advice := pointer(path[0], self.tree, value=text)):
            return f"{start} {advice}"
        if isinstance(source, _File) and "." in path[at]:
            *sections, name = path[at].split(".")
            if meant(tuple(path[at].split(".")), 0, self.tree) == (*sections, name):
                return (
                    f"{start} Dotted keys are for the command line. In a file write {name} under "
                    f"{'.'.join(sections)}:"
                )
        guess = meant(path, at, self.tree)
        if guess is None:
            siblings: Any = self.tree
            for name in path[:at]:
                siblings = siblings[name]
            return f"{start} {'.'.join(path[:at]) or 'A recipe'} has {', '.join(siblings)}"
        name = guess[at] if guess[:at] == path[:at] and len(guess) == len(path) else ".".join(guess)
        fix = "" if text is None else f" Write {'.'.join(guess)}={text}"
        return f"{start} Did you mean {name}?{fix}"


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
        """Return the text unchanged if the setting takes text, else its YAML value."""
        plain = isinstance(self.parsed, str) and self.text.lstrip()[:1] not in ("'", '"')
        if plain or takes_text(self.parsed, annotation):
            return self.text.strip()
        return self.parsed
