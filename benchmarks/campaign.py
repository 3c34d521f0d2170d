"""A hostile campaign against the command line: does anything end without a word, or otherwise?

Run: python benchmarks/campaign.py [--minutes M | --seconds S] [--cases N] [--seed N]
                                   [--only KIND …] [--workers N] [--json PATH] [--keep]

Recipes and policies that nobody would write, data files that are none, kills and signals at any
moment, every file of a run damaged in every way, full disks, lost streams, folders that move, two
writers at once, runs resumed on other data and settings. Each case is drawn from its seed, runs the
command line in processes of its own inside a temporary folder, and ends with one verdict:

- refused well: exit code 2, 3 or 4 with one message, in time, and nothing in the folder has changed
- resumed equal: the run went on, and is bit for bit the run that nothing happened to
- fine: nothing was to be refused or resumed, and what came out is as it should be
- tracebacks, hangs: what their names say; an end by a signal that nobody sent is a traceback too
- silent: exit code 0 and not what was asked for, or an end without a word about why
- lost: a run that can no longer be resumed, or a refusal that changed the folder first

A case that does not hold is printed with its kind and seed, which run it alone. Moments are those
of a running machine, so a kill with the same seed comes a little earlier or later the next time.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from attacks.forks import preload
from attacks.kinds import KINDS
from attacks.schedule import Result, campaign
from attacks.table import failures, kills_resumed, print_failure, print_table, rows_of

MINUTES = 30


def main() -> int:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # with all that it has started
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported; for fresh processes, too
    preload()
    from narrowcast.runs import describe_machine

    environment = describe_machine()
    kinds = options.only or list(KINDS)
    began = time.perf_counter()
    results: list[Result] = []
    with _scratch(keep=options.keep) as scratch:
        for result in campaign(
            kinds,
            seed=options.seed or 0,
            seconds=options.seconds,
            cases=options.cases,
            workers=options.workers,
            scratch=scratch,
            keep=options.keep,
        ):
            results.append(result)
            if failures([result]):
                print_failure(result)
            elif options.verbose:
                print(f"{result.verdict}: {result.kind}, seed {result.seed}: {result.told}")
    seconds = time.perf_counter() - began
    rows = rows_of(results, kinds)
    print_table(rows)
    equal = kills_resumed(results)
    print(f"\n{len(results)} cases in {seconds:.0f} s; {equal} kills resumed bit for bit.")
    if options.json:
        figures = {
            "environment": environment,
            "seed": options.seed or 0,
            "seconds": round(seconds, 1),
            "kills_resumed_equal": equal,
            "rows": rows,
            "failures": [vars(each) for each in failures(results)],
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")
    return 1 if failures(results) else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, help=f"no case begins after them; {MINUTES:g}")
    parser.add_argument("--seconds", type=float, help="the same in seconds")
    parser.add_argument("--cases", type=int, help="at most so many of each kind")
    parser.add_argument("--seed", type=int, help="of the first case of each kind")
    parser.add_argument("--only", action="append", choices=KINDS, metavar="KIND", help="no other")
    parser.add_argument("--workers", type=int, default=2, help="cases at a time")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--verbose", action="store_true", help="print good cases, too")
    parser.add_argument("--keep", action="store_true", help="leave the folders of all cases")
    options = parser.parse_args()
    bounded = options.minutes or options.seconds or options.cases
    if options.only and options.seed is not None and not bounded:
        options.cases = 1  # the case that was printed, and no other
    options.seconds = options.seconds or (options.minutes or MINUTES) * 60
    return options


@contextlib.contextmanager
def _scratch(*, keep: bool) -> Iterator[Path]:
    """Give a folder that is removed at the end, unless it is to be looked at."""
    folder = Path(tempfile.mkdtemp(prefix="campaign-"))
    try:
        yield folder
    finally:
        if keep:
            print(f"left in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
