"""The workloads of the package, and those of the entry point group `narrowcast.workloads`.

A broken one raises only when it is used.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import final

from narrowcast.config.problems import closest, shortened
from narrowcast.config.workload import Workload
from narrowcast.config.yaml_text import parse
from narrowcast.errors import ConfigError

GROUP = "narrowcast.workloads"


def installed_entries() -> Iterable[EntryPoint]:
    """Return the entry points of every installed package."""
    return entry_points(group=GROUP)


@final
class Registry:
    """Finds workloads by name; each is imported when it is first used."""

    def __init__(
        self,
        built_in: Mapping[str, str],
        *,
        installed: Callable[[], Iterable[EntryPoint]] = installed_entries,
    ) -> None:
        self._built_in, self._installed = built_in, installed
        self._loaded: dict[str, Workload | str] = {}

    @property
    def names(self) -> list[str]:
        """Every workload name, with those of the package first."""
        return [*self._built_in, *(name for name in self._entries if name not in self._built_in)]

    def workload(self, name: str) -> Workload:
        """Return a workload; raise where it or its name is wrong."""
        result = self._tried(name)
        if isinstance(result, str):
            raise ConfigError(result)
        return result

    def workloads(self) -> list[Workload]:
        """Return every workload that works."""
        return [
            matched for name in self.names if isinstance(matched := self._tried(name), Workload)
        ]

    def commands(self) -> dict[str, Workload]:
        """Return the workload of each command; one of two installed workloads is left out."""
        results = {name: owners[0] for name, owners in self._owners().items()}
        return {name: owner for name, owner in results.items() if not self.clash(name)}

    def clash(self, command: str) -> str:
        """Return why a command that several workloads define is not offered; empty if it is."""
        owners = self._owners().get(command, [])
        if len(owners) < 2 or owners[0].name in self._built_in:
            return ""
        who = " and ".join(f"{owner.name} of {owner.distribution}" for owner in owners)
        return f"two workloads have a command {command!r}, {who}. Uninstall one of the packages"

    def problems(self) -> list[str]:
        """Return what is wrong with the others, and which commands are left out."""
        clashes = [
            f"{_origin(entry)} registers a workload {name!r}, which narrowcast has too, so it is "
            "left out. Its authors must choose another name"
            for name, entries in self._entries.items()
            if name in self._built_in
            for entry in entries
        ]
        clashes += [text for name in self.names if isinstance(text := self._tried(name), str)]
        for name, owners in self._owners().items():
            if text := self.clash(name):
                clashes.append(text)
            elif len(owners) > 1:
                others = ", ".join(owner.distribution for owner in owners[1:])
                clashes.append(
                    f"{others}: its command {name!r} is left out because workload "
                    f"{owners[0].name} of narrowcast has it. Its authors must choose another name"
                )
        return clashes

    def recipe_files(self) -> dict[str, Path]:
        """Return the file of every recipe; recipes of an installed workload begin with its name."""
        files: dict[str, Path] = {}
        for workload in self.workloads():
            for name, path in recipes_in(workload.recipes).items():
                own = workload.name in self._built_in or name.split("/")[0] == workload.name
                files.setdefault(name if own else f"{workload.name}/{name}", path)
        return dict(sorted(files.items(), key=lambda item: (item[0].count("/"), item[0])))

    @cached_property
    def _entries(self) -> dict[str, list[EntryPoint]]:
        results: dict[str, list[EntryPoint]] = {}
        for entry in self._installed():
            results.setdefault(entry.name, []).append(entry)
        return results

    def _owners(self) -> dict[str, list[Workload]]:
        """Return the workloads that define each command, with those of the package first."""
        results: dict[str, list[Workload]] = {}
        for workload in self.workloads():
            for command in workload.commands:
                results.setdefault(command.name, []).append(workload)
        return results

    def _tried(self, name: str) -> Workload | str:
        if name not in self._loaded:
            self._loaded[name] = self._load(name)
        return self._loaded[name]

    def _load(self, name: str) -> Workload | str:
        """Return the workload, or what is wrong with it."""
        if name in self._built_in:
            return _imported(self._built_in[name])
        entries = self._entries.get(name, [])
        if not entries:
            return f"there is no workload {shortened(name)!r}. {self._hint(name)}"
        if len(entries) > 1:
            origins = " and ".join(map(_origin, entries))
            return f"two packages have a workload {name!r}, {origins}. Uninstall one of them"
        (entry,) = entries
        try:
            result: object = _imported(entry.value)
        except Exception as error:  # noqa: BLE001  # other people's programs fail in any way
            return (
                f"the workload {name!r} of {_origin(entry)} cannot be imported from {entry.value}: "
                f"{type(error).__name__}: {error}. Repair or uninstall that package"
            )
        if not isinstance(result, Workload) or result.name != name:
            what = f"a workload called {result.name!r}" if isinstance(result, Workload) else "none"
            return (
                f"{_origin(entry)} registers {entry.value} as the workload {name!r}, but it is "
                f"{what}. An entry point must have the name of its narrowcast.Workload"
            )
        return replace(result, distribution=_origin(entry))

    def _hint(self, name: str) -> str:
        guess = closest(name, self.names)
        return f"Did you mean {guess}?" if guess else f"Write one of {', '.join(self.names)}"


def _imported(location: str) -> Workload:
    module, _, attribute = location.partition(":")
    result: Workload = getattr(importlib.import_module(module), attribute)
    return result


def _origin(entry: EntryPoint) -> str:
    return "an unknown package" if entry.dist is None else entry.dist.name


def recipes_in(folder: Path | None) -> dict[str, Path]:
    """Return the file of every recipe in `folder` by its path in it, without the ending."""
    if folder is None:
        return {}
    matches = sorted(folder.rglob("*.yaml"))
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in matches}


def read_description(path: Path) -> str:
    """Return the line that describes a recipe."""
    value = parse(path.read_text(encoding="utf-8")).value
    return str(value.get("description", "")) if isinstance(value, dict) else ""
