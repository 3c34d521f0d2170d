"""`genomics/classify` with its defaults beside linear baselines, on labelled tasks of many kinds.

Run: python benchmarks/genomics_classify.py --raw DIR --json OUT [--only TEXT] [--seeds 3]
                                            [--minutes 60] [--device cuda] [--most 8000]
                                            [--set KEY=VALUE …]
     python benchmarks/genomics_classify.py --page docs/workloads/genomics-results.md --from OUT

A row is one task with one seed. Each is in the JSON as soon as it is there, and a row that the JSON
already has is not trained again, so that a run goes on where a time limit stopped the last one.
Every row is a run of `narrowcast train genomics/classify` with its defaults; the seed, the files,
the alphabet and the target are all that is set. Numbers, of the baselines too, are those of its
judged.json. `--set` changes a setting, for a JSON of its own. Synthetic tasks are drawn by a fixed
seed. `--most` takes a sample of larger training sets. The settings of the recipe were chosen on the
validation parts of the tasks in CHOSEN_ON.
"""

import argparse
import csv
import gzip
import io
import json
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import narrowcast as nc
from narrowcast.runs import describe_machine

Rows = list[tuple[str, str]]
Parts = dict[str, Rows]

CHOSEN_ON = ("prom_core_tata", "splice_uci", "GB1 two_vs_rest", "motif", "spacing", "order")
"""Tasks on whose validation parts the defaults were chosen; all others are only reported."""
GUE = ("prom_core_tata", "prom_core_all", "prom_300_tata")
GB1 = ("one_vs_rest", "two_vs_rest", "three_vs_rest", "low_vs_high", "sampled")
PUBLISHED = {"prom_core_tata": 0.7417, "prom_core_all": 0.6937, "prom_300_tata": 0.7159}
"""MCC of DNABERT-2 (Zhou et al. 2024, table 4)."""
LENGTH, MOTIF = 200, 10
COUNTS = {"train": 3000, "validation": 500, "test": 1500}
MOTIF_SEED, DATA_SEED = 7, 11
TOLERANCE = 0.01
"""How far below the k-mer baseline a task may be."""


def gue(raw: Path, task: str) -> Parts:
    """Return the splits of GUE; the workload leaves out what stands in two of them."""
    names = {"train": "train", "validation": "dev", "test": "test"}
    return {part: _csv(raw / "gue" / task / f"{name}.csv.gz") for part, name in names.items()}


def splice_reconstructed(raw: Path) -> Parts:
    """Return splice sites of GUE, of which there is no training part: dev is learnt."""
    folder = raw / "gue" / "splice_reconstructed"
    return {"train": _csv(folder / "dev.csv.gz"), "test": _csv(folder / "test.csv.gz")}


def splice_uci(raw: Path) -> Parts:
    """Return UCI's junctions; the recipe splits them itself."""
    with (raw / "splice_uci" / "splice.csv").open() as file:
        rows = [(r["sequence"].strip(), r["label"].strip()) for r in csv.DictReader(file)]
    return {"train": rows}


def gb1(raw: Path, split: str) -> Parts:
    """Return a split of FLIP's GB1, whole proteins as they are."""
    parts: Parts = {"train": [], "validation": [], "test": []}
    with zipfile.ZipFile(raw / "flip_gb1" / "splits.zip") as archive:
        text = archive.read(f"splits/{split}.csv").decode()
    for row in csv.DictReader(io.StringIO(text)):
        held = "validation" if row["validation"] == "True" else "train"
        part = "test" if row["set"] == "test" else held
        parts[part].append((row["sequence"], row["target"]))
    return parts


def synthetic(kind: str) -> Callable[[Path], Parts]:
    """Return sequences whose class is decided by one property; both classes share the others."""

    def make(raw: Path) -> Parts:
        motifs = np.random.default_rng([MOTIF_SEED, len(kind)])
        share = 0.95 if kind in ("spacing", "order") else 0.85
        first, second = (_weights(motifs, share) for _ in range(2))
        other = first[motifs.permutation(MOTIF)]
        rng = np.random.default_rng([DATA_SEED, sum(kind.encode())])
        maker = MAKERS[kind]
        return {
            part: [
                (_text(maker(rng, label, first, second, other)), str(label))
                for label in rng.integers(2, size=count).tolist()
            ]
            for part, count in COUNTS.items()
        }

    return make


def _motif(rng: Any, label: int, first: Any, second: Any, other: Any) -> Any:
    """One motif, or its columns in another order, on either strand."""
    bases = _random(rng)
    _put(rng, bases, first if label else other, int(rng.integers(0, LENGTH - MOTIF)), both=True)
    return bases


def _spacing(rng: Any, label: int, first: Any, second: Any, other: Any) -> Any:
    """Two motifs 15 bases apart, or 5 to 39 but not nearly 15."""
    bases, at = _random(rng), int(rng.integers(0, LENGTH - 60))
    gap = 15 if label else int(rng.choice([each for each in range(5, 40) if abs(each - 15) > 2]))
    _put(rng, bases, first, at)
    _put(rng, bases, second, at + MOTIF + gap)
    return bases


def _order(rng: Any, label: int, first: Any, second: Any, other: Any) -> Any:
    """Two motifs, 5 to 39 bases apart, in one order or the other."""
    bases, at = _random(rng), int(rng.integers(0, LENGTH - 60))
    pair = (first, second) if label else (second, first)
    _put(rng, bases, pair[0], at)
    _put(rng, bases, pair[1], at + MOTIF + int(rng.integers(5, 40)))
    return bases


def _count(rng: Any, label: int, first: Any, second: Any, other: Any) -> Any:
    """A motif three to five times, or up to twice, on either strand."""
    bases = _random(rng)
    count = int(rng.integers(3, 6)) if label else int(rng.integers(0, 3))
    for at in rng.choice(LENGTH // 12, count, replace=False) * 12:
        _put(rng, bases, first, int(at), both=True)
    return bases


def _gc(rng: Any, label: int, first: Any, second: Any, other: Any) -> Any:
    """53 or 47 % of G and C."""
    return _random(rng, 0.53 if label else 0.47)


def _period(rng: Any, label: int, first: Any, second: Any, other: Any) -> Any:
    """AA and TT every ten bases, or as many anywhere."""
    bases = _random(rng)
    places = np.arange(int(rng.integers(10)), LENGTH - 2, 10)
    if not label:
        places = rng.choice(LENGTH - 2, len(places), replace=False)
    for at in places:
        if rng.random() < 0.7:
            bases[at : at + 2] = 0 if rng.random() < 0.5 else 3
    return bases


MAKERS: Mapping[str, Any] = {
    "motif": _motif, "spacing": _spacing, "order": _order, "count": _count, "gc": _gc,
    "period": _period,
}  # fmt: skip


def _random(rng: Any, gc: float = 0.45) -> Any:
    return rng.choice(4, LENGTH, p=[(1 - gc) / 2, gc / 2, gc / 2, (1 - gc) / 2])


def _weights(rng: Any, share: float) -> Any:
    table = np.full((MOTIF, 4), (1 - share) / 3)
    table[np.arange(MOTIF), rng.integers(4, size=MOTIF)] = share
    return table


def _put(rng: Any, bases: Any, motif: Any, at: int, *, both: bool = False) -> None:
    drawn = np.array([rng.choice(4, p=column) for column in motif])
    bases[at : at + MOTIF] = 3 - drawn[::-1] if both and rng.integers(2) else drawn


def _text(bases: Any) -> str:
    return "".join("ACGT"[base] for base in bases)


TASKS: Mapping[str, tuple[Callable[[Path], Parts], tuple[str, ...]]] = {
    **{task: ((lambda raw, task=task: gue(raw, task)), ()) for task in GUE},
    "splice_reconstructed": (splice_reconstructed, ()),
    "splice_uci": (splice_uci, ()),
    **{
        f"GB1 {split}": (
            (lambda raw, split=split: gb1(raw, split)),
            ("data.alphabet=protein", "objective.target=value"),
        )
        for split in GB1
    },
    **{kind: (synthetic(kind), ()) for kind in MAKERS},
}
"""Parts of each task, and the settings that describe its data."""


def _csv(path: Path) -> Rows:
    with gzip.open(path, "rt") as file:
        return [(r["sequence"].strip(), r["label"].strip()) for r in csv.DictReader(file)]


def train(task: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Train one row, and return what its judged.json says."""
    make, described = TASKS[task]
    settings = (*described, *args.set)
    parts = make(args.raw)
    sampled = len(parts["train"]) > args.most
    if sampled:
        chosen = np.random.default_rng(0).permutation(len(parts["train"]))[: args.most]
        parts["train"] = [parts["train"][at] for at in np.sort(chosen)]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        words = [f"seed={seed}", f"device={args.device}", *settings]
        for part, rows in parts.items():
            path = Path(folder) / f"{part}.csv"
            with path.open("w", newline="") as file:
                csv.writer(file).writerows([("sequence", "label"), *rows])
            words.append(f"data.{'path' if part == 'train' else part}={path}")
        with nc.train("genomics/classify", words, out=f"{folder}/run") as run:
            for _ in run:
                pass
        judged = json.loads(Path(f"{folder}/run/judged.json").read_text())
        policy = json.loads(Path(f"{folder}/run/plan.json").read_text())["policy"]
    return {
        "task": task,
        "seed": seed,
        "settings": list(settings),
        "sampled": args.most if sampled else None,
        "train": len(parts["train"]),
        "policy": policy,
        "seconds": round(time.monotonic() - began, 1),
        **{part: each["comparison"] for part, each in judged.items()},
    }


def summary(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield one row per task: means over seeds on the test part."""
    for task in TASKS:
        mine = [row for row in rows if row["task"] == task]
        if not mine:
            continue
        metric = mine[0]["test"]["metric"]
        values = np.array([row["test"]["value"] for row in mine])
        by_rival: dict[str, list[float]] = {}
        for row in mine:
            for name, measured in row["test"]["rows"].items():
                kind = "k-mers" if name.startswith("k-mers") else name
                by_rival.setdefault(kind, []).append(measured[metric])
        means = {name: float(np.mean(each)) for name, each in by_rival.items()}
        yield {
            "task": task,
            "metric": metric,
            "seeds": len(mine),
            "train": mine[0]["train"],
            "sampled": mine[0]["sampled"],
            "value": float(values.mean()),
            "deviation": float(values.std(ddof=1)) if len(values) > 1 else None,
            "network": means.get("network alone", means.get("network")),
            "k-mers": means["k-mers"],
            "positions": means.get("letters by position"),
            "verdicts": [row["test"]["verdict"] for row in mine],
            "within": bool(values.mean() >= means["k-mers"] - TOLERANCE),
            "chosen_on": task in CHOSEN_ON,
            "published": PUBLISHED.get(task),
        }


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the summary as a Markdown table, in hundredths."""

    def cell(value: float | None) -> str:
        return "" if value is None else f"{100 * value:.1f}"

    lines = [
        "| task | metric | classify | network alone | k-mers | letters by position | DNABERT-2 "
        "| sequences | seeds | beats the best baseline |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in summary(rows):
        spread = "" if row["deviation"] is None else f" ± {100 * row['deviation']:.1f}"
        beats = sum(each == "beats" for each in row["verdicts"])
        mark = " (chosen on)" if row["chosen_on"] else ""
        lines.append(
            f"| {row['task']}{mark} | {row['metric']} | **{cell(row['value'])}**{spread} "
            f"| {cell(row['network'])} | {cell(row['k-mers'])} | {cell(row['positions'])} "
            f"| {cell(row['published'])} | {row['train']:,}{' of more' if row['sampled'] else ''} "
            f"| {row['seeds']} | {beats} of {row['seeds']} |"
        )
    return lines


def write_page(page: Path, rows: list[dict[str, Any]]) -> None:
    """Replace the table between the marks of the page."""
    text = page.read_text()
    before, _, rest = text.partition("<!-- classify -->\n")
    _, _, after = rest.partition("<!-- /classify -->")
    lines = "\n".join(table(rows))
    page.write_text(f"{before}<!-- classify -->\n{lines}\n<!-- /classify -->{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--raw", type=Path, metavar="DIR")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="", help="tasks whose name has this text in it")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=600.0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--most", type=int, default=8000)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--page", type=Path)
    parser.add_argument("--from", type=Path, dest="finished", metavar="JSON")
    args = parser.parse_args()
    if args.page:
        write_page(args.page, json.loads(args.finished.read_text())["results"])
        return
    known: list[dict[str, Any]] = []
    if args.json and args.json.exists():
        known = json.loads(args.json.read_text())["results"]
    out: dict[str, Any] = {"environment": describe_machine(), "results": known}
    ends = time.monotonic() + 60 * args.minutes
    for seed in range(args.seeds):
        for task in TASKS:
            settings = [*TASKS[task][1], *args.set]
            there = any(
                (row["task"], row["seed"], row["settings"]) == (task, seed, settings)
                for row in known
            )
            if there or args.only not in task or time.monotonic() > ends:
                continue
            row = train(task, seed, args)
            known.append(row | {"commit": out["environment"]["commit"]})
            test = row["test"]
            print(
                f"{task} seed {seed}: {test['verdict']} ({test['best']}), {test['value']:.4f} "
                f"against {test['baseline']:.4f} ({row['seconds']} s)",
                flush=True,
            )
            if args.json:
                out["summary"] = list(summary(known))
                args.json.write_text(json.dumps(out, indent=1) + "\n")
    print("\n".join(table(known)))


if __name__ == "__main__":
    main()
