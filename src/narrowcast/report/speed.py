"""How fast a run was, in a few rows."""

import math
from collections.abc import Sequence

from narrowcast.report.phrases import capital, count, duration, large, share
from narrowcast.report.run_data import RunData


def speed_table(data: RunData) -> list[tuple[str, str, str]]:
    """List what took time: a name, a figure, and what it is of; empty before the first step."""
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
        ("95 % of steps below", duration(quantile(seconds, 0.95)), ""),
        ("Slowest step", duration(slowest.seconds), f"step {count(slowest.step)}"),
        (f"{capital(data.task.units)} per second", large(items / total), f"{large(items)} in all"),
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
