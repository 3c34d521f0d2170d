"""Check what this library claims about speed against the rows of `narrowcast bench models`.

Run: python benchmarks/model_claims.py models.json

A speed is the milliseconds of the other row over those of ours: 1.25 is a quarter faster. First
steps are checked only where compiler caches began empty and both rows were set up alone.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowcast.bench.zoo.ways import AMP, BF16, BF16_SPLIT, FP8_SPLIT, LIGER, TORCHAO, WAYS

Row = Mapping[str, Any]

NEVER_SLOWER, RESNET_NEVER_SLOWER, FP8_NEVER_SLOWER = 0.99, 1.00, 0.98
FIRST_STEP = 1.15


@dataclass(frozen=True, kw_only=True)
class Claim:
    what: str
    measured: float
    bar: float
    at_most: bool = False

    @property
    def holds(self) -> bool:
        return self.measured <= self.bar if self.at_most else self.measured >= self.bar


def named(row: Row) -> str:
    return f"{row['way']}, {row['mode']}"


def is_ours(row: Row) -> bool:
    return WAYS[row["way"]].kind == "ours"


def fastest(rows: Sequence[Row | None]) -> Row | None:
    return min((row for row in rows if row), key=lambda row: row["ms"], default=None)


class Rows:
    """The rows of one model that did not fail."""

    def __init__(self, model: str, rows: Sequence[Row]) -> None:
        self.model = model
        self.rows = [row for row in rows if row["model"] == model and not row["failure"]]

    def one(self, way: str, mode: str) -> Row | None:
        return next((r for r in self.rows if (r["way"], r["mode"]) == (way, mode)), None)

    def best(self, way: str) -> Row | None:
        return fastest([row for row in self.rows if row["way"] == way])

    def speed(self, mine: Row | None, theirs: Row | None, bar: float) -> Iterator[Claim]:
        if mine is not None and theirs is not None:
            what = f"{self.model}: {named(mine)} against {named(theirs)}"
            yield Claim(what=what, measured=theirs["ms"] / mine["ms"], bar=bar)

    def at_most(self, what: str, mine: Row, theirs: Row, *, field: str, bar: float) -> Claim:
        return Claim(
            what=f"{self.model}: {what} of {named(mine)} against {named(theirs)}",
            measured=mine[field] / theirs[field],
            bar=bar,
            at_most=True,
        )


def claims(rows: Sequence[Row], *, cold: bool = True) -> list[Claim]:
    """Return the claims that the rows can decide, in the order of the models."""
    models = dict.fromkeys(row["model"] for row in rows if not row["failure"])
    return [claim for model in models for claim in _of_model(Rows(model, rows), cold=cold)]


def _of_model(of: Rows, *, cold: bool) -> Iterator[Claim]:
    bar = RESNET_NEVER_SLOWER if of.model == "resnet-50" else NEVER_SLOWER
    for way in (BF16, BF16_SPLIT):
        for mode in ("eager", "compiled"):
            yield from of.speed(of.one(way, mode), of.one(AMP, mode), bar)
    for row in of.rows:
        if "fp8" in WAYS[row["way"]].policy:
            yield from of.speed(row, of.one(BF16_SPLIT, row["mode"]), FP8_NEVER_SLOWER)
    if cold:
        yield from _first_steps(of)
    match of.model:
        case "llama-348m":
            yield from _small_llama(of)
        case "llama-1.3b":
            yield from of.speed(of.best(FP8_SPLIT), of.one(AMP, "compiled"), 1.35)
            yield from of.speed(of.best(FP8_SPLIT), of.best(TORCHAO), 1.15)
        case "vit-l":
            for mode, bar in (("eager", 1.10), ("graphed", 1.25)):
                mine = fastest([r for r in of.rows if is_ours(r) and r["mode"] == mode])
                yield from of.speed(mine, of.one(AMP, "eager"), bar)


def _first_steps(of: Rows) -> Iterator[Claim]:
    compiled = [r for r in of.rows if r["mode"] == "compiled" and r.get("together", 1) == 1]
    theirs = next((row for row in compiled if row["way"] == AMP), None)
    for row in compiled if theirs else ():
        if is_ours(row):
            yield of.at_most("first step", row, theirs, field="first_step_seconds", bar=FIRST_STEP)


def _small_llama(of: Rows) -> Iterator[Claim]:
    mine, liger, compiled = of.best(BF16_SPLIT), of.best(LIGER), of.one(AMP, "compiled")
    yield from of.speed(mine, liger, 1.15)
    yield from of.speed(mine, compiled, 1.15)
    if mine is not None and liger is not None:
        yield of.at_most("memory", mine, liger, field="peak_bytes", bar=1.0)
    yield from of.speed(of.best(FP8_SPLIT), fastest([liger, compiled]), 1.25)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, help="what `bench models --json` wrote")
    data = json.loads(parser.parse_args().file.read_text())
    if data["quick"]:
        raise SystemExit("these are rows of tiny models, of which nothing is claimed")
    found = claims(data["rows"], cold=data["cold_caches"])
    print("| case | measured | bar | holds |\n|---|---|---|---|")
    for claim in found:
        bar = f"{'≤' if claim.at_most else '≥'} {claim.bar:.2f}"
        answer = "yes" if claim.holds else "no"
        print(f"| {claim.what} | {claim.measured:.3f} | {bar} | {answer} |")
    print(f"{sum(claim.holds for claim in found)} of {len(found)} hold")


if __name__ == "__main__":
    main()
