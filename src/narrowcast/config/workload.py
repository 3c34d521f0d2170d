"""What a workload is, as a value of names: nothing heavy is imported until it is asked for.

The standard library only, so that help can list what is installed at once.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from narrowcast.errors import RecipeError, UnsupportedError

VERBS = (
    "doctor", "recipes", "plan", "train", "resume", "watch", "report", "compare", "bench",
    "verify-resume", "schema",
)  # fmt: skip
"""The command line's own words; no workload may be called one of them."""

_NAME = re.compile(r"[a-z][a-z0-9_-]*")


@final
@dataclass(frozen=True, kw_only=True)
class Workload:
    """Something that can be trained; its parts are named as `module:attribute`."""

    name: str
    """What recipes call it, and its command."""
    about: str
    """One line for whoever looks for it."""
    sections: str
    """A `Sections` value in a module that does not import torch."""
    task: str
    """A function `(recipe, *, device) -> Task`."""
    recipes: Path | None = None
    """The folder of its recipes."""
    command: str = ""
    """A click command or group."""
    report: str = ""
    """A pure function `(folder, records) -> Sequence[ReportSection]`."""
    requires: tuple[str, ...] = ()
    """Modules that must be there before any of it but its settings is used."""
    extra: str = ""
    """The extra of its distribution that installs them."""
    distribution: str = "narrowcast"
    """What pip calls the package it comes with."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise RecipeError(
                f"a workload cannot be called {self.name!r}; write small letters, digits, - and _"
            )
        if self.name in VERBS:
            raise RecipeError(
                f"a workload cannot be called {self.name}: `narrowcast {self.name}` is a command "
                "of its own; choose another name"
            )
        for field in ("sections", "task", "command", "report"):
            place = getattr(self, field)
            if (place or field in ("sections", "task")) and place.count(":") != 1:
                raise RecipeError(
                    f"{field} of workload {self.name} is {place!r}; write it as module:attribute"
                )

    def load(self, part: str) -> Any:
        """Import one of its parts, by the name of its field; refuse where a package is missing."""
        if part != "sections":
            require_modules(self.requires, of=f"workload {self.name}", install=self.install)
        place = str(getattr(self, part))
        module, _, attribute = place.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise UnsupportedError(
                f"workload {self.name}: its {part} cannot be loaded from {place}: {error}; repair "
                f"{self.distribution}, or pip uninstall it"
            ) from error

    @property
    def install(self) -> str:
        """What pip is to be given so that all it needs is there."""
        return f"{self.distribution}[{self.extra}]" if self.extra else ""


def require_modules(names: Iterable[str], *, of: str, install: str) -> None:
    """Refuse to go on without these modules, and say what installs them."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        what = f"'{install}'" if install else " ".join(missing)
        raise UnsupportedError(f"{of} needs {', '.join(missing)}; write pip install {what}")
