"""A workload as a value of names. Imports the standard library only, so that help is fast."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from narrowcast.errors import ConfigError, UnsupportedError

VERBS = (
    "doctor", "recipes", "plan", "tune", "train", "resume", "watch", "report", "compare", "bench",
    "verify-resume", "schema",
)  # fmt: skip
"""The command line's own words; no workload may be called one of them."""

_NAME = re.compile(r"[a-z][a-z0-9_-]*")


@final
@dataclass(frozen=True)
class Command:
    """A command that a workload brings to the command line."""

    name: str
    location: str
    """A click command or group, as `module:attribute`."""
    about: str = ""
    """Its line of the help; none: what the workload says of itself."""


@final
@dataclass(frozen=True, kw_only=True)
class Workload:
    """Something that can be trained; its parts are named as `module:attribute`."""

    name: str
    """What recipes call it."""
    about: str
    """One-line description, shown by `narrowcast --help`."""
    sections: str
    """A `Sections` value in a module that does not import torch."""
    task: str
    """A function `(recipe, *, device) -> Task`."""
    recipes: Path | None = None
    """The folder of its recipes."""
    commands: tuple[Command, ...] = ()
    report: str = ""
    """A pure function `(folder, records) -> Sequence[ReportSection]`."""
    requires: tuple[str, ...] = ()
    """Modules that must be there before any of it but its settings is used."""
    extra: str = ""
    """The extra of its distribution that installs them."""
    distribution: str = "narrowcast"
    """What pip calls the package it comes with."""

    def __post_init__(self) -> None:
        _require_free("a workload", self.name)
        for command in self.commands:
            _require_free(f"a command of workload {self.name}", command.name)
        names = [command.name for command in self.commands]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError(f"workload {self.name} has two commands called {twice[0]}. Keep one")
        places = {field: getattr(self, field) for field in ("sections", "task", "report")}
        places |= {f"command {command.name}": command.location for command in self.commands}
        for part, position in places.items():
            if (position or part != "report") and position.count(":") != 1:
                raise ConfigError(
                    f"{part} of workload {self.name} must be module:attribute, got {position!r}"
                )

    def load(self, part: str) -> Any:
        """Import one of its parts, by the name of its field; raise where a package is missing."""
        return self._imported(part, str(getattr(self, part)))

    def load_command(self, name: str) -> Any:
        """Import one of its commands; raise where a package is missing."""
        (location,) = [command.location for command in self.commands if command.name == name]
        return self._imported(f"command {name}", location)

    def _imported(self, part: str, location: str) -> Any:
        if part != "sections":
            require_modules(self.requires, of=f"workload {self.name}", install=self.install)
        module, _, attribute = location.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise UnsupportedError(
                f"workload {self.name}: its {part} cannot be loaded from {location}: {error}. "
                f"Repair or uninstall {self.distribution}"
            ) from error

    @property
    def install(self) -> str:
        """What pip is to be given so that all it needs is there."""
        return f"{self.distribution}[{self.extra}]" if self.extra else ""


def _require_free(what: str, name: str) -> None:
    """Raise for a name that cannot be typed, or that the command line uses itself."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{what} cannot be called {name!r}. Write small letters, digits, - and _")
    if name in VERBS:
        raise ConfigError(
            f"{what} cannot be called {name}, because `narrowcast {name}` exists. Choose another "
            "name"
        )


def require_modules(names: Iterable[str], *, of: str, install: str) -> None:
    """Raise if one of these modules is missing, with what installs them."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        what = f"'{install}'" if install else " ".join(missing)
        raise UnsupportedError(f"{of} needs {', '.join(missing)}. Run pip install {what}")
