"""What is run: the rows of the table, how their learning rates are tuned, the baseline's curve."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import narrowcast as nc
from hybrid_studies.methods import Way
from hybrid_studies.readouts import HALF_LIVES
from hybrid_studies.running import Run, Runs
from hybrid_studies.tasks import Task

TUNING_SEED = 1000
"""The first of choosing learning rates; reported seeds are 0, 1, 2 and on."""
REACH = 5
"""Doublings or halvings that a grid may be extended by."""
Readout = Literal["now", "bank", "lawa", "chosen"]
"""`chosen`: among as many as the library has, by itself."""
CHOICES = 3
"""What is trained, and two averages: the read-outs of `nc.hybrid`. Runs of before it chose by
batches have looked at the whole selection part with each."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table: a method and how its weights are read out."""

    label: str
    way: Way
    readout: Readout = "now"
    centre: float = 1.0
    """Where its grid begins, in learning rates of tuned cosine."""
    shares: tuple[float, ...] = ()
    """Budgets beside N, for the steps it needs to reach cosine's loss."""


COSINE = Way(name="cosine")
STRETCHED = Way(name="A", stretch=1.4)
AVERAGED = {"share": 0.05, "pull": 0.9}
PRIMAL = Way(name="B without momentum", kind="primal", constants=AVERAGED)
BOTH = Way(name="A+B without momentum", kind="primal", stretch=1.4, constants=AVERAGED)
# What was run first: Adam's own momentum stayed on inside of the averaging.
PRIMAL_FIRST = Way(name="B", kind="primal", constants=AVERAGED | {"momentum": 0.9})
BOTH_FIRST = Way(name="A+B", kind="primal", stretch=1.4, constants=AVERAGED | {"momentum": 0.9})
LINEAR, WSD, CONSTANT = (
    Way(name="linear", schedule="linear"),
    Way(name="wsd", schedule="wsd"),
    Way(name="constant", schedule="constant"),
)
BASE = Row(label="cosine", way=COSINE)
OURS = (
    Row(label="A: stretched cosine, bank", way=STRETCHED, readout="bank"),
    Row(label="B: primal averaging, cosine", way=PRIMAL),
    Row(label="A + B, bank", way=BOTH, readout="bank", shares=(0.75,)),
)
LIBRARY = tuple(
    Row(label=f"narrowcast {preset}", readout="chosen",
        way=Way(name=f"narrowcast {preset}", kind="library", stretch=1.4,
                constants={"preset": preset}))
    for preset in ("conservative", "balanced")
)  # fmt: skip
# As it came first, after plain steps: what these cost.
WARMED_UP = Row(
    label="narrowcast balanced, after 100 plain steps", readout="chosen",
    way=Way(name="narrowcast balanced, warmed up", kind="library", stretch=1.4,
            constants={"preset": "balanced", "lookahead": nc.Lookahead(begins_after=100)}),
)  # fmt: skip
# With a tenth of the work for rejected predictions: the default allows none in runs this short.
PREDICTING = Row(
    label="narrowcast aggressive", readout="chosen",
    way=Way(name="narrowcast aggressive", kind="library", stretch=1.4,
            constants={"preset": "aggressive", "jumps": {"budget": 0.1}}),
)  # fmt: skip
STANDARD = (
    Row(label="cosine + EMA bank", way=COSINE, readout="bank"),
    Row(label="linear", way=LINEAR),
    Row(label="linear + EMA bank", way=LINEAR, readout="bank"),
    Row(label="WSD (.2)", way=WSD),
    Row(label="WSD (.2) + EMA bank", way=WSD, readout="bank"),
    Row(label="schedule-free",
        way=Way(name="schedule-free", schedule="constant", kind="schedule-free"), centre=2.0),
    Row(label="constant", way=CONSTANT),
    Row(label="constant + EMA bank", way=CONSTANT, readout="bank"),
    Row(label="constant + LAWA", way=CONSTANT, readout="lawa"),
    Row(label="Lookahead (Zhang), cosine", way=Way(name="lookahead", kind="lookahead"),
        centre=2.0),
    Row(label="line-fit jumps, verified", way=Way(name="jumps", kind="jumps")),
)  # fmt: skip
FIRST = (
    Row(label="B with Adam's momentum on", way=PRIMAL_FIRST, centre=2.0),
    Row(label="A + B with Adam's momentum on", way=BOTH_FIRST, readout="bank", centre=2.0),
)
ROWS = (BASE, *OURS, *LIBRARY, PREDICTING, WARMED_UP, *STANDARD, *FIRST)


def read(row: Row, marks: dict[str, list[float]], *, at: int) -> float:
    """Return a row's loss on the selection (0) or report (1) part; a bank is chosen on the former.

    The bank holds the weights as they are as well, so that it can only do worse by chance.
    """
    if row.readout != "bank":
        return marks["now" if row.readout == "chosen" else row.readout][at]
    entries = [marks[name] for name in ("now", *(f"ema{each:g}" for each in HALF_LIVES))]
    return min(entries, key=lambda each: each[0])[at]


def cost(row: Row, task: Task, result: dict[str, Any], *, mark: str = "end") -> float:
    """Return the step-equivalents of a run up to a mark, with what choosing there costs.

    A method that chooses by itself says what it has looked at; one that does not has looked at all.
    """
    spent = float(result["spent"])
    if mark != "end":
        spent += (float(mark) - 1) * result["steps"]
    if "chosen_for" in result:
        # A run that was given up has chosen nothing.
        return spent + float(result["chosen_for"].get(mark, 0.0))
    looks = {"bank": 1 + len(HALF_LIVES), "chosen": CHOICES}.get(row.readout, 0)
    return spent + looks * task.selection_steps()


def tuned(
    runs: Runs, task: Task, row: Row, *, centre: float, share: float = 1.0, factor: float = 2.0
) -> float:
    """Return the learning rate that does best on the selection part with tuning seeds."""

    def score(powers: Iterable[int]) -> dict[int, float]:
        wanted = {
            power: [Run(task=task.name, way=row.way, lr=centre * factor**power,
                        seed=TUNING_SEED + each, share=share, reported=False)
                    for each in range(task.tuning_seeds)]
            for power in powers
        }  # fmt: skip
        runs.all(task, [run for each in wanted.values() for run in each])
        means = {
            power: sum(read(row, runs.done[run.key]["marks"]["end"], at=0) for run in each)
            for power, each in wanted.items()
        }
        return {power: mean if math.isfinite(mean) else math.inf for power, mean in means.items()}

    return centre * factor ** descend(score)


def descend(score: Callable[[Iterable[int]], dict[int, float]]) -> int:
    """Return the best of the powers around 0, looking further while the best is at an edge."""
    scores = score((-1, 0, 1))
    while True:
        best = min(scores, key=lambda power: scores[power])
        new = {best - 1, best + 1} - set(scores)
        if not new or abs(best) >= REACH:
            return best
        scores |= score(new)


def baseline(runs: Runs, task: Task) -> dict[float, float]:
    """Return the tuned learning rate of cosine for every budget.

    Tuned at N in steps of two and then of a root of two, at the ends of the grid in steps of a
    root of two; between them, the geometric mean. Where that is too dear, at N in steps of two.
    """
    root = math.sqrt(2)
    coarse = tuned(runs, task, BASE, centre=task.lr)
    if not task.refined:
        return dict.fromkeys(task.budgets, coarse)
    middle = tuned(runs, task, BASE, centre=coarse, factor=root)
    low, high = (
        tuned(runs, task, BASE, centre=middle, share=share, factor=root)
        for share in (task.budgets[0], task.budgets[-1])
    )
    between = {0.5: low, 0.7: math.sqrt(low * middle), 1.4: math.sqrt(middle * high), 1.7: high}
    return {share: between.get(share, middle) for share in task.budgets}


def curve(runs: Runs, task: Task) -> dict[float, list[dict[str, Any]]]:
    """Return the runs of tuned cosine by budget, one for each reported seed."""
    return by_share(runs, task, COSINE, baseline(runs, task))


def reported(runs: Runs, task: Task, row: Row) -> dict[float, list[dict[str, Any]]]:
    """Return the runs of a row by budget, one for each reported seed; its rate is tuned at N."""
    middle = baseline(runs, task)[1.0]
    # The verified jumps ride on tuned cosine.
    still = row.way.kind == "jumps" or row is BASE
    rate = middle if still else tuned(runs, task, row, centre=row.centre * middle)
    return by_share(runs, task, row.way, dict.fromkeys((1.0, *row.shares), rate))


def by_share(
    runs: Runs, task: Task, way: Way, rates: dict[float, float]
) -> dict[float, list[dict[str, Any]]]:
    """Return the runs of the reported seeds, each budget at its rate."""
    wanted = {
        share: [Run(task=task.name, way=way, lr=rate, seed=seed, share=share)
                for seed in range(task.seeds)]
        for share, rate in rates.items()
    }  # fmt: skip
    runs.all(task, [run for each in wanted.values() for run in each])
    return {share: [runs.done[run.key] for run in each] for share, each in wanted.items()}
