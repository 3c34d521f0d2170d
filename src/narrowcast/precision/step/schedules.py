"""Learning-rate schedules: those that move with every applied step, and those that wait for news.

A `ReduceLROnPlateau` moves by a metric, which only the user knows: it is handed over by
`Prepared.plateau`, and a step leaves it alone.
"""

from collections.abc import Sequence
from typing import Any, Protocol, final

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from narrowcast.errors import RecipeError, UnsupportedError
from narrowcast.precision.step.checks import needed_arguments
from narrowcast.precision.weights.side_by_side import parts_of


class Scheduler(Protocol):
    """What is asked of a learning-rate schedule: torch's have it."""

    def step(self) -> None:
        """Move on by one applied step."""

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to go on."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""


AnyScheduler = Scheduler | ReduceLROnPlateau


@final
class Schedules:
    """The schedules of a run, in the order in which they were given; often one, or none."""

    def __init__(
        self,
        given: AnyScheduler | Sequence[AnyScheduler] | None,
        *,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        if given is None:
            given = ()
        self.all: tuple[Any, ...] = tuple(given) if isinstance(given, Sequence) else (given,)
        for scheduler in self.all:
            _refuse_foreign(scheduler, (optimizer, *parts_of(optimizer)))
            _refuse_arguments(scheduler)
        self._plateaus = [each for each in self.all if isinstance(each, ReduceLROnPlateau)]
        self._stepped = [each for each in self.all if not isinstance(each, ReduceLROnPlateau)]

    def step(self) -> None:
        """Move on by one applied step."""
        for scheduler in self._stepped:
            scheduler.step()

    def plateau(self, value: float) -> None:
        """Give the schedules that wait for it a metric."""
        if not self._plateaus:
            raise RecipeError(
                "plateau() has no schedule to give its number to; write "
                "prepare(…, scheduler=ReduceLROnPlateau(optimizer))"
            )
        for scheduler in self._plateaus:
            scheduler.step(value)

    def state_dict(self) -> list[dict[str, Any]]:
        """Return what each needs to go on."""
        return [{"class": type(s).__name__, "state": s.state_dict()} for s in self.all]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """Go on from there."""
        for scheduler, saved in zip(self.all, state, strict=True):
            scheduler.load_state_dict(saved["state"])


def _refuse_foreign(scheduler: Any, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuse a schedule of an optimizer that nobody steps."""
    theirs = getattr(scheduler, "optimizer", None)
    if isinstance(theirs, torch.optim.Optimizer) and not any(theirs is o for o in optimizers):
        raise RecipeError(
            f"the {type(scheduler).__name__} sets the learning rate of another "
            f"{type(theirs).__name__} than prepare() was given; make it of the same optimizer"
        )


def _refuse_arguments(scheduler: Any) -> None:
    """Refuse a schedule that moves by something a step does not know."""
    if isinstance(scheduler, ReduceLROnPlateau):
        return
    step = getattr(scheduler, "step", None)
    if not callable(step):
        raise RecipeError(
            f"scheduler={type(scheduler).__name__} has no step(); give a learning-rate schedule, "
            "or a list of them"
        )
    needed = needed_arguments(step)
    if needed:
        raise UnsupportedError(
            f"step() of {type(scheduler).__name__} needs `{needed[0]}`, which a training step does "
            "not know; leave it out of prepare(), and call its step() yourself after run.step()"
        )
