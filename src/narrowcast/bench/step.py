"""A worker's side of `bench step`: builds a contender, then times its training steps."""

import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, final

import torch

from narrowcast.bench.contenders import Contender
from narrowcast.bench.model import recipe_device, set_up
from narrowcast.bench.peers import BUILDERS, Trial
from narrowcast.bench.timing import first_step_seconds, held_bytes, reset_peak, step_seconds
from narrowcast.config.sections import Recipe
from narrowcast.hardware.profile import peak_bytes
from narrowcast.workloads import load_recipe

WARM_UP_STEPS = 3
"""After the first: a compiler may compile once more at the second, and clocks need a moment."""
SETTLING_STEPS = 2
"""Untimed steps before each turn: the allocator takes its memory back, clocks rise."""


def subject(job: Mapping[str, Any]) -> "StepSubject":
    """Return what a worker measures."""
    recipe = load_recipe(job["recipe"], job["overrides"]).recipe
    return StepSubject(recipe, Contender(**job["contender"]))


@final
class StepSubject:
    """Times the training step of one contender."""

    def __init__(self, recipe: Recipe, contender: Contender) -> None:
        self._recipe, self._contender = recipe, contender
        self._device = recipe_device(recipe)
        self._trial: Trial | None = None
        self._work: Mapping[str, float] = {}

    def ready(self) -> dict[str, Any]:
        """Build the step and take the first ones, which compile."""
        begin = time.perf_counter()
        torch.manual_seed(self._recipe.seed)
        bench = set_up(self._recipe)
        trial = BUILDERS[self._contender.kind](bench, **self._contender.options)
        self._trial, self._work = trial, bench.work
        built = time.perf_counter()
        first = first_step_seconds(trial.step, device=self._device)
        _repeat(trial, WARM_UP_STEPS)
        return {
            "build_seconds": built - begin,
            "first_step_seconds": first,
            "warm_up_seconds": time.perf_counter() - built - first,
            "peak_bytes": peak_bytes(self._device),
            "held_bytes": held_bytes(self._device),
            "version": _version(self._contender.distribution),
            **trial.about,
        }

    def measure(self, request: Mapping[str, Any]) -> dict[str, Any]:
        trial = self._trial
        assert trial is not None
        _repeat(trial, SETTLING_STEPS)
        if not trial.is_captured():
            reset_peak(self._device)
        return {
            "seconds": step_seconds(trial.step, request["steps"], device=self._device),
            "peak_bytes": peak_bytes(self._device),
            "work": dict(self._work),
            "loss": trial.loss(),
            "held_bytes": held_bytes(self._device),
        }


def _repeat(trial: Trial, count: int) -> None:
    for _ in range(count):
        trial.step()


def _version(distribution: str) -> str | None:
    """Return the version of a peer; ours and torch's are in the environment."""
    if not distribution:
        return None
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
