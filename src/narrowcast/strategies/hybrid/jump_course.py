"""Jumps of the weights in a run: when one is tried, which, and what is learnt from it.

A jump is judged on batches that training comes to next, each with itself, and is rolled back bit
for bit unless the loss fell by more than chance allows. Whether one is tried at all is decided by
how probable acceptance is, as earlier ones have shown; the first few are tried to find out.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, final

from torch import Tensor

from narrowcast.config.sections import Recipe
from narrowcast.hardware.randomness import randomness_kept
from narrowcast.precision.step.outcome import Outcome
from narrowcast.precision.step.prepared import Prepared
from narrowcast.runs import Record, StepRecord, StrategyRecord
from narrowcast.strategies.hybrid.control.bandit import HOLD, Arm, Bandit, arms, context, worth
from narrowcast.strategies.hybrid.control.confidence import raw_score
from narrowcast.strategies.hybrid.control.divergence import Monitor, Observation, observed
from narrowcast.strategies.hybrid.control.divergence_settings import DivergenceSettings
from narrowcast.strategies.hybrid.control.dynamics import (
    DynamicsSettings,
    LossDynamics,
    LossForecast,
)
from narrowcast.strategies.hybrid.control.features import FeatureWindow, features
from narrowcast.strategies.hybrid.control.metrics import (
    Diverged,
    JumpVerified,
    StepDone,
    TrainingStatistics,
)
from narrowcast.strategies.hybrid.control.optimizer_facts import OptimizerFacts, optimizer_facts
from narrowcast.strategies.hybrid.control.phases import (
    PhaseState,
    Predict,
    after_divergence,
    after_outcome,
    next_decision,
)
from narrowcast.strategies.hybrid.control.recovery import Level
from narrowcast.strategies.hybrid.control.settings import PhaseSettings
from narrowcast.strategies.hybrid.jumps.jumper import Jumper
from narrowcast.strategies.hybrid.jumps.offload import offloaded
from narrowcast.strategies.hybrid.jumps.prepared_weights import PreparedWeights
from narrowcast.strategies.hybrid.jumps.verify import Verdict
from narrowcast.strategies.hybrid.predictors import (
    check_first_jump,
    horizons_of,
    jump_settings_of,
    predictors_of,
)
from narrowcast.training.data import BatchStream
from narrowcast.training.evaluation import in_eval_mode
from narrowcast.training.step.losses import Losses
from narrowcast.training.task import Task

OBSERVE_EVERY = 5
"""Steps between two lessons of the loss's dynamics, each a millisecond on the host."""
EXPLORED = 3
"""Jumps of like score that are tried before their probability is believed."""
TREND = 16
"""Steps whose mean loss is compared with that of as many before, to say what a step is worth."""


class _Outlook(NamedTuple):
    """What is thought of the steps to come."""

    forecast: LossForecast | None
    score: float
    confidence: float
    """How probable it is that a jump is accepted."""
    unknown: bool = False
    """Whether that is to be found out."""


@final
class JumpCourse:
    """Decides on jumps, tries them, and keeps the account."""

    def __init__(
        self, prepared: Prepared, task: Task, recipe: Recipe, *, settings: PhaseSettings
    ) -> None:
        check_first_jump(recipe, settings)
        self._prepared, self._task, self._recipe = prepared, task, recipe
        self._settings, self._losses = settings, Losses(prepared, task)
        self._device = prepared.engine.weights.device
        predictors = predictors_of(recipe, device=self._device)
        self._jumper = Jumper(
            PreparedWeights(prepared),
            predictors,
            settings=jump_settings_of(recipe, settings),
            # What captured steps know by its address has to stay there.
            room=partial(offloaded, prepared, graph_knows=self._device.type == "cuda"),
        )
        names = [predictor.name for predictor in predictors]
        self._bandit = Bandit.new(arms(names, horizons_of(settings)))
        self._dynamics = LossDynamics(DynamicsSettings(seed=recipe.seed))
        self._diverging = DivergenceSettings(loss_sigma=settings.divergence_sigma)
        self._window, self._monitor = FeatureWindow(), Monitor()
        self._worst = Level.NORMAL, ""
        """The highest level since the last decision, and its summary."""
        self.statistics_so_far = TrainingStatistics()
        self._optimizer = OptimizerFacts(lr=0.0)
        self._state = PhaseState()

    def after_step(self, outcome: Outcome) -> None:
        """Keep the weights where a snapshot is due; waits for nothing."""
        self._jumper.observe(outcome.step)

    def note(self, record: StepRecord) -> None:
        """Learn what a step says of those to come."""
        self._window = self._window.after(record.loss, record.grad_norm)
        seen = Observation(loss=record.loss, gradient_norm=record.grad_norm)
        if record.applied:  # a skipped step moved nothing, whatever its loss was
            self._monitor, assessment = observed(self._monitor, seen, settings=self._diverging)
            if assessment.level > self._worst[0]:
                self._worst = assessment.level, assessment.summary
        done = StepDone(
            phase=self._state.phase,
            loss=record.loss,
            precision=str(self._prepared.plan.policy),
            backward=True,
        )
        self.statistics_so_far = self.statistics_so_far.after(done)
        if record.step % OBSERVE_EVERY == 0:
            self._dynamics.observe(self._features(), record.loss)

    def decide(self, state: PhaseState) -> tuple[PhaseState, str]:
        """Return what comes next, and why; a correction is made where a jump is judged."""
        self._optimizer = optimizer_facts(self._prepared.engine.optimizer)
        (level, summary), self._worst = self._worst, (Level.NORMAL, "")
        if level > Level.CAUTION:
            self.statistics_so_far = self.statistics_so_far.after(Diverged(level=level))
            state, _ = after_divergence(state, self._settings, level=level)
            if level == Level.CRITICAL:
                self._monitor = self._monitor.rearmed()
            if state.remaining:
                self._state = state
                return state, f"{summary}: trained as usual for a while"
        outlook = self._outlook(self._settings.max_predict_steps)
        state = self._next(state, outlook)
        if state.phase == "correct":
            steps = state.remaining
            state = after_outcome(state, self._settings, succeeded=True, steps=steps)
            state = self._next(state, outlook)
        self._state = state
        return state, self._why(outlook)

    def predict(
        self, state: PhaseState, *, step: int, batches: int
    ) -> tuple[PhaseState, list[Record]]:
        """Try a jump; return the state after it, and what there is to tell."""
        began, decision = time.perf_counter(), state.decision
        assert isinstance(decision, Predict)
        outlook = self._outlook(decision.steps)
        facts = context(
            self._window,
            score=outlook.score,
            total=1.0 if outlook.forecast is None else outlook.forecast.total,
        )
        arm = self._bandit.choose(facts).arm
        spent = self._jumper.budget.spent
        verdict = Verdict(False, math.nan, math.nan, "no predictor promises to pay")
        if arm != HOLD:
            verdict = self._tried(arm, outlook, batches=batches)
        cost = self._jumper.budget.spent - spent
        self._learn(arm, facts, verdict, outlook=outlook, forwards=cost)
        after = after_outcome(
            state, self._settings, succeeded=verdict.accepted, steps=state.remaining
        )
        steps = "1 step" if arm.horizon == 1 else f"{arm.horizon} steps"
        ending = "accepted" if verdict.accepted else "rejected"
        record = StrategyRecord(
            step=step,
            phase="predict",
            event="jump",
            what=f"{arm.predictor}, {steps}: {ending}" if arm != HOLD else "no jump",
            why=verdict.why,
            values={
                "accepted": float(verdict.accepted),
                "horizon": float(arm.horizon),
                "scale": verdict.scale,
                "gain": verdict.gain,
                "standard error": verdict.standard_error,
                "confidence": outlook.confidence,
                "forward passes": cost,
            },
            seconds=time.perf_counter() - began,
        )
        return after, [record]

    def statistics(self) -> dict[str, float]:
        """Return what jumps came to, by name."""
        budget, kept = self._jumper.budget, self.statistics_so_far
        told = {
            "jumps tried": float(budget.tried),
            "jumps accepted": float(budget.accepted),
            "forward passes spent": budget.spent,
            "step equivalents": kept.step_equivalents,
            "backward reduction": kept.backward_reduction_pct,
            "calibration error": kept.calibration.expected_error,
            "brier": kept.calibration.brier,
            "history bytes": float(self._jumper.history.bytes()),
        }
        return {name: value for name, value in told.items() if value is not None}

    def state_dict(self) -> dict[str, Any]:
        """Return what decides the jumps to come."""
        return {
            "jumper": self._jumper.state_dict(),
            "bandit": self._bandit.state_dict(),
            "dynamics": self._dynamics.state_dict(),
            "window": self._window.to_json(),
            "monitor": self._monitor.to_json(),
            "worst": [int(self._worst[0]), self._worst[1]],
            "optimizer": self._optimizer.to_json(),
            "statistics": self.statistics_so_far.to_json(),
            "state": self._state.to_json(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where a saved run stood."""
        self._jumper.load_state_dict(state["jumper"])
        self._bandit = self._bandit.restored(state["bandit"])
        self._dynamics.load_state_dict(state["dynamics"])
        self._window = FeatureWindow.from_json(state["window"])
        self._monitor = Monitor.from_json(state["monitor"])
        level, summary = state["worst"]
        self._worst = Level(level), str(summary)
        self._optimizer = OptimizerFacts.from_json(state["optimizer"])
        self.statistics_so_far = TrainingStatistics.from_json(state["statistics"])
        self._state = PhaseState.from_json(state["state"])

    def _features(self) -> Tensor:
        return features(self._window, self._state, optimizer=self._optimizer, confidence=0.5)

    def _outlook(self, steps: int) -> _Outlook:
        if not self._dynamics.observations:
            return _Outlook(None, 0.0, 0.0)
        forecast = self._dynamics.forecast(max(1, steps // OBSERVE_EVERY))
        score = raw_score(
            total=forecast.total,
            errors=self._window.errors,
            average=self._window.loss_average,
        )
        calibration = self.statistics_so_far.calibration
        # Without a few that are tried to find out, none would ever be.
        threshold = self._settings.confidence_threshold
        unknown = calibration.needs_trial(score, threshold=threshold, least=EXPLORED)
        return _Outlook(forecast, score, calibration.estimate(score).probability, unknown)

    def _next(self, state: PhaseState, outlook: _Outlook) -> PhaseState:
        confidence = 1.0 if outlook.unknown else outlook.confidence
        confidence = 0.0 if self._refusal() else confidence
        return next_decision(
            state, self._settings, confidence=confidence, losses=self._window.losses
        )

    def _refusal(self) -> str:
        """Say why no jump can be tried now; nothing where one can."""
        jumper = self._jumper
        predictors = jumper.predictors.values()
        if len(jumper.history) <= max(p.needs for p in predictors):
            return jumper.budget.refusal(0.0) or "too few past weights are known yet"
        return jumper.budget.refusal(max(map(jumper.settings.attempt_cost, predictors)))

    def _why(self, outlook: _Outlook) -> str:
        told = f"acceptance has a probability of {outlook.confidence:.2f}"
        return self._refusal() or told + (", to be found out" if outlook.unknown else "")

    def _tried(self, arm: Arm, outlook: _Outlook, *, batches: int) -> Verdict:
        self._jumper.propose(arm.horizon, arm.predictor, confidence=outlook.confidence)
        task, recipe = self._task, self._recipe
        with (
            randomness_kept(self._device),
            BatchStream(
                task.train_data,
                recipe.batch_size,
                seed=recipe.seed,
                start=batches,
                device=self._device,
                collate=task.collate,
            ) as stream,
        ):
            held_out = list(islice(stream, recipe.strategy.jumps.micro_batches))
            return self._jumper.attempt(partial(self._losses_of, held_out))

    def _losses_of(self, batches: list[Any]) -> list[float]:
        model = self._prepared.model
        found = []
        with in_eval_mode(model):
            for batch in batches:
                (one,) = self._task.as_one_step([batch])
                with self._prepared.compute():
                    found.append(self._losses.of(model, one).total.detach())
        return [float(loss) for loss in found]

    def _learn(
        self,
        arm: Arm,
        facts: tuple[float, ...],
        verdict: Verdict,
        *,
        outlook: _Outlook,
        forwards: float,
    ) -> None:
        gained = self._steps_worth(verdict.gain) if verdict.accepted else 0.0
        reward = worth(steps_gained=gained, forwards=forwards)
        self._bandit = self._bandit.after(arm, facts, reward=reward)
        if arm == HOLD:
            return
        self._window = self._window.after_jump(accepted=verdict.accepted)
        judged = JumpVerified(length=arm.horizon, accepted=verdict.accepted, score=outlook.score)
        statistics = self.statistics_so_far.after(judged)
        self.statistics_so_far = replace(statistics, forwards=statistics.forwards + round(forwards))

    def _steps_worth(self, gain: float) -> float:
        """Return how many steps of training a fall of the loss is worth, by its recent trend."""
        losses = self._window.losses
        if len(losses) < 2 * TREND:
            return 0.0
        fall = sum(losses[-2 * TREND : -TREND]) - sum(losses[-TREND:])
        per_step = fall / TREND**2
        most = float(self._settings.max_predict_steps)
        return min(gain / per_step, most) if per_step > 0 else most
