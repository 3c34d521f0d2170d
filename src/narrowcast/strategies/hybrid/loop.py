"""`nc.hybrid`: hybrid training in your own loop."""

import contextlib
import copy
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, SupportsIndex, TypeVar, cast, final, get_args, overload

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from narrowcast.config.strategy import ReadoutSection, StrategySection
from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.precision.gradients.loss_scale import settings_from
from narrowcast.precision.plan.phases import Phase
from narrowcast.precision.plan.policy import suggestion
from narrowcast.precision.step.captured_step import CapturedStep
from narrowcast.precision.step.outcome import Outcome
from narrowcast.precision.step.prepared import Prepared, prepare, resolve_plan
from narrowcast.precision.step.step_log import AnyScheduler
from narrowcast.precision.weights.lookahead import Lookahead
from narrowcast.runs import Record
from narrowcast.strategies.hybrid.phase_formats import PhaseFormats
from narrowcast.strategies.hybrid.phases import PhaseCourse, check_first_jump
from narrowcast.strategies.hybrid.readout.choice import (
    Choice,
    ChoosingBudget,
    Readouts,
    half_lives_in_steps,
)
from narrowcast.strategies.hybrid.readout.race import Better

Preset = Literal["conservative", "balanced", "aggressive"]
PhasePrecision = Literal["policy", "recommended", "conservative", "aggressive"]
MakeScheduler = Callable[[torch.optim.Optimizer, int], AnyScheduler]
"""Makes a schedule from an optimizer and the number of steps it is planned for."""
DEFAULTS = StrategySection(name="hybrid")
B = TypeVar("B")


def hybrid(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    steps: int,
    preset: Preset = "balanced",
    scheduler: MakeScheduler | None = None,
    lr_horizon: float = DEFAULTS.lr_horizon,
    half_lives: Sequence[float] = DEFAULTS.readout.half_lives,
    readout_budget: float = DEFAULTS.readout.budget,
    lookahead: Lookahead | None = None,
    phases: Mapping[str, Any] | None = None,
    jumps: Mapping[str, Any] | None = None,
    precision: PhasePrecision | Mapping[Phase, str] = "policy",
    **settings: Any,
) -> "HybridRun":
    """Prepare a model for hybrid training in your own loop.

    Args:
        steps: Number of steps you plan to train. You may stop earlier.
        preset: `conservative` averages the weights, `balanced` also takes gradients at a lookahead
            point, and `aggressive` also has the phases predict and correct, whose steps have no
            backward pass. It needs `run.step(loss_fn)`.
        scheduler: Called with the optimizer and `lr_horizon` times the steps, so you can pass
            `CosineAnnealingLR` itself.
        lr_horizon: Steps that the learning rate is planned for, as a multiple of `steps`.
        half_lives: Half-lives of the averages, as shares of `steps`.
        readout_budget: Largest cost of selecting weights on batches, as a share of training.
        lookahead: Settings of the lookahead point.
        phases: Lengths of the phases, as in `strategy.phases` of a recipe, for example
            `{"warmup_steps": 50, "full_steps": 15}`.
        jumps: How predictions are verified, as in `strategy.jumps` of a recipe.
        precision: Policy per phase: `recommended`, `conservative`, `aggressive`, or policies by
            phase, for example `{"predict": "bf16"}`. `policy`: the same in all.
        **settings: As for `prepare`.
    """
    if isinstance(steps, bool) or not isinstance(steps, SupportsIndex) or steps < 1:
        raise ConfigError(f"steps must be the number of training steps, 1 or more, got {steps!r}.")
    _check_known(settings)
    if settings.get("ema_decay") is not None:
        raise ConfigError(
            "ema_decay is not available in hybrid(), which keeps averages itself. Leave it out, "
            "and write for example half_lives=[0.03]."
        )
    requested = _strategy_section(
        preset,
        lr_horizon=lr_horizon,
        half_lives=half_lives,
        more={"phases": phases, "jumps": jumps, "precision": precision},
    )
    if scheduler is None and lr_horizon not in (DEFAULTS.lr_horizon, 1):
        raise ConfigError(
            f"lr_horizon needs a scheduler, got lr_horizon={lr_horizon:g} without one. Write "
            "scheduler=CosineAnnealingLR, or leave lr_horizon out."
        )
    if scheduler is not None and not callable(scheduler):
        raise ConfigError(
            "scheduler must be a class or function that makes a scheduler for more steps than the "
            f"run has, got a {type(scheduler).__name__}. Write "
            f"scheduler={type(scheduler).__name__}, or lambda optimizer, steps: …."
        )
    budget = ChoosingBudget(share=readout_budget)
    if lookahead is None and requested.has_lookahead:
        lookahead = Lookahead()
    if requested.has_jumps:
        try:
            check_first_jump(requested, steps=steps, micro_batches=1)
        except ConfigError as error:  # before the model is changed
            raise ConfigError(_in_python(str(error))) from None
    made = None if scheduler is None else scheduler(optimizer, round(steps * lr_horizon))
    prepared = prepare(model, optimizer, scheduler=made, lookahead=lookahead, **settings)
    readouts = Readouts(prepared, half_lives=half_lives_in_steps(half_lives, steps), budget=budget)

    def planned(text: str) -> Any:
        return resolve_plan(text, prepared.engine, None)

    formats = PhaseFormats(
        prepared,
        requested,
        policy=str(prepared.plan.policy),
        planned=planned,
        loss_scale=settings_from(settings.get("loss_scale")),
    )
    course = PhaseCourse(prepared, requested, steps=steps, formats=formats)
    return HybridRun(prepared, readouts, course, verifies=requested.has_jumps)


def _check_known(settings: Mapping[str, Any]) -> None:
    """Raise for arguments that neither `hybrid` nor `prepare` has."""
    known = inspect.signature(prepare).parameters
    for name in settings:
        if name not in known:
            similar = suggestion(name, {**known, **inspect.signature(hybrid).parameters})
            raise ConfigError(
                f"hybrid() takes its own arguments and those of prepare(), got {name!r}{similar}. "
                "Correct its name, or leave it out."
            )


def _strategy_section(
    preset: str, *, lr_horizon: float, half_lives: Any, more: Mapping[str, Any]
) -> StrategySection:
    """Return the settings as in a recipe, with the same checks."""
    if preset not in get_args(Preset):
        known = ", ".join(get_args(Preset))
        raise ConfigError(f"preset must be one of {known}, got {preset!r}.")
    try:
        StrategySection(name="hybrid", preset=cast(Any, preset), lr_horizon=lr_horizon)
    except ValueError as error:
        raise ConfigError(
            f"lr_horizon must be a number of 1 or more, such as 1.4, got {lr_horizon!r}."
        ) from error
    try:
        ReadoutSection(half_lives=tuple(half_lives))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"half_lives must be shares of the run, above 0 and up to 1, got {half_lives!r}. Write "
            "for example (0.015, 0.05), or () for none."
        ) from error
    sections = {key: dict(more[key] or {}) for key in ("phases", "jumps")}
    precision = more["precision"]
    formats = {"precision": precision} if isinstance(precision, str) else {"policies": precision}
    try:
        return StrategySection.model_validate(
            {"name": "hybrid", "preset": preset, "lr_horizon": lr_horizon, **sections, **formats}
        )
    except ValidationError as error:
        raise ConfigError(_in_python(_settings_text(error))) from error


def _in_python(text: str) -> str:
    """Return a message about settings of a recipe with arguments of `hybrid`."""
    text = re.sub(r"strategy\.preset=(\w+)", r'preset="\1"', text)
    text = re.sub(r"strategy\.(jumps|phases)\.(\w+)=([\d.]+)", r'\1={"\2": \3}', text)
    return re.sub(r"strategy\.(\w+)\.(\w+)", r"\1['\2']", text)


def _settings_text(error: ValidationError) -> str:
    """Return what is wrong with settings of a strategy."""
    lines = []
    for each in error.errors(include_url=False):
        place = ".".join(str(key) for key in each["loc"])
        got = "" if isinstance(each["input"], dict) else f", got {each['input']!r}"
        lines.append(f"{place}: {each['msg']}{got}." if place else f"{each['msg']}.")
    return " ".join(lines)


@final
class HybridRun:
    """A prepared model whose averages follow its steps; see `hybrid`."""

    def __init__(
        self, prepared: Prepared, readouts: Readouts, course: PhaseCourse, *, verifies: bool
    ) -> None:
        self.prepared, self.readouts = prepared, readouts
        self.model = prepared.model
        self._course, self._verifies = course, verifies
        self._unread: list[tuple[Outcome, Tensor]] = []
        """Steps whose numbers the phases have not seen yet, and their losses."""
        self.records: list[Record] = course.begin()
        """The phases that began so far, and the jumps: what came of each, and why."""

    @property
    def phase(self) -> Phase:
        """The phase of the next step: warmup, full, predict or correct."""
        return self._course.phase

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Context manager that runs the forward pass and the loss in the policy's precision."""
        return self.prepared.autocast()

    def backward(self, loss: Tensor) -> None:
        """Backpropagate a loss; see `Prepared.backward`."""
        self._check_loss_fn("backward()")
        self.prepared.backward(loss)

    def step(self, loss: Tensor | Callable[[], Tensor] | None = None) -> Outcome:
        """Take a step; then the averages and past weights follow.

        Args:
            loss: The loss, or a function that computes it on the batch of this step. The function
                is called inside `autocast()`, twice if the step has no backward pass.
        """
        if callable(loss):
            outcome, value = self._take_step(loss)
        else:
            self._check_loss_fn("step(loss)")
            outcome, value = self.prepared.step(loss), None
        self._follow(outcome, value)
        return outcome

    def graphed(self, loss_fn: Callable[..., Tensor], *, signatures: int = 4) -> CapturedStep:
        """Return a callable that takes whole steps with this loss; see `Prepared.graphed`."""
        if self._verifies:
            raise UnsupportedError(
                "graphed() captures training steps, and the aggressive preset has steps without "
                'a backward pass. Write preset="balanced", or run.step(loss_fn).'
            )
        return CapturedStep(
            self.prepared.engine,
            loss_fn,
            step=self.prepared.step,
            signatures=signatures,
            after=self._follow,
        )

    def _take_step(self, loss_fn: Callable[[], Tensor]) -> tuple[Outcome, Tensor]:
        """Take a step with or without a backward pass; return its loss too."""

        def loss() -> Tensor:
            with self.prepared.autocast():
                return loss_fn()

        if self._course.is_forward_only:
            outcome, mean = self._course.compare(lambda: loss().reshape(1, 1))
            return outcome, mean[0]
        value = loss()
        return self.prepared.step(value), value.detach()

    def _check_loss_fn(self, call: str) -> None:
        if self._verifies:
            raise ConfigError(
                f"{call} has a backward pass, and the aggressive preset needs steps without one. "
                "Write run.step(lambda: F.cross_entropy(model(x), y)), which computes the loss "
                "where it is needed."
            )

    def _follow(self, outcome: Outcome, loss: Tensor | None = None) -> None:
        self.readouts.after_step(outcome)
        self._course.after_step(outcome)
        if self._verifies and loss is not None:
            self._unread.append((outcome, loss))
        step = outcome.step
        if self._course.is_due(step):
            self._read()
            self.records += self._course.act(step)

    def _read(self) -> None:
        """Let the phases see the numbers of all steps so far. Synchronises."""
        for outcome, loss in self._unread:
            self._course.note(
                loss=float(loss), grad_norm=outcome.grad_norm, applied=outcome.applied
            )
        self._unread = []

    @overload
    def select_weights(
        self, measure: Callable[[], float], *, better: Better = "lower"
    ) -> Choice: ...

    @overload
    def select_weights(
        self,
        measure: Callable[[B], float | Tensor],
        *,
        batches: Iterable[B],
        better: Better = "lower",
    ) -> Choice: ...

    def select_weights(
        self,
        measure: Callable[..., float | Tensor],
        *,
        batches: Iterable[Any] | None = None,
        better: Better = "lower",
    ) -> Choice:
        """Measure the trained weights and their averages, and select the best.

        Args:
            measure: Evaluates the model on held-out data: all of it, or with `batches` on the batch
                it is given. The model is then in eval mode, without gradients.
            batches: Batches that all candidates are compared on, at least one and at most what
                `readout_budget` allows. A batch as large as that of a step costs a third of a step.
            better: Whether a lower or a higher measure is better.
        """
        if batches is None:
            return self.readouts.choose(lambda name: float(measure()), better=better)
        choice, _ = self.readouts.choose_on(batches, measure, better=better)
        return choice

    def use_eval_weights(self) -> contextlib.AbstractContextManager[None]:
        """Use the weights that were selected last inside the block."""
        return self.readouts.swapped_in()

    def eval_state_dict(self) -> dict[str, Tensor]:
        """Return the selected weights in fp32 by name, as copies for a plain model."""
        return self.readouts.weights()

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the whole state, averages and selection included."""
        self._read()
        others = {"readouts": self.readouts.state_dict(), "phases": self._course.state_dict()}
        return {"prepared": self.prepared.state_dict(), **copy.deepcopy(others)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict()` of a run that was prepared in the same way."""
        self._unread = []
        self._course.restore_formats(state["phases"])
        self.prepared.load_state_dict(state["prepared"])
        self.readouts.load_state_dict(state["readouts"])
        self._course.load_state_dict(state["phases"])
