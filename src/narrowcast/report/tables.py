"""The plain tables of a page: evaluations, skips, findings, bytes, speed, recipe, environment."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from narrowcast.report.phrases import (
    capital,
    count,
    duration,
    large,
    measured,
    said,
    share,
    size,
    written,
)
from narrowcast.report.run_data import RunData
from narrowcast.runs.records import FindingRecord

MOST_ROWS = 200
"""Rows after which a table of events only says how many more there are."""
FEW_ROWS = 10
"""Rows of a table of events that are shown before a reader opens the rest."""

_SCALE_CHANGE = re.compile(r"; loss scale \S+ → \S+$")

ROLES = {
    "params": "Weights",
    "grads": "Gradients",
    "master": "Master weights",
    "moments": "Optimizer moments",
    "fp8": "Weights in fp8",
    "ema": "Averaged weights",
    "lookahead": "Lookahead point",
    "averages": "Averages to choose from",
}


class Reason(NamedTuple):
    """Why steps were skipped, and how often."""

    why: str
    times: int
    steps: str


class FindingRow(NamedTuple):
    """Equal findings in one row."""

    first: FindingRecord
    since: int
    times: int
    steps: str


class Bytes(NamedTuple):
    """The size of one role of the training state."""

    role: str
    size: str
    share: str
    percent: float


class SettingRow(NamedTuple):
    """One key of the recipe, its value, and where it was set."""

    key: str
    value: str
    origin: str


def eval_table(data: RunData) -> tuple[list[str], list[list[str]]]:
    """List the evaluations: the names of the metrics, then a row of texts each."""
    names = data.metrics
    rows = [
        [
            count(record.step),
            *(
                measured(data.task.metric(n), record.metrics[n]) if n in record.metrics else "–"
                for n in names
            ),
        ]
        for record in data.evals
    ]
    return names, rows


def directions(data: RunData) -> str:
    """Return which way is better for each ranked metric; empty if lower is for all."""
    metrics = {name: data.task.metric(name) for name in data.metrics}
    ways = {name: metric.better for name, metric in metrics.items() if metric.ranked}
    if "higher" not in ways.values():
        return ""
    lines = [
        f"{way} is better for {', '.join(said(name) for name in ways if ways[name] == way)}"
        for way in ("higher", "lower")
        if way in ways.values()
    ]
    return f"{capital('; '.join(lines))}."


def reasons(data: RunData) -> list[Reason]:
    """Count skipped steps by reason, the most frequent first, without changes of the loss scale."""
    skipped: dict[str, list[int]] = {}
    for record in data.steps:
        if not record.applied:
            why = _SCALE_CHANGE.sub("", record.skip_reason) or "no reason recorded"
            skipped.setdefault(why, []).append(record.step)
    matches = [Reason(why, len(steps), _span(steps)) for why, steps in skipped.items()]
    return sorted(matches, key=lambda reason: -reason.times)


def findings(data: RunData) -> list[FindingRow]:
    """List the findings in the order they first came up, those that say the same as one."""
    groups: dict[tuple[str, ...], list[FindingRecord]] = {}
    for r in data.findings:
        key = (r.module, r.role, r.what, r.why, r.action, r.advice)
        groups.setdefault(key, []).append(r)
    return [
        FindingRow(same[0], min(r.since for r in same), len(same), _span([r.step for r in same]))
        for same in groups.values()
    ]


def bytes_by_role(plan: Mapping[str, Any]) -> tuple[list[Bytes], str]:
    """List what each role weighs by the plan, the heaviest first, and the sum."""
    sizes = _bytes(plan)
    total = sum(sizes.values())
    rows = [
        Bytes(
            role=ROLES.get(role, role.replace("_", " ").capitalize()),
            size=size(n),
            share=share(n, total),
            percent=round(100 * n / total, 2),
        )
        for role, n in sorted(sizes.items(), key=lambda item: (-item[1], item[0]))
        if n > 0
    ]
    return rows, size(total)


def settings(data: RunData) -> tuple[list[SettingRow], list[SettingRow]]:
    """List the recipe: settings that were set, then defaults."""
    result = [
        SettingRow(key, written(entry.get("value")), str(entry.get("origin", "")))
        for key, entry in data.settings.items()
    ]
    chosen = [setting for setting in result if setting.origin != "default"]
    return chosen, [setting for setting in result if setting.origin == "default"]


def surroundings(data: RunData) -> list[tuple[str, tuple[str, ...]]]:
    """List the environment: each key with a value per session, or one where they agree."""
    flat = [dict(_flattened(session)) for session in data.sessions]
    keys = dict.fromkeys(key for session in flat for key in session)
    rows = []
    for key in keys:
        values = tuple(session.get(key, "–") for session in flat)
        rows.append((key, values[:1] if len(set(values)) == 1 else values))
    return rows


def _bytes(plan: Mapping[str, Any]) -> dict[str, int]:
    """Take the totals of the plan and its strategy; add modules up where the plan has none."""
    totals = plan.get("bytes") or Counter[str]()
    if not totals:
        for module in plan.get("modules", []):
            totals.update(module.get("bytes", {}))
    extra_bytes = plan.get("strategy", {}).get("bytes", {})
    return {role: int(n) for role, n in {**totals, **extra_bytes}.items()}


def _span(steps: list[int]) -> str:
    if len(steps) <= 3:
        return ", ".join(count(step) for step in steps)
    return f"{count(steps[0])} – {count(steps[-1])}"


def _flattened(results: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, entry in results.items():
        name = f"{prefix}{key}"
        match entry:
            case Mapping():
                yield from _flattened(entry, f"{name} ")
            case list() if any(isinstance(item, Mapping) for item in entry):
                numbered = {str(i): item for i, item in enumerate(entry)}
                yield from _flattened(numbered, f"{name} ")
            case int() if key.endswith("_bytes"):
                yield name.removesuffix("_bytes"), size(entry)
            case None | []:
                yield name, "none"
            case _:
                yield name, written(entry)


def speed_table(data: RunData) -> list[tuple[str, str, str]]:
    """List what took time, as name, value and share; empty before the first step."""
    seconds = [r.seconds for r in data.steps if math.isfinite(r.seconds)]
    total = math.fsum(seconds)
    if total <= 0:
        return []
    items = sum(r.items for r in data.steps)
    skipped = math.fsum(r.seconds for r in data.steps if not r.applied)
    slowest = max(data.steps, key=lambda r: r.seconds)
    rows = [
        ("Time in steps", duration(total), f"{count(len(seconds), 'step')}"),
        ("Per step", duration(quantile(seconds, 0.5)), "median"),
        ("95th percentile", duration(quantile(seconds, 0.95)), ""),
        ("Slowest step", duration(slowest.seconds), f"step {count(slowest.step)}"),
        (
            f"{capital(data.task.units)} per second",
            large(items / total),
            f"{large(items)} in total",
        ),
    ]
    if skipped > 0:
        rows.append(("In skipped steps", duration(skipped), share(skipped, total)))
    blocked = math.fsum(r.seconds_blocked for r in data.checkpoints)
    if data.checkpoints:
        times = count(len(data.checkpoints), "checkpoint")
        rows.append(("Waiting for checkpoints", duration(blocked), times))
    return rows


def quantile(values: Sequence[float], part: float) -> float:
    """Return the value that `part` of the others do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(part * len(ordered)) - 1 if part else 0)]
