"""Learning-rate schedules: those that move with every applied step, and those that wait for news.

A `ReduceLROnPlateau` moves by a metric, which only the user knows: it is handed over by
`Prepared.scheduler_step`, and a step leaves it alone.

A `scheduler.step()` left over from the loop before `prepare` would move a schedule twice as fast.
While a run holds a schedule, its class is a subclass whose `step()` raises for everybody else.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, final

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.precision.step.checks import needed_arguments
from narrowcast.precision.weights.multi_optimizer import member_optimizers


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
        inputs: AnyScheduler | Sequence[AnyScheduler] | None,
        *,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        if inputs is None:
            inputs = ()
        self.all: tuple[Any, ...] = tuple(inputs) if isinstance(inputs, Sequence) else (inputs,)
        for scheduler in self.all:
            _check_optimizer(scheduler, (optimizer, *member_optimizers(optimizer)))
            _check_arguments(scheduler)
        self._plateaus = [each for each in self.all if isinstance(each, ReduceLROnPlateau)]
        self._stepped = [each for each in self.all if not isinstance(each, ReduceLROnPlateau)]
        self._held: list[tuple[Any, type]] = []
        """The schedules that only the run may step, and the classes they came with."""
        self._moving = False

    def step(self) -> None:
        """Move on by one applied step."""
        with self._own_move():
            for scheduler in self._stepped:
                scheduler.step()

    def hold(self) -> None:
        """Let nobody else step the schedules that move with every applied step."""
        for scheduler in self._stepped:
            self._hold(scheduler, mover="run.step()")

    def release(self) -> None:
        """Let everybody step them again."""
        for scheduler, kind in self._held:
            scheduler.__class__ = kind
        self._held.clear()

    def step_metric(self, value: float) -> None:
        """Give the schedules that wait for it a metric."""
        if not self._plateaus:
            raise ConfigError(
                "scheduler_step() needs a scheduler that takes a metric. Write prepare(…, "
                "scheduler=ReduceLROnPlateau(optimizer))."
            )
        for scheduler in self._plateaus:
            # From now on: whoever only ever steps it directly moves it once, too.
            self._hold(scheduler, mover="run.scheduler_step()")
        with self._own_move():
            for scheduler in self._plateaus:
                scheduler.step(value)

    def state_dict(self) -> list[dict[str, Any]]:
        """Return what each needs to go on."""
        return [{"class": type(s).__name__, "state": s.state_dict()} for s in self.all]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """Go on from there."""
        for scheduler, saved in zip(self.all, state, strict=True):
            scheduler.load_state_dict(saved["state"])

    @contextlib.contextmanager
    def _own_move(self) -> Iterator[None]:
        self._moving = True
        try:
            yield
        finally:
            self._moving = False

    def _hold(self, scheduler: Any, *, mover: str) -> None:
        """Let `step()` of a schedule, and of those it is made of, raise outside of own moves."""
        if any(each is scheduler for each, _ in self._held):
            return
        kind, schedules = type(scheduler), self

        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not schedules._moving:
                raise ConfigError(
                    f"{kind.__name__}.step() was called, but {mover} already steps this scheduler. "
                    "Delete the call, or leave the scheduler out of prepare() and step it yourself."
                )
            return kind.step(self, *args, **kwargs)

        def reduce(self: Any, protocol: Any) -> Any:
            held, self.__class__ = type(self), kind  # a copy is nobody's
            try:
                how, args, *rest = self.__reduce_ex__(protocol)
            finally:
                self.__class__ = held
            # pickle refuses copyreg.__newobj__ for an object of another class.
            return (_make, (kind,), *rest) if args == (kind,) else (how, args, *rest)

        own = {"__slots__": (), "step": step, "__reduce_ex__": reduce, "__doc__": kind.__doc__}
        own |= {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        # Not an attribute of the object: torch saves those in the scheduler's state_dict().
        # Objects of a class that is not written in Python keep theirs (TypeError).
        with contextlib.suppress(TypeError):
            scheduler.__class__ = type(kind.__name__, (kind,), own)
            self._held.append((scheduler, kind))
        for part in getattr(scheduler, "_schedulers", ()):
            self._hold(part, mover=mover)


def _make(kind: Any) -> Any:
    return kind.__new__(kind)


def _check_optimizer(scheduler: Any, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuse a schedule of an optimizer that nobody steps."""
    theirs = getattr(scheduler, "optimizer", None)
    if isinstance(theirs, torch.optim.Optimizer) and not any(theirs is o for o in optimizers):
        raise ConfigError(
            f"The {type(scheduler).__name__} was built for a different {type(theirs).__name__} "
            "than the one passed to prepare(). Build it for the same optimizer."
        )


def _check_arguments(scheduler: Any) -> None:
    """Refuse a schedule that moves by something a step does not know."""
    if isinstance(scheduler, ReduceLROnPlateau):
        return
    step = getattr(scheduler, "step", None)
    if not callable(step):
        raise ConfigError(
            "scheduler must be a learning-rate scheduler or a list of them, got "
            f"{type(scheduler).__name__}, which has no step()."
        )
    needed = needed_arguments(step)
    if needed:
        raise UnsupportedError(
            f"step() of {type(scheduler).__name__} needs `{needed[0]}`, which run.step() cannot "
            "pass. Leave it out of prepare() and call its step() yourself after run.step()."
        )
