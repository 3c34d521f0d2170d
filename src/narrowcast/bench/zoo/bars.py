"""What is asked of the figures, and whether they have it.

A speed is the milliseconds of whom it is against over those of the row: 1.25 is a quarter faster.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from narrowcast.bench.zoo.ways import AMP, BF16, BF16_SPLIT, FP8_SPLIT, LIGER, TORCHAO, WAYS

Row = Mapping[str, Any]

NEVER_SLOWER, RESNET_NEVER_SLOWER, FP8_NEVER_SLOWER = 0.99, 1.00, 0.98
FIRST_STEP = 1.15
LLAMA, LLAMA_LARGE, VIT, RESNET = "llama-348m", "llama-1.3b", "vit-l", "resnet-50"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One thing that is asked of one row, and what was found."""

    what: str
    found: float
    bar: float
    at_most: bool = False

    @property
    def holds(self) -> bool:
        """Whether it is so."""
        return self.found <= self.bar if self.at_most else self.found >= self.bar

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        bar = f"{'≤' if self.at_most else '≥'} {self.bar:.2f}"
        return {"what": self.what, "found": self.found, "bar": bar, "holds": self.holds}


def counterpart(row: Row) -> tuple[str, str]:
    """Return the way and mode that a row's ratio is against: torch's mixed precision.

    A graph is what an eager loop becomes, so it is against the eager one.
    """
    return AMP, "eager" if row["mode"] == "graphed" else row["mode"]


def speed_against_amp(row: Row, rows: Sequence[Row]) -> float | None:
    """Return how many times as fast as torch's mixed precision of the same mode a row is."""
    way, mode = counterpart(row)
    theirs = _Of(row["model"], rows).one(way, mode)
    return None if theirs is None or row["failure"] else float(theirs["ms"] / row["ms"])


def set_up_alone(row: Row) -> bool:
    """Say whether nothing else compiled beside a row: only such first steps can be compared."""
    return bool(row.get("together", 1) == 1)  # rows of older files were all alone


def verdicts(rows: Sequence[Row], *, cold: bool = True) -> list[Verdict]:
    """Return what can be said of the rows there are, in the order of the models.

    First steps are only judged where compiler caches began empty, of rows that were set up alone.
    """
    judged = [row for row in rows if not row["failure"]]
    found: list[Verdict] = []
    for model in dict.fromkeys(row["model"] for row in judged):
        of = _Of(model, judged)
        found += [*_never_slower(of), *_fp8_never_slower(of)]
        found += _first_steps(of) if cold else ()
        for name, its_bars in _BARS.items():
            found += its_bars(of) if name == model else ()
    return found


class _Of:
    """The rows of one model."""

    def __init__(self, model: str, rows: Sequence[Row]) -> None:
        self.model = model
        self.rows = [row for row in rows if row["model"] == model and not row["failure"]]

    def one(self, way: str, mode: str) -> Row | None:
        """Return the row of a way in a mode, if it is there."""
        return next((r for r in self.rows if (r["way"], r["mode"]) == (way, mode)), None)

    def best(self, way: str) -> Row | None:
        """Return the fastest row of a way, in whatever mode."""
        return min((r for r in self.rows if r["way"] == way), key=lambda r: r["ms"], default=None)

    def speed(self, mine: Row | None, theirs: Row | None, *, bar: float) -> Iterator[Verdict]:
        """Say whether one row is fast enough against another; nothing where one is missing."""
        if mine is not None and theirs is not None:
            what = f"{self.model}: {_named(mine)} against {_named(theirs)}"
            yield Verdict(what=what, found=theirs["ms"] / mine["ms"], bar=bar)


def _never_slower(of: _Of) -> Iterator[Verdict]:
    bar = RESNET_NEVER_SLOWER if of.model == RESNET else NEVER_SLOWER
    for way in (BF16, BF16_SPLIT):
        for mode in ("eager", "compiled"):
            yield from of.speed(of.one(way, mode), of.one(AMP, mode), bar=bar)


def _fp8_never_slower(of: _Of) -> Iterator[Verdict]:
    for row in of.rows:
        if "fp8" in WAYS[row["way"]].policy:
            yield from of.speed(row, of.one(BF16_SPLIT, row["mode"]), bar=FP8_NEVER_SLOWER)


def _first_steps(of: _Of) -> Iterator[Verdict]:
    theirs = of.one(AMP, "compiled")
    if theirs is None or not set_up_alone(theirs):
        return
    for row in of.rows:
        ours = row["mode"] == "compiled" and WAYS[row["way"]].kind == "ours"
        if ours and set_up_alone(row):
            yield Verdict(
                what=f"{of.model}: first step of {_named(row)} against {_named(theirs)}",
                found=row["first_step_seconds"] / theirs["first_step_seconds"],
                bar=FIRST_STEP,
                at_most=True,
            )


def _of_llama(of: _Of) -> Iterator[Verdict]:
    mine, liger, compiled = of.best(BF16_SPLIT), of.best(LIGER), of.one(AMP, "compiled")
    yield from of.speed(mine, liger, bar=1.15)
    yield from of.speed(mine, compiled, bar=1.15)
    if mine is not None and liger is not None:
        yield Verdict(
            what=f"{of.model}: memory of {_named(mine)} against {_named(liger)}",
            found=mine["peak_bytes"] / liger["peak_bytes"],
            bar=1.0,
            at_most=True,
        )
    better = min((r for r in (liger, compiled) if r), key=lambda r: r["ms"], default=None)
    yield from of.speed(of.best(FP8_SPLIT), better, bar=1.25)


def _of_large_llama(of: _Of) -> Iterator[Verdict]:
    yield from of.speed(of.best(FP8_SPLIT), of.one(AMP, "compiled"), bar=1.35)
    yield from of.speed(of.best(FP8_SPLIT), of.best(TORCHAO), bar=1.15)


def _of_vit(of: _Of) -> Iterator[Verdict]:
    mine = [r for r in of.rows if WAYS[r["way"]].kind == "ours"]
    for mode, bar in (("eager", 1.10), ("graphed", 1.25)):
        best = min((r for r in mine if r["mode"] == mode), key=lambda r: r["ms"], default=None)
        yield from of.speed(best, of.one(AMP, "eager"), bar=bar)


_BARS: Mapping[str, Callable[[_Of], Iterator[Verdict]]] = {
    LLAMA: _of_llama,
    LLAMA_LARGE: _of_large_llama,
    VIT: _of_vit,
}
"""Of single models, beside those of all."""


def _named(row: Row) -> str:
    return f"{row['way']}, {row['mode']}"
