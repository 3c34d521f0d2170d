"""`nc.hybrid`: hybrid training in your own loop."""

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, SupportsIndex, TypeVar, cast, final, get_args, overload

import torch
from torch import Tensor, nn

from narrowcast.config.strategy import ReadoutSection, StrategySection
from narrowcast.errors import ConfigError
from narrowcast.precision.plan.policy import suggestion
from narrowcast.precision.step.captured_step import CapturedStep
from narrowcast.precision.step.outcome import Outcome
from narrowcast.precision.step.prepared import Prepared, prepare
from narrowcast.precision.step.step_log import AnyScheduler
from narrowcast.precision.weights.lookahead import Lookahead
from narrowcast.strategies.hybrid.jumper import Jumper, JumpResult, Losses
from narrowcast.strategies.hybrid.readout.choice import (
    STEP_COST,
    Choice,
    ChoosingBudget,
    Readouts,
    half_lives_in_steps,
)
from narrowcast.strategies.hybrid.readout.race import Better

Preset = Literal["conservative", "balanced", "aggressive"]
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
    **settings: Any,
) -> "HybridRun":
    """Prepare a model for hybrid training in your own loop.

    Args:
        steps: Number of steps you plan to train. You may stop earlier.
        preset: `conservative` averages the weights, `balanced` also takes gradients at a lookahead
            point, and `aggressive` also lets you try jumps of the weights.
        scheduler: Called with the optimizer and `lr_horizon` times the steps, so you can pass
            `CosineAnnealingLR` itself.
        lr_horizon: Steps that the learning rate is planned for, as a multiple of `steps`.
        half_lives: Half-lives of the averages, as shares of `steps`.
        readout_budget: Largest cost of selecting weights on batches, as a share of training.
        lookahead: Settings of the lookahead point.
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
    requested = _strategy_section(preset, lr_horizon=lr_horizon, half_lives=half_lives)
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
    made = None if scheduler is None else scheduler(optimizer, round(steps * lr_horizon))
    prepared = prepare(model, optimizer, scheduler=made, lookahead=lookahead, **settings)
    readouts = Readouts(prepared, half_lives=half_lives_in_steps(half_lives, steps), budget=budget)
    jumper = None
    if requested.has_jumps:
        budget_passes = DEFAULTS.jumps.budget * steps * STEP_COST
        jumper = Jumper(prepared, every=max(1, steps // 200), budget=budget_passes)
    return HybridRun(prepared, readouts, jumper)


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


def _strategy_section(preset: str, *, lr_horizon: float, half_lives: Any) -> StrategySection:
    """Return the settings as in a recipe, with the same checks."""
    if preset not in get_args(Preset):
        known = ", ".join(get_args(Preset))
        raise ConfigError(f"preset must be one of {known}, got {preset!r}.")
    try:
        section = StrategySection(name="hybrid", preset=cast(Any, preset), lr_horizon=lr_horizon)
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
    return section


@final
class HybridRun:
    """A prepared model whose averages follow its steps; see `hybrid`."""

    def __init__(
        self, prepared: Prepared, readouts: Readouts, jumper: Jumper | None = None
    ) -> None:
        self.prepared, self.readouts = prepared, readouts
        self.model = prepared.model
        self._jumper = jumper

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Context manager that runs the forward pass and the loss in the policy's precision."""
        return self.prepared.autocast()

    def backward(self, loss: Tensor) -> None:
        """Backpropagate a loss; see `Prepared.backward`."""
        self.prepared.backward(loss)

    def step(self, loss: Tensor | None = None) -> Outcome:
        """Update the weights, then their averages and history; does not synchronise further."""
        outcome = self.prepared.step(loss)
        self._follow(outcome)
        return outcome

    def graphed(self, loss_fn: Callable[..., Tensor], *, signatures: int = 4) -> CapturedStep:
        """Return a callable that takes whole steps with this loss; see `Prepared.graphed`."""
        return CapturedStep(
            self.prepared.engine,
            loss_fn,
            step=self.prepared.step,
            signatures=signatures,
            after=self._follow,
        )

    def _follow(self, outcome: Outcome) -> None:
        self.readouts.after_step(outcome)
        if self._jumper is not None:
            self._jumper.observe(outcome.step)

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

    def jump(self, ahead_steps: int, losses: Losses) -> JumpResult:
        """Move the weights to where they are predicted in so many steps, if the loss falls.

        Half of the movement is tried where the whole is rejected; else every bit is put back. Needs
        `preset="aggressive"`. Without budget nothing is tried, and the result says so.

        Args:
            ahead_steps: Steps that the jump stands for.
            losses: Evaluates the same eight micro-batches at every call, on data that is not
                trained on yet, and returns the loss of each.
        """
        if self._jumper is None:
            raise ConfigError(
                "jump() needs past weights, got a run without them. Write hybrid(…, "
                'preset="aggressive").'
            )
        return self._jumper.jump(ahead_steps, losses)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the whole state, averages and selection included."""
        jumper = None if self._jumper is None else self._jumper.state_dict()
        others = {"readouts": self.readouts.state_dict(), "jumper": jumper}
        return {"prepared": self.prepared.state_dict(), **copy.deepcopy(others)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict()` of a run that was prepared in the same way."""
        self.prepared.load_state_dict(state["prepared"])
        self.readouts.load_state_dict(state["readouts"])
        if self._jumper is not None:
            self._jumper.load_state_dict(state["jumper"])
