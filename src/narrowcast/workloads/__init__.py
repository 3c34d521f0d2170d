"""Workloads: one folder and one line in `BUILT_IN` each; other packages use an entry point."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from narrowcast.config.registry import Registry
from narrowcast.errors import ConfigError, UnsupportedError, blamed_on

if TYPE_CHECKING:
    import torch

    from narrowcast import config
    from narrowcast.runs.records import Record
    from narrowcast.runs.report_section import ReportSection
    from narrowcast.training.task import Task

BUILT_IN: Mapping[str, str] = {
    "decompose": "narrowcast.workloads.decompose:WORKLOAD",
    "forecast": "narrowcast.workloads.forecast:WORKLOAD",
    "genomics": "narrowcast.workloads.genomics:WORKLOAD",
    "lm": "narrowcast.workloads.lm:WORKLOAD",
    "sft": "narrowcast.workloads.sft:WORKLOAD",
    "tutorial": "narrowcast.workloads.tutorial:WORKLOAD",
}
"""Each workload by the name recipes use, and where its value is."""

REGISTRY = Registry(BUILT_IN)


def workload_sections(workload: str) -> config.Sections:
    """Return the recipe sections of `workload`, without importing torch."""
    return cast("config.Sections", REGISTRY.workload(workload).load("sections"))


def recipe_files() -> dict[str, Path]:
    """Return the file of every recipe that can be named, those without a folder first."""
    return REGISTRY.recipe_files()


def shipped_recipes() -> list[tuple[str, str]]:
    """Return the name and the one-line description of each of them."""
    from narrowcast.config.registry import read_description

    return [(name, read_description(path)) for name, path in recipe_files().items()]


def load_recipe(source: str | Path, overrides: Iterable[str] = ()) -> config.LoadedRecipe:
    """Load a shipped recipe or a YAML file, with `key=value` words that win over it."""
    from narrowcast import config

    if isinstance(overrides, str):
        raise ConfigError(
            f"overrides must be a list of KEY=VALUE, got a str. Write [{overrides!r}]."
        )

    return config.load_recipe(source, overrides, sections=workload_sections, shipped=recipe_files())


def build_task(recipe: config.Recipe, *, device: torch.device) -> Task:
    """Build the task of a recipe on a device and freeze its frozen groups; on meta only shapes."""
    from narrowcast.training.optimizers import get_groups
    from narrowcast.training.task import Task

    build = REGISTRY.workload(recipe.workload).load("task")
    with blamed_on(f"the function that builds the task of workload {recipe.workload}"):
        task = build(recipe, device=device)
    if not isinstance(task, Task):
        raise ConfigError(
            f"The task function of workload {recipe.workload} must return a narrowcast.Task, got "
            f"a {type(task).__name__}."
        )
    get_groups(task)
    return task


def report_sections(
    resolved: Mapping[str, Any], folder: Path, records: Sequence[Record]
) -> Sequence[ReportSection]:
    """Return the report sections of a run's workload; nothing if it is not installed."""
    entry = resolved.get("workload")
    name = entry.get("value") if isinstance(entry, Mapping) else None
    known = {workload.name: workload for workload in REGISTRY.workloads()}
    if name not in known or not known[name].report:
        return ()
    from narrowcast.runs.report_section import ReportSection

    try:
        sections = list(known[name].load("report")(folder, records))
        if strange := [each for each in sections if not isinstance(each, ReportSection)]:
            raise TypeError(f"sections must be ReportSection, got a {type(strange[0]).__name__}")
        return sections
    except UnsupportedError:  # what it needs is not installed here
        return ()
    except Exception as error:  # noqa: BLE001  # a page of a run of days, and somebody else's code
        from html import escape

        text = escape(f"{type(error).__name__}: {error}")
        return [ReportSection(title=f"{name}: report section failed", html=f"<p>{text}</p>")]
