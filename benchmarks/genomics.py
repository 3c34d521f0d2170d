"""Genomics on real data: every study through the workload itself, beside published results.

Run: python benchmarks/genomics.py --prepare DIR --raw DIR
     python benchmarks/genomics.py --data DIR --choose --json chosen.json [--studies gue,gb1]
     python benchmarks/genomics.py --data DIR --chosen chosen.json --json OUT [--seeds 3]
                                   [--device cuda] [--jobs 12] [--minutes 8] [--only TEXT]
     python benchmarks/genomics.py --data DIR --quick
     python benchmarks/genomics.py --page docs/workloads/genomics-results.md --from A.json B.json

`--prepare` cuts the raw files into what is learnt, judged on and tested, once. `--choose` trains
the candidates of every question with one seed and keeps the one that does best on the part that is
judged on; the tested part is not given to these runs. The last form trains the chosen settings
anew for every seed, fold and precision, each run tested once, when it has ended. Runs are
independent: worker processes take one after the other, many at once on one GPU, and each result is
in the JSON as soon as it is there, so that a time limit loses only what has not ended. Baselines
are computed on the very same parts. `--quick` trains everything for a few steps on a CPU. `--page`
writes the tables of finished runs into the page that shows them.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from genomics_studies.baselines import BASELINES
from genomics_studies.preparing import prepare
from genomics_studies.questions import LOWER_IS_BETTER, QUESTIONS, STUDIES, Question
from genomics_studies.running import Job, job_of, run_all, summary
from genomics_studies.tables import print_table, write_page
from narrowcast.runs import describe_machine

CHOOSING_SEED = 1000
"""The first seed of choosing; not one of those that are reported."""
CHOOSING_FOLDS = 4
"""Of a question with folds, how many candidates are chosen by."""
QUICK = ("epochs=none", "steps=2", "eval.every=0", "batch_size=16", "model.width=16",
         "model.layers=1")  # fmt: skip


def jobs_of(questions: Sequence[Question], args: argparse.Namespace) -> list[Job]:
    """Return every training that is asked for, and every baseline."""
    chosen = json.loads(args.chosen.read_text())["chosen"] if args.chosen else {}
    common: dict[str, Any] = {"data": args.data, "device": args.device}
    jobs = []
    for question in questions:
        first = next(iter(question.candidates))
        if args.choose:
            # In fp32 where precisions are compared: none of them is favoured.
            policy = question.policies[0]
            jobs += [
                job_of(question, candidate=name, policy=policy, seed=CHOOSING_SEED + seed,
                       fold=fold, tested=False, **common)
                for name in question.candidates
                for seed in range(question.choosing_seeds)
                for fold in range(min(question.folds, CHOOSING_FOLDS))
            ]  # fmt: skip
            continue
        candidate = chosen.get(question.name, first)
        jobs += [
            job_of(question, candidate=candidate, policy=policy, seed=seed, fold=fold,
                   tested=True, more=QUICK if args.quick else (), **common)
            for policy in (question.policies[:1] if args.quick else question.policies)
            for seed in range(args.seeds)
            for fold in range(1 if args.quick else question.folds)
        ]  # fmt: skip
        jobs += [
            Job(question=question.name, study=question.study, candidate=name, policy="", seed=0,
                fold=fold, recipe="", settings=(), cost=0, metric=question.metric, baseline=True)
            for name in BASELINES.get(question.name, {})
            for fold in range(1 if args.quick else question.folds)
        ]  # fmt: skip
    return jobs


def best_of(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return the candidate of each question that did best where it was judged."""
    chosen: dict[str, tuple[float, str]] = {}
    for row in rows:
        value = row.get("validation", math.nan)
        better = -value if row["metric"] in LOWER_IS_BETTER else value
        if better > chosen.get(row["question"], (-math.inf, ""))[0]:
            chosen[row["question"]] = (better, row["candidate"])
    return {question: candidate for question, (_, candidate) in chosen.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prepare", type=Path, metavar="DIR")
    parser.add_argument("--raw", type=Path, metavar="DIR")
    parser.add_argument("--data", type=Path, metavar="DIR")
    parser.add_argument("--studies", default=",".join(STUDIES))
    parser.add_argument("--only", default="", help="questions whose name has this text in it")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=600.0)
    parser.add_argument("--choose", action="store_true")
    parser.add_argument("--chosen", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--from", type=Path, nargs="+", dest="finished", metavar="JSON")
    args = parser.parse_args()
    studies = args.studies.split(",")
    if unknown := set(studies) - set(STUDIES):
        parser.error(f"no such study: {', '.join(unknown)}; there are {', '.join(STUDIES)}")
    if args.prepare:
        prepare(args.raw, args.prepare, studies)
        return
    if args.page:
        finished = [json.loads(path.read_text())["results"] for path in args.finished]
        write_page(args.page, list(summary([each for part in finished for each in part])))
        return
    if args.quick:
        args.seeds, args.device = 1, "cpu"
    args.data = args.data.resolve()
    questions = [each for each in QUESTIONS if each.study in studies and args.only in each.name]
    sys.exit(run(questions, args))


def run(questions: Sequence[Question], args: argparse.Namespace) -> int:
    """Train all that is asked for; return 1 where something failed or time was over."""
    jobs = jobs_of(questions, args)
    out: dict[str, Any] = {
        "environment": describe_machine(),
        "command": sys.argv,
        "results": [],
    }
    began = time.monotonic()
    found = run_all(jobs, workers=args.jobs, data=args.data, seconds=args.minutes * 60)
    for number, result in enumerate(found, 1):
        value = result.get("test", result.get("validation", {})).get(result["metric"])
        said = result.get("error") or f"{result['metric']} {value:.4f}"
        name = f"{result['question']} / {result['candidate']} / {result['policy']}"
        print(
            f"[{time.monotonic() - began:5.0f} s] {number}/{len(jobs)} {name} seed {result['seed']}"
            f" fold {result['fold']}: {said} ({result['seconds']} s)",
            flush=True,
        )
        out["results"].append(result)
        rows = out["summary"] = list(summary(out["results"]))
        if args.choose:
            out["chosen"] = best_of(rows)
        if args.json:
            args.json.write_text(json.dumps(out, indent=1) + "\n")
    print_table(out.get("summary", []))
    if args.choose:
        print("\nchosen:", json.dumps(out.get("chosen", {}), indent=1))
    failed = [each for each in out["results"] if "error" in each]
    missing = len(jobs) - len(out["results"])
    print(f"\n{len(out['results'])} runs, {len(failed)} failed, {missing} not ended in time")
    return 1 if failed or missing else 0


if __name__ == "__main__":
    main()
