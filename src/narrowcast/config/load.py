"""From a recipe's name or file, and words that win over it, to checked settings with origins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from narrowcast.config.limits import MOST_WORDS, UNSETTLED
from narrowcast.config.overrides import Overrides, Setting
from narrowcast.config.problems import Problems
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
    """A recipe, and who set each of its values."""

    recipe: Recipe
    origins: dict[str, str]
    """Dotted key to `default`, the name of a file, `command line`, or `task` and its name."""
    text: str
    """The recipe file as it was given."""

    def for_samples(self, samples: int) -> LoadedRecipe:
        """Return it with the steps that its epochs have over so many samples."""
        return replace(self, recipe=self.recipe.for_samples(samples))

    def with_defaults(self, values: Mapping[str, Any], *, origin: str) -> LoadedRecipe:
        """Return it with other values for the settings, by dotted key, that nobody has set.

        A key that its recipe does not have is left out; values that it cannot have are refused.
        """
        unset = {key: values[key] for key in values if self.origins.get(key) == DEFAULT}
        try:
            recipe = _changed(self.recipe, unset)
        except ValidationError as error:
            result = "; ".join(each["msg"] for each in error.errors(include_url=False))
            raise ConfigError(f"{origin}: {result}") from error
        return replace(
            self, recipe=recipe, origins={**self.origins, **dict.fromkeys(unset, origin)}
        )

    def resolved(self) -> dict[str, dict[str, Any]]:
        """Return every setting with its value and origin, as `resolved.json` keeps them."""
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
    """Load a recipe by its name in `shipped`, or a file, with KEY=VALUE words that win over it.

    Everything that is wrong is said at once, in one ConfigError.
    """
    matched = read_source(source, shipped)
    terms = _few(overrides)
    try:
        document = parse(matched.text)
    except YamlError as error:
        raise ConfigError(f"{matched.shown}:{error.line}: {error}") from None

    def fill(inputs: Overrides) -> None:
        inputs.settings["name",] = Setting(matched.name, matched.origin, f"{matched.shown}: name")
        inputs.add_file(document, origin=matched.origin, shown_as=matched.shown)
        inputs.add_arguments(terms)

    return _load(fill, sections, shown_as=matched.shown, text=matched.text)


def from_resolved(
    resolved: Mapping[str, Any],
    overrides: Iterable[str] = (),
    *,
    sections: SectionsOf,
    text: str = "",
) -> LoadedRecipe:
    """Load the recipe of an earlier run from its `resolved.json`, with words that win over it.

    `text` is the recipe file that run was given.
    """
    names = _few(overrides)
    for key, entry in resolved.items():
        if not isinstance(entry, Mapping) or set(entry) != {"value", "origin"}:
            raise CheckpointError(f"resolved.json is damaged: {key} has no value and origin")

    def fill(settings: Overrides) -> None:
        settings.add_resolved(resolved, shown_as="resolved.json")
        settings.add_arguments(names)

    return _load(fill, sections, shown_as="resolved.json", text=text)


def flat_settings(recipe: Recipe) -> dict[str, Any]:
    """Return the value of every setting by its dotted key, as JSON has it."""
    return dict(_flat(recipe))


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


def _load(
    fill: Callable[[Overrides], None], sections: SectionsOf, *, shown_as: str, text: str
) -> LoadedRecipe:
    # The workload decides which settings there are, so it is looked up first.
    first = Overrides(recipe_tree(None))
    fill(first)
    known, problem = _sections(first.settings.get(("workload",)), sections)
    inputs = Overrides(recipe_tree(known))
    fill(inputs)
    _leave_steps_open(inputs)
    for each in problem:
        inputs.problems.add(each)
    recipe = validate(inputs, known, shown_as=shown_as)
    if recipe is None or inputs.problems:
        raise ConfigError(_listed(inputs.problems))
    origins = {".".join(path): setting.origin for path, setting in inputs.settings.items()}
    return LoadedRecipe(
        recipe, {key: origins.get(key, DEFAULT) for key in flat_settings(recipe)}, text
    )


def _leave_steps_open(inputs: Overrides) -> None:
    """Let the steps of a recipe with epochs be those that its data has, whatever number that is."""
    epochs = inputs.settings.get(("epochs",))
    if epochs is not None and epochs.value is not None and ("steps",) not in inputs.settings:
        inputs.settings["steps",] = Setting(UNSETTLED, EPOCHS, "epochs")


def _sections(workload: Setting | None, sections: SectionsOf) -> tuple[Sections | None, list[str]]:
    """Return the sections of the workload, or what is wrong with its name."""
    if workload is None or not isinstance(workload.value, str) or not workload.value:
        return None, []  # said by the validation
    try:
        return sections(workload.value), []
    except ConfigError as error:
        return None, [f"{workload.where}: {error}"]


def _few(terms: Iterable[str]) -> list[str]:
    """Return the words of a command line, and refuse more than anybody types."""
    inputs = list(terms)
    if len(inputs) > MOST_WORDS:
        raise ConfigError(
            f"{len(inputs)} words KEY=VALUE were given; write at most {MOST_WORDS}, and the others "
            "into a file"
        )
    return inputs


def _listed(problems: Problems) -> str:
    if problems.count == 1:
        return problems.shown[0]
    head = f"{problems.count} problems in the recipe:"
    return "\n".join([head, *(f"  {line}" for line in problems.lines())])


def _flat(recipe: Recipe) -> Iterator[tuple[str, Any]]:
    """Yield every setting, sections taken apart, as dotted key and JSON value."""

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

    yield from walk(recipe, recipe.model_dump(mode="json"), "")
