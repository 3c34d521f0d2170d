"""The outcome of each step, once the host knows it; applied steps move the learning-rate schedule.

A `scheduler.step()` left over from the loop before `prepare` would move a schedule twice as fast.
While a run holds a schedule, its class is a subclass whose `step()` raises for everybody else.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, final

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from narrowcast.errors import ConfigError, DivergedError, UnsupportedError
from narrowcast.numerics import FP32
from narrowcast.precision.fp8.state import StepCounts
from narrowcast.precision.plan.wording import Wording
from narrowcast.precision.step.checks import needed_arguments
from narrowcast.precision.step.outcome import NO_MODULE, Outcome
from narrowcast.precision.weights.multi_optimizer import member_optimizers
from narrowcast.runs import FindingRecord


class Scheduler(Protocol):
    """What is asked of a learning-rate schedule: torch's have it."""

    def step(self) -> None:
        """Move on by one applied step."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state."""


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
        """Make `step()` of the schedulers raise for everyone else."""
        for scheduler in self._stepped:
            self._hold(scheduler, mover="run.step()")

    def release(self) -> None:
        """Allow everyone to step them again."""
        for scheduler, kind in self._held:
            scheduler.__class__ = kind
        self._held.clear()

    def step_metric(self, value: float) -> None:
        """Step the schedulers that take a metric."""
        if not self._plateaus:
            raise ConfigError(
                "scheduler_step() needs a scheduler that takes a metric. Write prepare(…, "
                "scheduler=ReduceLROnPlateau(optimizer))."
            )
        for scheduler in self._plateaus:
            # From now on, so that a scheduler that is stepped directly moves once, too.
            self._hold(scheduler, mover="run.scheduler_step()")
        with self._own_move():
            for scheduler in self._plateaus:
                scheduler.step(value)

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the states of all."""
        return [{"class": type(s).__name__, "state": s.state_dict()} for s in self.all]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """Restore the state."""
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
        """Make `step()` of a scheduler and its parts raise outside of our own calls."""
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
            held, self.__class__ = type(self), kind  # a copy has no owner
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
    """Raise if a schedule belongs to another optimizer."""
    theirs = getattr(scheduler, "optimizer", None)
    if isinstance(theirs, torch.optim.Optimizer) and not any(theirs is o for o in optimizers):
        raise ConfigError(
            f"The {type(scheduler).__name__} was built for a different {type(theirs).__name__} "
            "than the one passed to prepare(). Build it for the same optimizer."
        )


def _check_arguments(scheduler: Any) -> None:
    """Raise if a schedule needs an argument that a step does not know."""
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


@dataclass(kw_only=True)
class Stats:
    """Counts since the beginning of the run; they survive a resume."""

    steps: int = 0
    """Steps tried."""
    skipped: int = 0
    overflows_in_a_row: int = 0
    overflows_at_floor: int = 0
    """In a row, with the scale as small as it may be."""
    bad_module: str = ""
    """Where the last overflow was nearest the loss."""
    grad_norm: float = 0.0
    """Of the last step that was applied."""
    average_grad_norm: float = 0.0
    """Mean over all steps that were applied, before clipping."""
    lost_updates: float | None = None
    """The last measurement."""
    scale_history: list[tuple[int, float]] = field(default_factory=list)
    """The scale at each step where it changed, the first included."""
    scale_increases: int = 0
    """Steps after which the loss scale grew."""
    scale_decreases: int = 0
    """Steps after which the loss scale shrank."""
    current_scale: float = 1.0
    """The loss scale of the next step; 1 without one. Of several, the first."""
    bytes: dict[str, int] = field(default_factory=dict)
    """What is held now, by role."""
    forward_only: int = 0
    """Applied steps that had no backward pass."""

    @property
    def applied(self) -> int:
        """Steps that moved the weights."""
        return self.steps - self.skipped

    @property
    def overflow_rate(self) -> float:
        """Skipped over tried."""
        return self.skipped / self.steps if self.steps else 0.0

    def count(self, outcome: Outcome) -> None:
        """Take in one step."""
        self.steps += 1
        if not self.scale_history or self.scale_history[-1][1] != outcome.loss_scale:
            self.scale_history.append((self.steps, outcome.loss_scale))
        self.scale_increases += outcome.next_scale > outcome.loss_scale
        self.scale_decreases += outcome.next_scale < outcome.loss_scale
        if outcome.lost_updates is not None:
            self.lost_updates = outcome.lost_updates
        if outcome.applied:
            self.forward_only += outcome.forward_only
            if outcome.forward_only:
                return
            self.overflows_in_a_row = self.overflows_at_floor = 0
            self.grad_norm = outcome.grad_norm
            updates = self.applied - self.forward_only
            self.average_grad_norm += (self.grad_norm - self.average_grad_norm) / updates
            return
        self.skipped += 1
        if outcome.forward_only:
            return
        self.bad_module = outcome.bad_module
        self.overflows_in_a_row += 1
        if outcome.at_floor:
            self.overflows_at_floor += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the counts as plain data."""
        return {
            "steps": self.steps,
            "skipped": self.skipped,
            "overflows_in_a_row": self.overflows_in_a_row,
            "overflows_at_floor": self.overflows_at_floor,
            "bad_module": self.bad_module,
            "grad_norm": self.grad_norm,
            "average_grad_norm": self.average_grad_norm,
            "lost_updates": self.lost_updates,
            "forward_only": self.forward_only,
            "scale_increases": self.scale_increases,
            "scale_decreases": self.scale_decreases,
            "scale_history": [list(pair) for pair in self.scale_history],
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Stats":
        """Return counts that were saved."""
        history = [(int(step), float(scale)) for step, scale in state["scale_history"]]
        return cls(**{**state, "scale_history": history})


AT_FLOOR = "overflow at the smallest loss scale"
"""Message for an overflow at the minimum scale."""


Losing = Literal["never", "by chance", "always"]
"""When rounding loses the update of a weight that is smaller than its spacing."""
NOTHING_MOVED = "no weight moved"
"""Message for an applied step that changed nothing."""


class StepLog:
    """Steps in flight, steps counted, and what was found."""

    def __init__(
        self,
        schedules: Schedules,
        *,
        max_skipped_steps: int,
        weights: Mapping[str, Tensor],
        scaled: bool,
        wording: Wording,
    ) -> None:
        self.stats = Stats()
        self.scaled = scaled
        self.params_lose: Losing = "never"
        """Whether rounding may be why an update is lost."""
        self._schedules, self._patience, self._weights = schedules, max_skipped_steps, weights
        self.wording = wording
        """How advice to the run's owner is written."""
        self._in_flight: list[Outcome] = []
        self._findings: list[FindingRecord] = []

    def enter(self, outcome: Outcome) -> None:
        """Take in a step whose numbers are on their way."""
        self._in_flight.append(outcome)

    def sync(self) -> None:
        """Wait for every step so far, and let schedule, counts and findings catch up."""
        while self._in_flight:
            outcome = self._in_flight.pop(0)
            outcome.arrive()
            if (place := outcome.mixed_weight()) is not None:
                raise UnsupportedError(
                    f"{list(self._weights)[place]} has a gradient on some ranks only, and "
                    "fully_shard() has mixed it with gradients of other weights. Call "
                    "model.set_reduce_scatter_unused_params(True), and shard modules that some "
                    "ranks skip (experts) together with a module that all of them run: "
                    "nc.fully_shard(model, blocks=...)."
                )
            outcome.explain(self._count(outcome))

    def counts(self) -> StepCounts:
        """Return how many steps there were so far. Waits for the device."""
        self.sync()
        return StepCounts(applied=self.stats.applied, skipped=self.stats.skipped)

    def findings(self) -> list[FindingRecord]:
        """Return what was found since this was last asked."""
        matches, self._findings = self._findings, []
        return matches

    def check_not_diverged(self) -> None:
        """Raise once every step would be skipped; synchronises only where training ends."""
        stats = self.stats
        if stats.overflows_at_floor < self._patience:
            return
        fact = (
            f"step {stats.steps}: {stats.overflows_at_floor} steps in a row had inf or NaN "
            f"gradients{(', with the loss scale at its minimum' if self.scaled else '')}"
        )
        bad = [name for name, weight in self._weights.items() if not weight.isfinite().all()]
        if bad:
            lr = self.wording.lr
            raise DivergedError(
                f"{fact}; {len(bad)} of {len(self._weights)} weights are inf or NaN too, the "
                f"first is {bad[0]}",
                "Restore an earlier checkpoint. Then check what else writes to the weights, such "
                f"as a hook, or try a lower {lr}.",
            )
        raise DivergedError(
            f"{fact}; the weights are those of the last applied step",
            f"Look at {stats.bad_module}: {_remedy(stats.bad_module, self.wording)}.",
        )

    def _count(self, outcome: Outcome) -> str:
        """Return why the step was skipped; empty if it was applied."""
        stood_still = self.stats.lost_updates == 1.0
        self.stats.count(outcome)
        if outcome.applied:
            # Once, as long as it lasts. A learning rate of zero is meant so: a schedule may begin
            # with one, and at one below the digits of fp32 nothing moves that has all of them.
            lost = outcome.lost_updates == 1.0 and self.params_lose != "by chance"
            smallest = FP32.epsilon if self.params_lose == "never" else 0.0
            if lost and not stood_still and not outcome.lr <= smallest:
                self._tell_of_standing_still(outcome)
            self._schedules.step()
            return ""
        if outcome.forward_only:
            return "the loss of a forward-only step is inf or NaN"
        count = f"{len(outcome.bad_parameters)} of {len(self._weights)} weights"
        why = f"gradients of {count} are inf or NaN, nearest the loss: {outcome.bad_module}"
        if outcome.next_scale != outcome.loss_scale:
            why += f"; loss scale {outcome.loss_scale:g} → {outcome.next_scale:g}"
        if self.stats.overflows_at_floor == 1:
            floor = f"; the scale is {outcome.loss_scale:g}, its minimum"
            self._findings.append(
                FindingRecord(
                    step=outcome.step,
                    since=outcome.step - self.stats.overflows_in_a_row + 1,
                    module=outcome.bad_module,
                    role="grad_weight",
                    what=AT_FLOOR if self.scaled else "overflow",
                    why=why + (floor if self.scaled else ""),
                    action=f"the step is skipped; training stops after {self._patience} in a row",
                    advice=_remedy(self._one_to_blame(outcome), self.wording),
                )
            )
        return why

    def _tell_of_standing_still(self, outcome: Outcome) -> None:
        narrow = (
            "write master=split, because 16-bit weights lose updates below half their spacing; or "
        )
        advice = (narrow if self.params_lose == "always" else "") + (
            "try a higher learning rate, and check that the optimizer updates the weights in its "
            "param_groups"
        )
        self._findings.append(
            FindingRecord(
                step=outcome.step,
                since=outcome.step,
                module="",
                role="update",
                what=NOTHING_MOVED,
                why="the step was applied, but no weight changed",
                action="",
                advice=advice,
            )
        )

    def _one_to_blame(self, outcome: Outcome) -> str:
        """Return the module nearest the loss; where every gradient is bad that says nothing."""
        everywhere = len(outcome.bad_parameters) == len(self._weights) > 1
        return NO_MODULE if everywhere else outcome.bad_module


def _remedy(module: str, terms: Wording) -> str:
    # Which number came first is not known here, and so not what would help.
    ask = "" if terms.in_recipe else "; narrowcast.explain shows which value became bad first"
    if module == NO_MODULE:
        wider = "a wider precision.policy" if terms.in_recipe else "a wider policy"
        return f"try a lower {terms.lr} or {wider}, or check the data{ask}"
    if terms.policy.for_module(module).forward == "fp32":
        return f"try a lower {terms.lr}, or check the data{ask}"
    return f"try {terms.wider(module, 'fp32')} or a lower {terms.lr}, or check the data{ask}"
