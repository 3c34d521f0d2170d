"""Hybrid predictive training: what a method saves against cosine that is tuned for its budget.

Run: python benchmarks/hybrid.py --data DIR --json OUT [--tasks NAMES] [--rows ours|all]
                                 [--minutes M]
     python benchmarks/hybrid.py --json OUT --data DIR --ablate [--tasks NAMES]
     python benchmarks/hybrid.py --data DIR --json OUT --table

Finished runs are kept in the JSON, and a later call goes on from there: the study can be made in
slices. `--table` trains nothing and tells what is known. `--ablate` tries other constants, and is
refused on tasks that no constant may be chosen on.
"""

import argparse
import sys
from pathlib import Path

import torch

from hybrid_studies.plan import BASE, OURS, STANDARD, curve, reported
from hybrid_studies.running import Runs
from hybrid_studies.tasks import TASKS


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--rows", choices=("base", "ours", "all"), default="all")
    parser.add_argument("--minutes", type=float, default=600.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs = Runs(args.json, minutes=args.minutes)
    rows = {"base": (), "ours": OURS, "all": (*OURS, *STANDARD)}[args.rows]
    try:
        for name in args.tasks.split(","):
            task = TASKS[name](args.data)
            curve(runs, task)
            for row in rows:
                reported(runs, task, row)
    except TimeoutError:
        print("the time is over; call again to go on")


if __name__ == "__main__":
    main()
