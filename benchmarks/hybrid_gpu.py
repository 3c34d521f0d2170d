"""Hybrid training on a GPU: what `nc.hybrid` saves against tuned cosine, on models of 11M and 124M.

Run: python benchmarks/hybrid_gpu.py --data DIR --prepare OUT       writes what a GPU machine needs
     python benchmarks/hybrid_gpu.py --data OUT --json JSON [--minutes 7] [--jobs 5]
     python benchmarks/hybrid_gpu.py --data OUT --json JSON --table  trains nothing
     python benchmarks/hybrid_gpu.py --data DIR --json JSON --quick  tiny models, on a CPU

The protocol is that of benchmarks/hybrid.py in short: cosine with .7 to 1.4 N steps, each method's
learning rate tuned at N in steps of two with a seed that is not reported, 3 reported seeds. First
cosine and the two presets on both models, and one pair with the 5000 steps of nanoGPT's README
(best validation loss 1.4697), then linear and schedule-free. What is finished is in the JSON,
whenever it is stopped, and a later call goes on from there.
"""

import argparse
import functools
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from hybrid_studies.gpu_tasks import GPU_TASKS, write_data
from hybrid_studies.methods import Way
from hybrid_studies.plan import BASE, LIBRARY, STANDARD, TUNING_SEED, Row, curve, reported
from hybrid_studies.running import Run, Runs
from hybrid_studies.tasks import Task
from hybrid_studies.workers import Workers

Question = Callable[[Runs], object]
COMPARED = ("nano-gpt", "gpt-124m")
PUBLISHED = 1.4697
"""The best validation loss in nanoGPT's README: of 200 batches of 64 windows, every 250 steps."""
SECOND = tuple(row for row in STANDARD if row.label in ("linear", "schedule-free"))
COSINE_5000 = Way(name="cosine to a tenth", floor=0.1)
BALANCED_5000 = Way(name="narrowcast balanced to a tenth", floor=0.1, stretch=1.4, kind="library",
                    constants=LIBRARY[1].way.constants)  # fmt: skip


def questions(task: Task, rows: tuple[Row, ...]) -> list[Question]:
    """Return what is asked of a task; grids are asked for before cosine's best rate is known."""
    grids = [functools.partial(grid, task=task, row=row) for row in (BASE, *rows)]
    told = [functools.partial(reported, task=task, row=row) for row in rows]
    return [*grids, functools.partial(curve, task=task), *told]


def grid(runs: Runs, task: Task, row: Row) -> None:
    """Ask for the learning rates around that which the task begins with."""
    runs.all(task, [Run(task=task.name, way=row.way, lr=row.centre * task.lr * 2.0**power,
                        seed=TUNING_SEED, reported=False) for power in (-1, 0, 1)])  # fmt: skip


def pair(runs: Runs, task: Task, short: Task) -> list[dict[str, Any]]:
    """Return cosine at the published rate, and balanced at the one that was best for the short."""
    rate = reported(runs, short, LIBRARY[1])[1.0][0]["lr"]
    return runs.all(task, [
        Run(task=task.name, way=COSINE_5000, lr=task.lr, seed=0),
        Run(task=task.name, way=BALANCED_5000, lr=rate, seed=0),
    ])  # fmt: skip


def pair_table(found: list[dict[str, Any]]) -> str:
    """Return the losses of the pair: at the mark that the selection part likes best, and last."""
    lines = ["| method | lr | best (step) | last | nanoGPT |", "|---" * 5 + "|"]
    for each in found:
        marks = {1.0 if name == "end" else float(name): mark["now"]
                 for name, mark in each["marks"].items()}  # fmt: skip
        best = min(marks, key=lambda share: marks[share][0])
        lines.append(
            f"| {each['way']} | {each['lr']:.2g} | {marks[best][1]:.4f} "
            f"({round(best * each['steps'])}) | {marks[1.0][1]:.4f} | {PUBLISHED} |"
        )
    return "\n".join(lines)


def tell(runs: Runs, tasks: dict[str, Task]) -> None:
    """Print the tables of what is finished, and write the summary down."""
    if find_spec("scipy") is None:
        print("no tables without scipy; --table tells them elsewhere")
        return
    from hybrid_studies.summary import summary
    from hybrid_studies.tables import markdown

    runs.until = 0.0
    found = summary(runs, [tasks[name] for name in COMPARED])
    runs.write(tasks=list(COMPARED), summary=found)
    print("\n" + markdown(found))
    try:
        both = pair(runs, tasks["nano-gpt-5000"], tasks["nano-gpt"])
    except TimeoutError:
        return
    print("\nWith the published number of steps.\n\n" + pair_table(both))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--prepare", type=Path, metavar="OUT")
    parser.add_argument("--minutes", type=float, default=7.0)
    parser.add_argument("--jobs", type=int, default=5, help="runs at once")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--table", action="store_true", help="train nothing")
    parser.add_argument("--quick", action="store_true", help="tiny models, on a CPU")
    args = parser.parse_args()
    if args.prepare:
        write_data(args.data, args.prepare)
        return
    if args.json is None:
        parser.error("--json says where runs are kept")
    torch.set_num_threads(1)
    # This process only plans and tells: it has the tasks on the CPU, whatever the workers have.
    tasks = {name: make(args.data, quick=args.quick, seeds=args.seeds, device="cpu")
             for name, make in GPU_TASKS.items()}  # fmt: skip
    runs = Runs(args.json, minutes=args.minutes)
    if not args.table:
        second = tuple(row for row in SECOND
                       if row.way.kind != "schedule-free" or find_spec("schedulefree"))  # fmt: skip
        both = functools.partial(pair, task=tasks["nano-gpt-5000"], short=tasks["nano-gpt"])
        first = [each for name in COMPARED for each in questions(tasks[name], LIBRARY)]
        workers = Workers(args.jobs, data=args.data, quick=args.quick)
        try:
            workers.answer(runs, [*first, both])
            workers.answer(runs, [each for name in COMPARED
                                  for each in questions(tasks[name], second)])  # fmt: skip
        except TimeoutError:
            print("the time is over; call again to go on")
        finally:
            workers.close()
    tell(runs, tasks)


if __name__ == "__main__":
    main()
