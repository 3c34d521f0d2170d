"""Other constants of A + B, on the tasks that constants may be chosen on and on no other.

Judged on the selection part, with seeds that are neither tuned with nor reported, and each variant
at the best of the learning rates around that of A + B. A variant is told as the budget of tuned
cosine that its loss is worth, as in the main table, over that of the constants as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hybrid_studies.methods import Way
from hybrid_studies.plan import BASE, BOTH, OURS, STRETCHED, baseline, curve, read, tuned
from hybrid_studies.running import Run, Runs
from hybrid_studies.savings import Curve, curve_of
from hybrid_studies.tasks import Task

SEED = 2000
"""The first of the ablations' own."""
HALF_LIVES = (0.0025, 0.005, 0.01, 0.015, 0.025, 0.05, 0.1)
BANKS = {
    "now": ("now",),
    ".005 .015 .05": ("now", "ema0.005", "ema0.015", "ema0.05"),
    ".01 .05": ("now", "ema0.01", "ema0.05"),
    ".015 .05": ("now", "ema0.015", "ema0.05"),
    ".015": ("now", "ema0.015"),
    ".025": ("now", "ema0.025"),
    ".05": ("now", "ema0.05"),
    ".005 .015 .05 .1": ("now", "ema0.005", "ema0.015", "ema0.05", "ema0.1"),
    "all": ("now", *(f"ema{each:g}" for each in HALF_LIVES)),
    ".05 alone": ("ema0.05",),
    ".025 alone": ("ema0.025",),
    "y now": ("y",),
    "y .005 .015 .05": ("y", "y-ema0.005", "y-ema0.015", "y-ema0.05"),
}


def variant(name: str, *, stretch: float = BOTH.stretch, **constants: Any) -> Way:
    """Return A + B with other constants."""
    return Way(
        name=f"ablation {name}", kind="primal", stretch=stretch,
        constants=BOTH.constants | constants,
    )  # fmt: skip


VARIANTS = (
    variant("as it is"),
    variant("stretch 1", stretch=1.0),
    variant("stretch 1.2", stretch=1.2),
    variant("stretch 1.7", stretch=1.7),
    variant("share .02", share=0.02),
    variant("share .1", share=0.1),
    variant("pull .8", pull=0.8),
    variant("pull .95", pull=0.95),
    variant("pull 1", pull=1.0),
    variant("warm share", warm=True),
    variant("momentum .5", momentum=0.5),
    variant("decay on y", decay="y"),
    *(replace(STRETCHED, name=f"ablation A {each:g}", stretch=each)
      for each in (1.0, 1.2, 1.4, 1.7)),
)  # fmt: skip


def ablate(
    runs: Runs, task: Task, *, names: Sequence[str], seeds: int, factors: Sequence[float]
) -> dict[str, Any]:
    """Return for each variant the worth of every read-out, and the rate it was best at."""
    middle = baseline(runs, task)[1.0]
    row = OURS[-1]
    rate = tuned(runs, task, row, centre=row.centre * middle)
    plain = tuned(runs, task, OURS[0], centre=middle)
    base = curve_of({
        share: [read(BASE, each["marks"]["end"], at=0) for each in several]
        for share, several in curve(runs, task).items()
    })  # fmt: skip
    out = {}
    for way in VARIANTS:
        if names and way.name.removeprefix("ablation ") not in names:
            continue
        if "decay on y" in way.name and not task.weight_decay:
            continue
        centre = rate if way.kind == "primal" else plain
        wanted = {
            factor: [Run(task=task.name, way=way, lr=centre * factor, seed=seed, reported=False)
                     for seed in range(SEED, SEED + seeds)]
            for factor in factors
        }  # fmt: skip
        runs.all(task, [run for each in wanted.values() for run in each], half_lives=HALF_LIVES)
        found = {
            factor: [runs.done[run.key]["marks"]["end"] for run in each]
            for factor, each in wanted.items()
        }
        out[way.name.removeprefix("ablation ")] = {
            bank: worth(base, found, entries)
            for bank, entries in BANKS.items()
            if entries[0] in found[factors[0]][0]
        }
    return out


def worth(
    base: Curve, found: dict[float, list[dict[str, list[float]]]], entries: Sequence[str]
) -> tuple[float, float, float]:
    """Return the budget in N, the loss, and the factor of the learning rate that gave it."""
    losses = {
        factor: sum(min(marks[name][0] for name in entries) for marks in each) / len(each)
        for factor, each in found.items()
    }
    best = min(losses, key=lambda factor: losses[factor])
    share, sign = base.budget(losses[best])
    return (math.inf if sign == ">" else share), losses[best], best


def table(found: dict[str, dict[str, Any]], *, banks: Sequence[str] = tuple(BANKS)) -> str:
    """Return the losses of variants by read-out, with the budget each is worth."""
    lines = ["| variant | " + " | ".join(banks) + " |", "|---" * (1 + len(banks)) + "|"]
    for name, by_bank in found.items():
        cells = [
            "{1:.4f} ({0:.2f}, lr ×{2:g})".format(*by_bank[bank]) if bank in by_bank else "–"
            for bank in banks
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
