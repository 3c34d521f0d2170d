"""Hybrid predictive training: what a method saves against cosine that is tuned for its budget.

Run: python benchmarks/hybrid.py --data DIR --json OUT [--tasks NAMES]
                                 [--rows ours|library|predicting|all] [--minutes M]
     python benchmarks/hybrid.py --json OUT --data DIR --ablate [--tasks NAMES]
     python benchmarks/hybrid.py --data DIR --json OUT --table

Finished runs are kept in the JSON, and a later call goes on from there: the study can be made in
slices. `--table` trains nothing and tells what is known. `--ablate` tries other constants, and is
refused on tasks that no constant may be chosen on.
"""

import argparse
import json
from pathlib import Path

import torch

from hybrid_studies.ablations import ablate, table
from hybrid_studies.plan import LIBRARY, OURS, PREDICTING, STANDARD, WARMED_UP, curve, reported
from hybrid_studies.running import Runs
from hybrid_studies.summary import summary
from hybrid_studies.tables import markdown
from hybrid_studies.tasks import CHOSEN_ON, TASKS


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument(
        "--rows",
        choices=("base", "ours", "library", "warmed-up", "predicting", "all"),
        default="all",
    )
    parser.add_argument("--minutes", type=float, default=600.0)
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--table", action="store_true", help="train nothing")
    parser.add_argument(
        "--from",
        type=Path,
        nargs="+",
        default=[],
        dest="others",
        metavar="JSON",
        help="take the finished runs of other slices in",
    )
    parser.add_argument("--ablate", nargs="*", metavar="VARIANT", help="all, if none is named")
    parser.add_argument("--seeds", type=int, default=2, help="of the ablations")
    parser.add_argument(
        "--factors",
        type=float,
        nargs="+",
        default=[0.5, 1.0, 2.0],
        help="on the learning rate, in the ablations",
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs = Runs(args.json, minutes=0 if args.table else args.minutes, jobs=args.jobs)
    for other in args.others:
        runs.done |= json.loads(other.read_text())["runs"]
    rows = {
        "base": (),
        "ours": OURS,
        "library": LIBRARY,
        "warmed-up": (WARMED_UP,),
        "predicting": (PREDICTING,),
        "all": (*OURS, *LIBRARY, *STANDARD),
    }[args.rows]
    names = args.tasks.split(",")
    if args.ablate is not None:
        if closed := set(names) - set(CHOSEN_ON):
            parser.error(f"no constant is chosen on {', '.join(closed)}; --tasks names others")
        for name in names:
            ablation = ablate(
                runs,
                TASKS[name](args.data),
                names=args.ablate,
                seeds=args.seeds,
                factors=args.factors,
            )
            print(f"\n{name}\n\n{table(ablation)}")
        return
    try:
        for name in () if args.table else names:
            task = TASKS[name](args.data)
            curve(runs, task)
            for row in rows:
                reported(runs, task, row)
    except TimeoutError:
        print("the time is over; call again to go on")
    runs.until = 0.0
    totals = summary(runs, [TASKS[name](args.data) for name in names])
    runs.write(tasks=names, summary=totals)
    print("\n" + markdown(totals))


if __name__ == "__main__":
    main()
