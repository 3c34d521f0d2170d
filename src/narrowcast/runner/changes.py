"""What may change when a run is resumed, and what the changes mean."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from narrowcast.config import LoadedRecipe, Recipe, from_resolved
from narrowcast.config.load import flat_settings
from narrowcast.config.phases import last_step
from narrowcast.errors import CheckpointError, ConfigError
from narrowcast.precision.plan.plan import Plan
from narrowcast.runs import RunFolder
from narrowcast.runs.shape import ANY
from narrowcast.strategies.hybrid.plan import STRATEGY
from narrowcast.training.checkpoints.settings import (
    MAY_CHANGE,
    decisive_differences,
    difference_text,
    places_in,
)
from narrowcast.training.parallel import RunRanks
from narrowcast.training.phase_plans import TASK_ROW
from narrowcast.workloads import workload_sections

RESOLVED, PLAN = "resolved.json", "plan.json"
FROM_CHECKPOINT = "checkpoint"
"""Origin of a setting that comes from the checkpoint."""

ACCEPTABLE = {
    "data": "train on other data than the checkpoint",
    "settings": "use the settings of the checkpoint if resolved.json differs or is damaged",
    "records": "continue although records of the checkpoint's steps are missing",
}
"""Differences that a resumed run may accept, and what accepting means."""


@dataclass(frozen=True, kw_only=True)
class Continued:
    """The recipe of a run up to its checkpoint, and from there on."""

    before: LoadedRecipe
    after: LoadedRecipe
    dropped: str
    """Settings of the folder that were replaced by those of the checkpoint."""


def require_acceptable(accept: Collection[str]) -> None:
    """Raise for unknown words in `accept`."""
    if unknown := [word for word in accept if word not in ACCEPTABLE]:
        known = "; ".join(f"{word}: {meaning}" for word, meaning in ACCEPTABLE.items())
        raise ConfigError(
            f"accept must name data, settings or records, got {unknown[0]!r}. {known}."
        )


def continued(
    run: RunFolder,
    overrides: Sequence[str],
    *,
    state: Mapping[str, Any] | None = None,
    accept: Collection[str] = (),
) -> Continued:
    """Return the recipe of `run` before and after `overrides`; raise if one may not change."""
    saved: Mapping[str, Any] = {} if state is None else state.get("settings", {})
    resolved, dropped = _resolved(run, saved, accept=accept)
    as_saved = {key: {"value": saved[key], "origin": FROM_CHECKPOINT} for key in saved}
    before = from_resolved(as_saved or resolved, sections=workload_sections)
    after = from_resolved(resolved, overrides, sections=workload_sections, text=_text(run))
    was, is_now = flat_settings(before.recipe), flat_settings(after.recipe)
    places = places_in(type(after.recipe.data))
    if changed := decisive_differences(was, is_now, places=places):
        listed = ", ".join(f"{key} (was {was.get(key)})" for key in changed)
        raise ConfigError(
            f"A resumed run must keep the settings it started with, got other values for {listed}. "
            "Leave them out, or start a new run with `narrowcast train`. Only these may change: "
            f"{', '.join((*MAY_CHANGE, *places))}."
        )
    return Continued(before=before, after=after, dropped=dropped)


def notices(
    run: RunFolder, before: Recipe, after: Recipe, *, plan: Plan, dropped: str = ""
) -> list[str]:
    """Return notices about how the rest of a resumed run will differ."""
    result = []
    falls = after.lr_schedule.name != "constant"
    if before.steps != after.steps and after.lr_schedule.warmup_ratio:
        result.append(
            f"the warm-up is now a share of {after.steps} steps instead of {before.steps}"
        )
    if before.steps != after.steps and falls:
        result.append(
            f"the {after.lr_schedule.name} learning rate now ends at step {after.steps} instead of "
            f"{before.steps}, so it does not continue where it stopped"
        )
    if _ends(before) != _ends(after):
        result.append(
            f"phases that end at a share of the run now end at a share of {after.steps} steps"
        )
    sections = (after.data, after.model, *after.further.values())
    if before.steps != after.steps and any(section.depends_on_steps for section in sections):
        result.append(
            f"settings of {after.workload} that are a share of the run now refer to {after.steps} "
            f"steps instead of {before.steps}"
        )
    if dropped:
        result.append(
            f"the settings are those of the checkpoint. resolved.json had others: {dropped}"
        )
    if not _text(run):
        result.append("recipe.yaml cannot be read, so the settings come from resolved.json")
    return result + _other_formats(run, plan)


def ranks_notice(state: Mapping[str, Any] | None, ranks: RunRanks) -> list[str]:
    """Return a notice if the run continues on another number of ranks."""
    before = 1 + len((state or {}).get("random_of_ranks", {}))
    if state is None or before == ranks.size:
        return []
    return [
        f"the run continues on {_ranks(ranks.size)} instead of {before}: batches are the same, "
        "random numbers such as those of dropout are not"
    ]


def _ranks(count: int) -> str:
    return f"{count} rank" if count == 1 else f"{count} ranks"


def recorded_task_row(run: RunFolder) -> Mapping[str, Any] | None:
    """Return the `precision.task` row that a run started with, from its plan.json."""
    try:
        stored = run.read_json(PLAN) if (run.path / PLAN).exists() else {}
    except CheckpointError:  # `notices` reports it
        return None
    row = stored.get(TASK_ROW)
    return row if isinstance(row, Mapping) else None


def _text(run: RunFolder) -> str:
    """Return the text of recipe.yaml, which is for readers; resolved.json decides."""
    try:
        return run.recipe_text
    except CheckpointError:
        return ""


def _other_formats(run: RunFolder, plan: Plan) -> list[str]:
    """Return a notice if the formats of a run are executed differently on this machine."""
    if not (run.path / PLAN).exists():
        return []
    now = plan.to_json()
    try:
        was = run.read_json(PLAN)
    except CheckpointError:
        return [f"{PLAN} was damaged, so it is not known whether the formats run as before"]
    # `plan` is the plan of the first phase, without task and strategy.
    residuals = ("phases", TASK_ROW, STRATEGY)
    was = {key: was[key] for key in was if key not in residuals}
    if was == now:
        return []
    return [
        f"the run started on {was.get('hardware')}. Its formats run differently on "
        f"{now['hardware']}, so resuming is not bit-exact"
    ]


def _resolved(
    run: RunFolder, saved: Mapping[str, Any], *, accept: Collection[str]
) -> tuple[dict[str, Any], str]:
    """Return the settings in `resolved.json`, and those that the checkpoint replaced, as text."""
    way_out = (
        "add --accept settings (in Python accept=['settings']) to use those of the checkpoint"
        if saved
        else "start a new run with `narrowcast train`"
    )
    there: dict[str, Any] = {}
    damaged = ""
    try:
        there = _entries(run)
    except CheckpointError as error:
        if not saved or "settings" not in accept:
            raise CheckpointError(f"{str(error).rstrip('.')}, or {way_out}.") from error
        damaged = "it was damaged or missing"
    here = {key: entry["value"] for key, entry in there.items()}
    if "settings" in accept and saved:
        # Also where the data is: an override can say that it is elsewhere now.
        other = decisive_differences(saved, here)
        resolved = {
            key: {"value": saved[key], "origin": FROM_CHECKPOINT}
            if key in other or key not in there
            else there[key]
            for key in saved
        }
        return resolved, damaged or difference_text(other, saved, here)
    places = _places(saved)
    if saved and (keys := decisive_differences(saved, here, places=places)):
        raise CheckpointError(
            f"{run.path / RESOLVED} has other settings than the checkpoint: "
            f"{difference_text(keys, saved, here)}. Restore the files that belong together, or "
            f"{way_out}."
        )
    return there, ""


def _places(saved: Mapping[str, Any]) -> tuple[str, ...]:
    return places_in(workload_sections(str(saved["workload"])).data) if "workload" in saved else ()


def _entries(run: RunFolder) -> dict[str, Any]:
    results: dict[str, Any] = run.read_json(RESOLVED, {ANY: {ANY: object}})
    for key, entry in results.items():
        if entry.keys() != {"value", "origin"}:
            raise CheckpointError(
                f"{run.path / RESOLVED} is damaged: {key} has no value and origin. Restore it from "
                "a copy."
            )
    return results


def _ends(recipe: Recipe) -> list[int | None]:
    return [last_step(phase.until, steps=recipe.steps) for phase in recipe.precision.schedule]
