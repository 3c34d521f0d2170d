"""Toys whose right answer is known, decomposed in full: recipes, and what they must find."""

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decompose_reference.kept import Told, records_of, watched
from narrowcast.runs import EvalRecord, StepRecord
from narrowcast.workloads import load_recipe
from narrowcast.workloads.decompose.report import schema
from narrowcast.workloads.decompose.report.schema import Decomposition, Site


@dataclass(frozen=True, kw_only=True)
class Study:
    """A training, and what each of its seeds is asked for."""

    about: str
    recipe: str
    words: tuple[str, ...]
    right: Callable[[Decomposition, int], list[str]]
    """From what was found and the number of a seed to what is wrong with it."""
    share: float
    """Of the seeds that must be right."""
    unmasked: float = float("inf")
    """The most that the sums of components may be apart from the target, mean over seeds."""


def within(
    value: float | None, low: float, high: float, what: str, *, form: str = ".4g"
) -> list[str]:
    """Return a complaint where a number is missing, or not between two."""
    if value is None:
        return [f"{what} was not measured"]
    return [] if low <= value <= high else [f"{what} {value:{form}}"]


def _tms(found: Decomposition, at: int) -> list[str]:
    wrong = []
    for site in found.sites:
        wrong += within(_of(site.identity_error, at), 0, 0, f"{site.name}: identity error")
        wrong += within(_of(site.cosine, at), 0.999, 1.0001, f"{site.name}: cosine", form=".5f")
        wrong += within(_of(site.norm_ratio, at), 0.98, 1.02, f"{site.name}: norm ratio")
        wrong += within(_of(site.l0, at), 0.15, 0.30, f"{site.name}: L0")
    return wrong


def _tms_40_10(found: Decomposition, at: int) -> list[str]:
    wrong = []
    for site in found.sites:
        wrong += within(_of(site.mean_cosine, at), 0.99, 1.0001, f"{site.name}: mean cosine")
        wrong += within(_of(site.norm_ratio, at), 0.95, 1.06, f"{site.name}: norm ratio")
        wrong += within(_of(site.alive, at), 40, 40, f"{site.name}: alive")
    return wrong


def _tms_identity(found: Decomposition, at: int) -> list[str]:
    wrong = []
    for site in found.sites:
        if site.shape == "dense":
            wrong += within(_of(site.alive, at), 2, 2, f"{site.name}: alive")
        else:
            wrong += within(_of(site.identity_error, at), 0, 0, f"{site.name}: identity error")
    return wrong


def _resid_mlp(found: Decomposition, at: int) -> list[str]:
    wrong = []
    for site in found.sites:
        if site.shape == "dense":
            wrong += within(_of(site.alive, at), 48, 52, f"{site.name}: alive")
        else:
            wrong += within(_of(site.identity_error, at), 0, 2, f"{site.name}: identity error")
    return wrong


def _of(values: Sequence[float | None], at: int) -> float | None:
    return values[at] if at < len(values) else None


STUDIES = {
    "S4": Study(
        about="TMS 5-2, 8 seeds, 10,000 steps of 1,024: 7 of 8 right on both sites",
        recipe="decompose/tms_5-2",
        words=(
            "decomposition.seeds=8",
            "steps=10000",
            "batch_size=1024",
            "eval_tasks.tolerance=0.1",
        ),
        right=_tms,
        share=7 / 8,
        unmasked=1e-5,
    ),
    "S6": Study(
        about="TMS 40-10: mean cosine 0.99, norm ratio 0.95 to 1.06, 40 alive",
        recipe="decompose/tms_40-10",
        words=("steps=10000", "eval_tasks.tolerance=0.2"),
        right=_tms_40_10,
        share=1.0,
    ),
    "S7": Study(
        about="TMS 5-2 with an identity layer: 5 + 5 features, and 2 components between",
        recipe="decompose/tms_5-2-id",
        words=("eval_tasks.tolerance=0.2",),
        right=_tms_identity,
        share=1.0,
    ),
    "S8": Study(
        about="ResidMLP 1, 20,000 steps of 2,048: error of mlp_in at most 2, 50 ± 2 in mlp_out",
        recipe="decompose/resid_mlp1",
        words=("steps=20000", "batch_size=2048", "eval_tasks.tolerance=0.2"),
        right=_resid_mlp,
        share=1.0,
    ),
}


def run_study(
    study: Study, *, device: str, words: Sequence[str], keep: Path | None, told: Told
) -> dict[str, Any]:
    """Train, and hold what was found against what is right; `keep`: where the run folder stays.

    A run that was ended there goes on, and the seconds are then of its rest.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = keep or Path(scratch) / "run"
        settings = [*study.words, f"device={device}", *words]
        began = time.perf_counter()
        run = watched(records_of(study.recipe, settings, folder), told)
        losses, measured = dict[str, float](), dict[str, float]()
        steps = 0
        for record in run:
            if isinstance(record, StepRecord):
                steps, losses = record.step, record.loss_parts
            elif isinstance(record, EvalRecord):
                measured = record.metrics
        seconds = time.perf_counter() - began
        found = schema.read(folder)
    seeds = [
        {
            "seed": seed,
            "wrong": study.right(found, at),
            "sites": {site.name: _numbers(site, at) for site in found.sites},
        }
        for at, seed in enumerate(found.seeds)
    ]
    right = sum(not each["wrong"] for each in seeds)
    return {
        "about": study.about,
        "command": " ".join(["narrowcast train", study.recipe, *settings]),
        "steps": steps,
        "seconds": round(seconds, 1),
        "right": right,
        "met": right >= study.share * len(seeds) and measured["unmasked"] <= study.unmasked,
        "seeds": seeds,
        "losses": losses,
        "measured": measured,
    }


def rate_of(study: Study, *, device: str, words: Sequence[str], steps: int) -> dict[str, Any]:
    """Return what steps of a study take on the processor, and so what all of them would."""
    import narrowcast as nc

    settings = [*study.words, f"device={device}", *words]
    began = ended = 0.0
    asked = load_recipe(study.recipe, settings).recipe.steps
    assert asked is not None
    for record in nc.train(study.recipe, settings):
        if isinstance(record, StepRecord):
            began = time.process_time() if record.step == 2 else began
            if record.step == 2 + steps:
                ended = time.process_time()
                break
    each = (ended - began) / steps
    return {
        "about": study.about,
        "command": " ".join(["narrowcast train", study.recipe, *settings]),
        "step_seconds": round(each, 4),
        "steps": asked,
        "hours": round(each * asked / 3600, 2),
    }


def _numbers(site: Site, at: int) -> dict[str, float | None]:
    names = ("alive", "l0", "identity_error", "cosine", "mean_cosine", "norm_ratio")
    return {name: _of(getattr(site, name), at) for name in names}


def print_study(name: str, told: dict[str, Any]) -> None:
    """Print a table of seeds and sites."""
    print(f"\n{name}: {told['about']}\n{told['command']}")
    print("| seed | site | alive | L0 | identity error | cosine | norm ratio | wrong |")
    print("|---|---|---|---|---|---|---|---|")
    for each in told["seeds"]:
        for site, numbers in each["sites"].items():
            cells = [
                _text(numbers[key], form)
                for key, form in (
                    ("alive", ".0f"),
                    ("l0", ".3f"),
                    ("identity_error", ".0f"),
                    ("cosine", ".5f"),
                    ("norm_ratio", ".4f"),
                )
            ]
            wrong = "; ".join(said for said in each["wrong"] if said.startswith(f"{site}:"))
            print(f"| {each['seed']} | {site} | {' | '.join(cells)} | {wrong} |")
    verdict = "met" if told["met"] else "NOT met"
    print(f"{told['right']} of {len(told['seeds'])} seeds right in {told['seconds']} s: {verdict}.")
    print(json.dumps(told["measured"]))


def _text(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"
