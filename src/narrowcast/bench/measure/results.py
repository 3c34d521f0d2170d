"""From what workers told to rows of a table and plain data."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from narrowcast.bench.contenders import Contender
from narrowcast.bench.coordinator import Result
from narrowcast.bench.measure.figures import Row, speed, spread

SETUP_FACTS = (
    "start_seconds",
    "build_seconds",
    "warm_up_seconds",
    "version",
    "parameters",
    "bytes_per_parameter",
)
"""What of a contender's start stands in its row; all of it is in `contenders`."""


def rows_of(results: Sequence[Result], *, baseline: Contender) -> list[Row]:
    """Return a row for each case of each contender that has figures, in the order given."""
    reference = next((r for r in results if r.contender.name == baseline.name), None)
    return [
        _row(result, case, reference=reference) for result in results for case in _cases(result)
    ]


def timed_figures(results: Sequence[Result], baseline: Contender) -> dict[str, Any]:
    """Return the figures of timed steps as plain data."""
    return {"rows": [row.to_json() for row in rows_of(results, baseline=baseline)]}


def who_took_part(results: Sequence[Result]) -> dict[str, Any]:
    """Return who was measured, how each was set up, and why some were not, as plain data."""
    return {
        "failures": [
            {"name": r.contender.name, "why": r.failure, "log": r.log} for r in results if r.failure
        ],
        "contenders": [r.contender.to_json() | {"setup": r.setup} for r in results],
    }


def _cases(result: Result) -> list[str]:
    return list(result.rounds[0][1]["cases"]) if result.rounds else []


def _row(result: Result, case: str, *, reference: Result | None) -> Row:
    mine = _seconds(result, case)
    groups = {group for group, _ in result.rounds}
    theirs = _seconds(reference, case, groups=groups) if reference else []
    own = spread(mine)
    first = result.setup.get("first_step_seconds", {})
    on_host = _seconds(result, case, which="host_seconds")
    last = result.rounds[-1][1]
    work = last["cases"][case]["work"]
    facts = {name: result.setup[name] for name in SETUP_FACTS if name in result.setup}
    return Row(
        name=result.contender.name,
        case=case,
        seconds=own,
        against=reference.contender.name if reference else "",
        speed=speed(mine, theirs),
        peak_bytes=max(turn["cases"][case]["peak_bytes"] for _, turn in result.rounds),
        rates={what: amount / own.median for what, amount in work.items()},
        host_seconds=median(on_host) if on_host else None,
        facts={
            **facts,
            "first_step_seconds": first.get(case),
            "loss": last.get("loss"),
            "note": result.contender.note,
        },
    )


def _seconds(
    result: Result, case: str, *, groups: set[int] | None = None, which: str = "seconds"
) -> list[float]:
    return [
        seconds
        for group, turn in result.rounds
        if groups is None or group in groups
        for seconds in turn["cases"].get(case, {}).get(which, [])
    ]
