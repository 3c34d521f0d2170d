"""From a recipe's name or file, and words that win over it, to checked settings with origins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from narrowcast.config.limits import UNSETTLED
from narrowcast.config.overrides import Overrides, Setting
from narrowcast.config.problems import Problems, shortened, shown
from narrowcast.config.sections import Recipe, Sections
from narrowcast.config.sources import read_source
from narrowcast.config.tree import recipe_tree
from narrowcast.config.validate import validate
from narrowcast.config.yaml_text import YamlError, parse
from narrowcast.errors import CheckpointError, ConfigError

DEFAULT = "default"
EPOCHS = "epochs"
"""The origin of steps that follow from epochs and data."""

_Kind = TypeVar("_Kind", bound=BaseModel)

SectionsOf = Callable[[str], Sections]
"""From a workload's name to its sections; raises ConfigError where there is none."""


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe, and the source of each value."""

    recipe: Recipe
    origins: dict[str, str]
    """Dotted key to `default`, the name of a file, `command line`, or `task` and its name."""
    text: str
    """The recipe file as the user named it."""

    def for_samples(self, samples: int) -> LoadedRecipe:
        """Return it with the steps that its epochs have over so many samples."""
        return replace(self, recipe=self.recipe.for_samples(samples))

    def with_defaults(self, values: Mapping[str, Any], *, origin: str) -> LoadedRecipe:
        """Return it with other values, by dotted key, for settings that are at their default."""
        unset = {key: values[key] for key in values if self.origins.get(key) == DEFAULT}
        try:
            recipe = _changed(self.recipe, unset)
        except ValidationError as error:
            result = "; ".join(each["msg"] for each in error.errors(include_url=False))
            raise ConfigError(f"{origin}: {result}") from error
        return replace(
            self, recipe=recipe, origins={**self.origins, **dict.fromkeys(unset, origin)}
        )

    def with_values(self, values: Mapping[str, Any], *, origin: str) -> LoadedRecipe:
        """Return it with other values, by dotted key, whatever they were before."""
        origins = {**self.origins, **dict.fromkeys(values, DEFAULT)}
        return replace(self, origins=origins).with_defaults(values, origin=origin)

    def resolved(self) -> dict[str, dict[str, Any]]:
        """Return every setting with its value and origin, as in `resolved.json`."""
        return {
            key: {"value": value, "origin": self.origins[key]}
            for key, value in flat_settings(self.recipe).items()
        }


def load_recipe(
    source: str | Path,
    overrides: Iterable[str] = (),
    *,
    sections: SectionsOf,
    shipped: Mapping[str, Path] = MappingProxyType({}),
) -> LoadedRecipe:
    """Load a recipe by its name in `shipped` or from a file, with KEY=VALUE overrides."""
    matched = read_source(source, shipped)
    arguments = list(overrides)
    try:
        document = parse(matched.text)
    except YamlError as error:
        raise ConfigError(f"{matched.shown}:{error.line}: {error}") from None
    if not isinstance(document.value, dict):
        raise ConfigError(
            f"{matched.shown}: a recipe must have one `key: value` per line, got "
            f"{shown(document.value)}. Begin with e.g. workload: lm"
        )
    line = document.lines.get(("workload",))
    where = f"{matched.shown}{f':{line}' if line else ''}: workload"
    known = _find_sections(document.value.get("workload"), arguments, sections, where=where)
    inputs = Overrides(recipe_tree(known), known.shorthand)
    inputs.settings["name",] = Setting(matched.name, matched.origin, f"{matched.shown}: name")
    inputs.add_file(document, origin=matched.origin, shown_as=matched.shown)
    inputs.add_arguments(arguments)
    return _loaded(inputs, known, shown_as=matched.shown, text=matched.text)


def from_resolved(
    resolved: Mapping[str, Any],
    overrides: Iterable[str] = (),
    *,
    sections: SectionsOf,
    text: str = "",
) -> LoadedRecipe:
    """Load the recipe of an earlier run from its `resolved.json` and `text`, its recipe file."""
    arguments = list(overrides)
    for key, entry in resolved.items():
        if not isinstance(entry, Mapping) or set(entry) != {"value", "origin"}:
            raise CheckpointError(f"resolved.json is damaged: {key} has no value and origin")
    workload = resolved.get("workload", {}).get("value")
    known = _find_sections(workload, arguments, sections, where="resolved.json: workload")
    inputs = Overrides(recipe_tree(known), known.shorthand)
    inputs.add_resolved(resolved, shown_as="resolved.json")
    inputs.add_arguments(arguments)
    return _loaded(inputs, known, shown_as="resolved.json", text=text)


def flat_settings(recipe: Recipe) -> dict[str, Any]:
    """Return the value of every setting by its dotted key, as JSON has it."""

    def walk(model: BaseModel, dumped: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for name in type(model).model_fields:
            value = getattr(model, name)
            if isinstance(value, BaseModel):
                yield from walk(value, dumped[name], f"{prefix}{name}.")
            elif isinstance(model, Recipe) and name == "further":
                for own, section in value.items():
                    yield from walk(section, dumped[name][own], f"{own}.")
            else:
                yield f"{prefix}{name}", dumped[name]

    return dict(walk(recipe, recipe.model_dump(mode="json"), ""))


def _changed(section: _Kind, values: Mapping[str, Any]) -> _Kind:
    """Return a section with other values, by dotted key, and all that it checks checked again."""
    changed = {name: getattr(section, name) for name in type(section).model_fields}
    for name in {key.partition(".")[0] for key in values}:
        inner = {
            key.partition(".")[2]: value
            for key, value in values.items()
            if key.partition(".")[0] == name
        }
        changed[name] = inner[""] if "" in inner else _changed(changed[name], inner)
    return type(section).model_validate(changed)


def _find_sections(
    name: object, arguments: Iterable[str], sections: SectionsOf, *, where: str
) -> Sections:
    """Return the sections of the workload, which decides what other settings there are."""
    for word in arguments:
        key, equals, text = word.partition("=")
        if equals and key.strip() == "workload":
            name, where = text.strip().strip("'\""), shortened(word)
    if not isinstance(name, str) or not name:
        raise ConfigError(
            f"{where}: must name a workload, got {shown(name)}. Write e.g. workload=lm"
        )
    try:
        return sections(name)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _loaded(inputs: Overrides, sections: Sections, *, shown_as: str, text: str) -> LoadedRecipe:
    """Return the recipe of all settings, or raise with all that is wrong with them."""
    epochs = inputs.settings.get(("epochs",))
    if epochs is not None and epochs.value is not None and ("steps",) not in inputs.settings:
        inputs.settings["steps",] = Setting(UNSETTLED, EPOCHS, "epochs")  # until data is read
    recipe = validate(inputs, sections, shown_as=shown_as)
    if recipe is None or inputs.problems:
        raise ConfigError(_listed(inputs.problems))
    origins = {".".join(path): setting.origin for path, setting in inputs.settings.items()}
    return LoadedRecipe(
        recipe, {key: origins.get(key, DEFAULT) for key in flat_settings(recipe)}, text
    )


def _listed(problems: Problems) -> str:
    if problems.count == 1:
        return problems.shown[0]
    head = f"{problems.count} problems in the recipe:"
    return "\n".join([head, *(f"  {line}" for line in problems.lines())])
