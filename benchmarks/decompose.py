"""Stochastic parameter decomposition: narrowcast and a plain eager reference, in one run.

Run: python benchmarks/decompose.py [--device D] [--only SECTION ...] [--quick] [--rounds N]
                                    [--json PATH] [--keep FOLDER] [--words KEY=VALUE ...]
                                    [--model FOLDER --text FILE] [--rate STEPS]

Sections: `toys` (steps a second of TMS 5-2 and a residual MLP: the reference, one seed, eight
seeds at once), `language` (a language model of 4 layers: steps a second and peak memory), `terms`
(the terms of both losses under equal components, importances and masks), and S4, S6, S7, S8: toys
trained in full and held against what is known of them, `stories` (a matrix of a published language
model: --model FOLDER --text FILE) and `gpt` (of one that is trained first: --text FILE). Without
--only: the first three. What is done is in the file of --json at once, and so are evaluations of a
section that has not ended; it stays there when others are run again. A study that is ended goes on
where it was when the same command is given again, if that has a --keep.

The reference is `decompose_reference/`: forward hooks registered and removed on every call, a
delta materialised on every step, bf16 autocast, one pass a site, `.item()` of every loss. Of a toy
it is timed without autocast as well, which is told beside it. Both sides take turns, --rounds times
each, and the median counts. --words are settings of narrowcast's recipes.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from decompose_reference import measuring
from decompose_reference.cases import SMALL, Case, Size, language_case, toy_cases
from decompose_reference.kept import Figures
from decompose_reference.measuring import Measured, median
from narrowcast.errors import Interrupted
from narrowcast.runs import describe_machine

TOY_FASTER = {"cuda": 8.0, "cpu": 2.0}
"""Times the reference's steps a second that are asked for."""
EIGHT_SEEDS = 1.5
"""Times as long as one seed, at most (GPU)."""
LANGUAGE_FASTER, MEMORY_SHARE = 2.0, 0.7
TERMS_APART = {"bf16": 1e-3, "fp32": 1e-6}
SPEED = ("toys", "language", "terms")
STUDIES = ("S4", "S6", "S7", "S8")
STEPS = {"cuda": (200, 3000), "cpu": (60, 200)}
"""Of a toy: of the reference, and of narrowcast."""


def toys(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Time toys one by one: the reference with autocast and without, one seed and eight."""
    device = torch.device(options.device)
    few, many = (max(20, count // options.less) for count in STEPS[device.type])
    kinds = (toy_cases(device.type, bf16=bf16) for bf16 in (True, False))
    for narrow, wide in zip(*kinds, strict=True):
        if device.type == "cpu" and not narrow.name.startswith("TMS"):
            continue  # eight seeds take half a minute a step there
        ways: dict[str, list[Measured]] = {}
        for _ in range(options.rounds):
            for name, case in (("reference", narrow), ("reference, fp32", wide)):
                found = measuring.reference(case, device=device, steps=few, warm=few // 4)
                ways.setdefault(name, []).append(found)
            for seeds in (1, 8):
                found = measuring.ours(
                    narrow,
                    device=device,
                    steps=many,
                    warm=many // 4,
                    seeds=seeds,
                    words=options.words,
                )
                ways.setdefault(f"narrowcast, {seeds} seed{'s' * (seeds > 1)}", []).append(found)
        yield toy_row(narrow, ways, device.type)


def toy_row(case: Case, ways: dict[str, list[Measured]], kind: str) -> dict[str, Any]:
    """Say how the sides stand to one another, and print it."""
    rates = {name: median(found).rate for name, found in ways.items()}
    plain, wide = rates["reference"], rates["reference, fp32"]
    one, eight = rates["narrowcast, 1 seed"], rates["narrowcast, 8 seeds"]
    faster, longer = one / plain, one / eight
    asked = TOY_FASTER[kind]
    met = faster >= asked and (kind == "cpu" or longer <= EIGHT_SEEDS)
    print(f"\n{case.name} ({case.recipe}, {', '.join(case.words)})")
    print("| way | steps/s | spread |\n|---|---|---|")
    for name, found in ways.items():
        print(f"| {name} | {rates[name]:.1f} | {measuring.spread(found):.0%} |")
    print(
        f"{faster:.2f} × the reference (asked: {asked:g})"
        + f", {one / wide:.2f} × the one without autocast; "
        + f"8 seeds take {longer:.2f} × the time of one"
        + (f" (asked: {EIGHT_SEEDS})" if kind == "cuda" else "")
        + f", {8 * eight / plain:.1f} × the reference by seed."
    )
    return {
        "case": case.name,
        "recipe": case.recipe,
        "words": case.words,
        "ways": {name: [each.told() for each in found] for name, found in ways.items()},
        "faster": round(faster, 3),
        "faster_than_fp32": round(one / wide, 3),
        "eight_seeds_take": round(longer, 3),
        "faster_by_seed": round(8 * eight / plain, 3),
        "met": met,
    }


def language(options: argparse.Namespace, case: Case) -> dict[str, Any]:
    """Time a language model."""
    device = torch.device(options.device)
    few, many = (4, 6) if options.less > 1 or device.type == "cpu" else (12, 40)
    found: dict[str, list[Measured]] = {"reference": [], "narrowcast": []}
    for _ in range(options.rounds):
        found["reference"].append(
            measuring.reference(case, device=device, steps=few, warm=max(2, few // 4))
        )
        found["narrowcast"].append(
            measuring.ours(
                case, device=device, steps=many, warm=max(3, many // 4), words=options.words
            )
        )
    plain, own = median(found["reference"]), median(found["narrowcast"])
    faster = own.rate / plain.rate
    share = own.peak_bytes / plain.peak_bytes if plain.peak_bytes else None
    print(f"\n{case.name}")
    print("| way | steps/s | spread | peak MiB |\n|---|---|---|---|")
    for name, each in (("reference", plain), ("narrowcast", own)):
        apart = measuring.spread(found[name])
        print(f"| {name} | {each.rate:.3f} | {apart:.0%} | {each.peak_bytes / 2**20:.0f} |")
    said = "" if share is None else f", {share:.0%} of the memory (asked: {MEMORY_SHARE:.0%})"
    print(f"{faster:.2f} × the reference (asked: {LANGUAGE_FASTER:g}){said}.")
    return {
        "case": case.name,
        "words": [word for word in case.words if "/" not in word],
        "ways": {name: [each.told() for each in all_] for name, all_ in found.items()},
        "faster": round(faster, 3),
        "memory_share": None if share is None else round(share, 3),
        "met": faster >= LANGUAGE_FASTER and (share is None or share <= MEMORY_SHARE),
    }


def side_by_side(options: argparse.Namespace, cases: list[Case]) -> list[dict[str, Any]]:
    """Compute terms twice under equal masks."""
    from decompose_reference.side_by_side import terms

    device = torch.device(options.device)
    rows = []
    print("\n| case | format | term | reference | narrowcast | apart | share |")
    print("|---|---|---|---|---|---|---|")
    for case in cases:
        run = case.run(device)
        form = "bf16" if run.settings.bf16 else "fp32"
        run.warm_up(50)
        batch = next(case.batches(device))[: 16 if case.attribute else None]
        for each in terms(run, batch, run.model.target, output=case.attribute):
            within = TERMS_APART[form] * max(1.0, abs(each.reference))
            rows.append({
                "case": case.name, "format": form, "term": each.name, "ours": each.ours,
                "reference": each.reference, "apart": each.apart, "met": each.apart <= within,
            })  # fmt: skip
            print(
                f"| {case.name} | {form} | {each.name} | {each.reference:.6g} | {each.ours:.6g} | "
                f"{each.apart:.1e} | {each.share:.1e} |"
            )
    print("all within what is asked" if all(row["met"] for row in rows) else "NOT within")
    return rows


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, help="cpu or cuda")
    parser.add_argument(
        "--only", nargs="+", choices=[*SPEED, *STUDIES, "stories", "gpt"], default=list(SPEED)
    )
    parser.add_argument("--quick", action="store_true", help="fewer steps, one round")
    parser.add_argument("--rounds", type=int, help="turns that each side takes; 3, or 1")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--keep", type=Path, help="where the run folders of studies stay")
    parser.add_argument("--model", type=Path, help="folder of the language model of `stories`")
    parser.add_argument("--text", type=Path, help="and the text it is shown, or `gpt` learns")
    parser.add_argument("--target", nargs="*", default=[], metavar="KEY=VALUE", help="of `gpt`")
    parser.add_argument("--rate", type=int, metavar="STEPS", help="only time steps of studies")
    parser.add_argument("--words", nargs="*", default=[], metavar="KEY=VALUE", help="settings")
    return parser


def main() -> None:
    options = arguments().parse_args()
    options.less = 5 if options.quick else 1
    options.rounds = options.rounds or (1 if options.quick else 3)
    options.words = tuple(options.words)
    environment = describe_machine()
    figures = Figures(options.json, {"environment": environment, "device": options.device})
    try:
        measure(options, figures)
    except Interrupted as stop:
        raise SystemExit(f"{stop}\nor with the same command, where it had a --keep") from stop


def measure(options: argparse.Namespace, figures: Figures) -> None:
    """Go through the sections; what is known is written at once, since any of them takes long."""
    if "toys" in options.only:
        rows = []
        for row in toys(options):
            rows.append(row)
            figures["toys"] = rows
    if {"language", "terms"} & set(options.only):
        speed_of_language(options, figures)
    for name in ("stories", "gpt"):
        if name in options.only:
            from decompose_reference.stories import print_stories, run_gpt, run_stories

            run = run_stories if name == "stories" else run_gpt
            figures[name] = told = run(options, figures.so_far(name))
            print_stories(told)
    for name in STUDIES:
        if name in options.only:
            study(name, options, figures)


def speed_of_language(options: argparse.Namespace, figures: Figures) -> None:
    """Time a language model, and compare terms of it and of toys."""
    device = torch.device(options.device)
    with tempfile.TemporaryDirectory() as scratch:
        size = Size() if device.type == "cuda" else SMALL
        model = language_case(Path(scratch), size, device=device)
        if "language" in options.only:
            figures["language"] = language(options, model)
        if "terms" in options.only:
            kinds = (toy_cases(device.type, bf16=bf16) for bf16 in (True, False))
            cases = [case for kind in kinds for case in kind]
            figures["terms"] = side_by_side(options, [*cases, model])


def study(name: str, options: argparse.Namespace, figures: Figures) -> None:
    """Train a toy in full, or with --rate time its steps."""
    from decompose_reference.studies import STUDIES as KNOWN
    from decompose_reference.studies import print_study, rate_of, run_study

    given = {"device": options.device, "words": options.words}
    if options.rate:
        figures[f"{name} rate"] = told = rate_of(KNOWN[name], **given, steps=options.rate)
        print(name, json.dumps(told))
        return
    keep = options.keep and options.keep / name
    told = run_study(KNOWN[name], **given, keep=keep, told=figures.so_far(name))
    figures[name] = told
    print_study(name, told)


if __name__ == "__main__":
    main()
