"""The head of a live page: what runs, how far it is, and the few numbers one looks for."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from narrowcast.report.charts.drawing import PERCENT
from narrowcast.report.live.events import for_page
from narrowcast.report.live.live_data import LiveData
from narrowcast.report.phrases import (
    capital,
    count,
    duration,
    in_policy,
    large,
    measured,
    policies,
    said,
    scale,
    share,
    size,
    value,
)
from narrowcast.report.summary import Fact, RunEnding
from narrowcast.runs.shape import LARGEST


def head(
    data: LiveData,
    *,
    ending: RunEnding,
    at_work: bool,
    settings: Mapping[str, Any],
    sessions: tuple[Mapping[str, Any], ...],
) -> dict[str, Any]:
    """Return the head as texts and a share of the way."""
    step, requested = data.tally.step, data.tally.steps
    name = _text(setting(settings, "name")) or _text(setting(settings, "workload")) or "this run"
    policy = _text(setting(settings, "precision.policy"))
    policy = policies(policy, setting(settings, "precision.schedule"))
    return {
        "name": name,
        "title": f"{name} {in_policy(policy)}" if policy else name,
        "description": _text(setting(settings, "description")),
        "progress": _progress(step, requested),
        "share": min(1.0, step / requested) if requested > 0 else 0.0,
        "state": asdict(ending) | {"at_work": at_work},
        "facts": [asdict(fact) for fact in _facts(data, at_work=at_work)],
        "began": _began(sessions),
        **_judged(data),
        "scaled": data.scaled,
        "skipped": data.tally.skipped,
        "findings": data.events.findings,
        "changes": data.events.changes,
    }


def setting(settings: Mapping[str, Any], key: str) -> object:
    """Return the recipe's value of `key`; None if the file does not set it."""
    entry = settings.get(key)
    return entry.get("value") if isinstance(entry, Mapping) else None


def whole(result: object) -> int | None:
    """Return a setting that is a whole number, and one a run can have."""
    return result if type(result) is int and 0 < result < LARGEST else None


def _facts(data: LiveData, *, at_work: bool) -> list[Fact]:
    last, tally = data.last, data.tally
    if last is None:
        return []
    left = at_work and tally.step < tally.steps
    return [
        Fact("Time left", duration(tally.seconds_left), note=f"{duration(tally.seconds)} so far")
        if left
        else Fact(
            "Time in steps", duration(tally.seconds), note=f"{large(tally.items)} {data.task.units}"
        ),
        Fact("Training loss", value(tally.loss), note="mean of the last steps"),
        *_evaluated(data),
        Fact(
            f"{capital(data.task.units)} per second",
            large(tally.items_per_second),
            note=f"{duration(tally.step_seconds)} per step",
        ),
        Fact(
            "Steps skipped",
            count(tally.skipped),
            note=share(tally.skipped, tally.step) if tally.skipped else "none",
        ),
        *([Fact("Loss scale", scale(tally.scale))] if data.scaled else []),
        *([Fact("Peak memory", size(data.peak_bytes))] if data.peak_bytes else []),
    ]


def _evaluated(data: LiveData) -> list[Fact]:
    metric = data.metric
    matches = [(step, m[metric.name]) for step, m in data.evals if metric and metric.name in m]
    if metric is None or not matches:
        return []
    label = f"Evaluated {said(metric.name)}"
    step, y = matches[-1]
    return [Fact(for_page(label), measured(metric, y), note=f"at step {count(step)}")]


def _judged(data: LiveData) -> dict[str, Any]:
    """Return what the charts are called that depend on the task, and how its headline is drawn."""
    titles = {"speed": f"{capital(data.task.units)} per second"}
    if data.metric is None:
        return {"titles": titles, "better": "", "ticks": ""}
    titles["headline"] = f"Evaluated {said(data.metric.name)}"
    return {
        "titles": {name: for_page(title) for name, title in titles.items()},
        "better": f"{capital(data.metric.better)} is better.",
        "ticks": PERCENT if data.metric.text.endswith("%") else "",
    }


def _progress(step: int, request: int) -> str:
    if not step:
        return ""
    return f"Step {count(step)} of {count(request)}" if request > 0 else f"Step {count(step)}"


def _began(sessions: tuple[Mapping[str, Any], ...]) -> str:
    if not sessions:
        return ""
    started = _text(sessions[0].get("started")).replace("T", " ").replace("+00:00", " UTC")
    again = len(sessions) - 1
    return f"began {started}" + (f", resumed {count(again, 'time')}" if again else "")


def _text(matched: object) -> str:
    return for_page(matched) if isinstance(matched, str) else ""
