"""Is a jump accepted as often as was said? Predicted acceptance against observed, over many jumps.

Run: python benchmarks/hybrid_calibration.py [--seeds N] [--steps N] [--json PATH] [--svg PATH]

Trains the tutorial's model by the preset `aggressive` with as many jumps as its phases allow, a
predictor chosen by the bandit, and compares the probability that each jump was given with whether
it was accepted. Prints a table, and draws it.
"""

import argparse
import json
import math
import sys
from pathlib import Path

import narrowcast as nc
from narrowcast.runs import StrategyRecord, describe_machine
from narrowcast.runs.report_drawing import Scale, axes, colour, dots, drawing, line

WORDS = (
    "precision.policy=fp32", "strategy=hybrid", "strategy.preset=aggressive", "health.every=0",
    "strategy.jumps.budget=1.0", "strategy.jumps.rejections=1000000", "eval.every=0",
    "strategy.phases.full_steps=8", "strategy.phases.max_predict_steps=8", "batch_size=16",
    "strategy.phases.confidence_threshold=0.05", "optimizer.lr=1e-3",
)  # fmt: skip
BINS = 5


def jumps(seed: int, steps: int) -> list[tuple[float, bool]]:
    """Return what each jump of a run was given, and whether it was accepted."""
    words = [*WORDS, f"seed={seed}", f"steps={steps}", "strategy.lookahead.enabled=false"]
    return [
        (record.values["confidence"], record.values["accepted"] == 1)
        for record in nc.train("tutorial", words)
        if isinstance(record, StrategyRecord)
        and record.event == "jump"
        and not math.isnan(record.values["gain"])
    ]


def table(found: list[tuple[float, bool]]) -> list[tuple[float, float, int]]:
    """Return the mean of what was said, the share that was accepted, and how many, by class."""
    rows = []
    for number in range(BINS):
        low, high = number / BINS, (number + 1) / BINS
        inside = [(p, a) for p, a in found if low <= p < high or (p == 1 and high == 1)]
        if inside:
            said = sum(p for p, _ in inside) / len(inside)
            rows.append((said, sum(a for _, a in inside) / len(inside), len(inside)))
    return rows


def picture(rows: list[tuple[float, float, int]]) -> str:
    """Draw predicted against observed, with the line on which both are equal."""
    x, y = Scale(0, 1, 60, 400), Scale(0, 1, 340, 30)
    marks = axes(x, y, below="said", beside="accepted")
    marks.append(line(x(0), y(0), x(1), y(1)))
    marks += [
        dots([(x(said), y(seen))], radius=3 + math.sqrt(n), fill=colour(0), opacity=0.6)
        for said, seen, n in rows
    ]
    alt = "; ".join(f"said {said:.2f}, accepted {seen:.2f} of {n}" for said, seen, n in rows)
    return drawing(marks, width=430, height=390, alt=alt, most=430)


def main() -> None:
    """Train, print the table, and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path)
    asked = parser.parse_args()
    found = []
    for seed in range(asked.seeds):
        found += jumps(seed, asked.steps)
        print(f"seed {seed}: {len(found)} jumps so far", file=sys.stderr)
    rows = table(found)
    brier = sum((p - a) ** 2 for p, a in found) / len(found)
    error = sum(n * abs(said - seen) for said, seen, n in rows) / len(found)
    if asked.json is not None:
        environment = describe_machine()
        result = {"environment": environment, "jumps": found, "brier": brier,
                  "expected_calibration_error": error}  # fmt: skip
        asked.json.write_text(json.dumps(result, indent=1) + "\n")
    if asked.svg is not None:
        svg = picture(rows)
        inner = svg[svg.index("<svg") : svg.index("</svg>") + 6]
        plain = inner.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ')
        shades = {"var(--ink)": "#222", "var(--quiet)": "#666", "var(--grid)": "#ddd",
                  "var(--line)": "#bbb", "var(--group0)": "#1f6feb"}  # fmt: skip
        for name, shade in shades.items():
            plain = plain.replace(name, shade)
        asked.svg.write_text(plain + "\n")
    print("| said | accepted | jumps |\n|---|---|---|")
    for said, seen, n in rows:
        print(f"| {said:.2f} | {seen:.2f} | {n} |")
    print(f"Brier score {brier:.3f}, expected calibration error {error:.3f}, {len(found)} jumps")


if __name__ == "__main__":
    main()
