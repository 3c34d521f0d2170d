"""What finished runs come to: losses, savings, stopped runs, and the best standard method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hybrid_studies.plan import BASE, ROWS, STANDARD, Row, cost, curve, read, reported
from hybrid_studies.running import Runs
from hybrid_studies.savings import curve_of, estimate, reached, saving
from hybrid_studies.tasks import STOPS, Task


def summary(runs: Runs, tasks: Sequence[Task]) -> dict[str, Any]:
    """Return every row of every task that is finished; what is not is left out."""
    out: dict[str, Any] = {}
    for task in tasks:
        name = task.name
        try:
            found = curve(runs, task)
        except TimeoutError:
            continue
        losses = {
            share: [read(BASE, each["marks"]["end"], at=1) for each in each_seed]
            for share, each_seed in found.items()
        }
        base = curve_of(losses)
        out[name] = {
            "steps": task.steps, "seeds": task.seeds,
            "curve": dict(zip(map(str, base.shares), base.losses, strict=True)),
            "rates": {str(share): each[0]["lr"] for share, each in found.items()},
            "rows": {},
        }  # fmt: skip
        for row in ROWS:
            if row.readout in ("bank", "lawa") and not task.banked:
                continue
            try:
                trained = reported(runs, task, row)
            except TimeoutError:
                continue
            out[name]["rows"][row.label] = of_row(task, row, trained, found, losses)
        compare(out[name]["rows"])
    return out


def of_row(
    task: Task, row: Row, trained: dict[float, list[dict[str, Any]]],
    cosine: dict[float, list[dict[str, Any]]], base: dict[float, list[float]],
) -> dict[str, Any]:  # fmt: skip
    """Return what one row of one task comes to."""
    here = trained[1.0]
    losses = [read(row, each["marks"]["end"], at=1) for each in here]
    spent = [cost(row, task, each) / task.steps for each in here]
    plain = [read(BASE, each["marks"]["end"], at=1) for each in cosine[1.0]]
    apart = estimate([own - other for own, other in zip(losses, plain, strict=True)])
    found = saving(base, losses, spent)
    seconds = sum(
        each["seconds"] + each["upkeep_seconds"] * (row.readout != "now") for each in here
    )
    result: dict[str, Any] = {
        "lr": here[0]["lr"], "loss": estimate(losses).mean, "apart": [apart.mean, apart.half],
        "spent": sum(spent) / len(spent), "saving": [found.mean, found.half],
        "sign": found.sign,
        "second_per_step": seconds / len(here) / task.steps,
        "cosine_second_per_step": sum(each["seconds"] for each in cosine[1.0])
        / len(cosine[1.0]) / task.steps,
    }  # fmt: skip
    if "offered" in here[0]:
        offered = sum(each["offered"] for each in here)
        result["accepted"] = sum(each["accepted"] for each in here) / max(1, offered)
    for stop in STOPS:
        at = [each["marks"][f"{stop:g}"] for each in here]
        stopped = saving(
            base,
            [read(row, each, at=1) for each in at],
            [cost(row, task, each, mark=f"{stop:g}") / task.steps for each in here],
        )
        result[f"stopped {stop:g}"] = [stopped.mean, stopped.half, stopped.sign]
    if row.shares:
        by_share = {
            share: [read(row, each["marks"]["end"], at=1) for each in several]
            for share, several in trained.items()
        }
        result["losses by share"] = {
            str(share): sum(each) / len(each) for share, each in by_share.items()
        }
        result["reaches cosine at"] = reached(by_share, sum(plain) / len(plain))
    return result


def compare(rows: dict[str, Any]) -> None:
    """Set every row against the best of the standard ones."""
    standard = {row.label: rows[row.label]["saving"][0] for row in (BASE, *STANDARD)
                if row.label in rows}  # fmt: skip
    best = max(standard, key=lambda label: standard[label])
    for row in rows.values():
        row["best standard"] = best
        row["against best standard"] = row["saving"][0] / standard[best]
