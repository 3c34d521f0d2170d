"""`Jumper`: watch the weights, propose where they go, try it, and keep it or be where one was.

A run whose jumps are all rejected computes what a run without jumps does, bit for bit: weights,
moments, buffers and random numbers are as they were. What it costs is bounded by its budget.
Verified jumps rarely pay: against a tuned schedule they saved nothing (.94 to 1.01 of the steps,
`benchmarks/hybrid.py`). So the budget is one part in a hundred, and ends after five rejections.
"""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, final

import torch

from narrowcast.errors import CheckpointError, RecipeError
from narrowcast.strategies.hybrid.jumps.access import WeightAccess
from narrowcast.strategies.hybrid.jumps.correction import Correction, corrected, layer_features
from narrowcast.strategies.hybrid.jumps.history import WeightHistory
from narrowcast.strategies.hybrid.jumps.jump_settings import JumpSettings, Proposal
from narrowcast.strategies.hybrid.jumps.predictor import Predictor
from narrowcast.strategies.hybrid.jumps.residuals import Residual, Residuals, measure
from narrowcast.strategies.hybrid.jumps.verify import Trial, Verdict, decide

Losses = Callable[[], Sequence[float]]
"""Passes the same micro-batches at every call, without dropout, and returns the loss of each."""
Room = Callable[[], AbstractContextManager[object]]
"""Makes room on the device while a jump is tried: `offloaded`."""


@final
class Jumper:
    """Composes history, predictors, verification, residuals, correction and budget of a run."""

    def __init__(
        self,
        access: WeightAccess,
        predictors: Sequence[Predictor],
        *,
        settings: JumpSettings | None = None,
        room: Room = contextlib.nullcontext,
    ) -> None:
        self.settings = JumpSettings() if settings is None else settings
        self._access, self._room = access, room
        self.predictors = {predictor.name: predictor for predictor in predictors}
        # One more than predictors need, so that what they say can be compared with what happened.
        needs = max(p.needs for p in predictors) + 1
        self.history = WeightHistory(access.read(), self.settings.history, needs=needs)
        self.budget = self.settings.budget
        self.residuals = Residuals()
        self.corrections = {
            name: Correction(self.settings.correction, predictor=name) for name in self.predictors
        }
        self._step = 0
        self._proposal: Proposal | None = None
        self._refusal = ""

    def observe(self, step: int) -> bool:
        """Take a snapshot after a training step if one is due; say whether it was.

        Call it after every step, or whenever one is due. Never waits for the device, unless a
        predictor that learns does (an ensemble with DMD). Once jumps are switched off nothing is
        kept.
        """
        steps = max(step - self._step, 0)
        self.budget = self.budget.after_steps(steps, step_cost=self.settings.step_cost)
        self._step = step
        if self.budget.switched_off:
            self.history.clear()
            return False
        if not self.history.due(step):
            return False
        self.history.take(step, self._access.read())
        for predictor in self.predictors.values():
            cost = self.settings.predictor_cost * predictor.cost
            if predictor.learns and self.budget.may_teach(cost):
                self.budget = self.budget.after_lesson(cost)
                predictor.observe(self.history)
        return True

    def propose(
        self,
        ahead_steps: int,
        predictor: str,
        *,
        features: Sequence[float] = (),
        confidence: float = 1.0,
    ) -> Proposal | None:
        """Predict and correct a movement, for `attempt`; None where the budget forbids to try it.

        Best right after `observe` has taken a snapshot: the prediction begins there. `features`
        are of the run, to find similar residuals by; left out, the mean of the tensors' own. Waits
        for the device, once or twice.
        """
        chosen = self._named(predictor)
        self._proposal = None
        self._refusal = self.budget.refusal(self.settings.attempt_cost(chosen))
        if self._refusal:
            return None
        self._spend(self.settings.predictor_cost * chosen.cost)
        deltas = chosen.predict(self.history, ahead_steps=ahead_steps)
        of_layers = layer_features(self.history, ahead_steps=ahead_steps)
        of_run = tuple(map(float, features)) or _mean(of_layers)
        corrections = [0.0] * len(deltas)
        if self.settings.correction is not None:
            corrections = self.corrections[predictor].corrections(
                self.residuals, step=self._step, features=of_run, layer_features=of_layers
            )
            deltas = corrected(deltas, corrections)
        self._proposal = Proposal(
            predictor, self._step, ahead_steps, deltas, corrections, of_run, confidence
        )
        return self._proposal

    def attempt(self, loss_of_batches: Losses) -> Verdict:
        """Try what was proposed; keep it where the verdict says so, else roll back bit for bit.

        Then learn from what the prediction got wrong. Without budget nothing is tried, and the
        verdict says why. Waits for the device wherever losses are read.
        """
        proposal, self._proposal = self._proposal, None
        if proposal is None and not self._refusal:
            raise RecipeError("attempt() was called before propose(); call propose() each time")
        if proposal is None:
            return Verdict(False, math.nan, math.nan, self._refusal)
        resets = self.settings.moments == "reset"
        if resets:
            self._access.refuse_reset()
        verdict = self._tried(proposal, loss_of_batches)
        self.budget = self.budget.after_jump(accepted=verdict.accepted)
        self._learn(proposal)
        if verdict.accepted:
            self.history.clear()  # what was before the jump is on another line
            if resets:
                self._access.reset_moments()
        return verdict

    def state_dict(self) -> dict[str, Any]:
        """Return all that decides jumps to come; a proposal not yet tried is no part of it."""
        return {
            "step": self._step,
            "history": self.history.state_dict(),
            "predictors": {name: p.state_dict() for name, p in self.predictors.items()},
            "residuals": self.residuals.state_dict(),
            "corrections": {name: c.state_dict() for name, c in self.corrections.items()},
            "budget": self.budget.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where a saved jumper with the same settings stood."""
        saved = state["predictors"]
        if list(saved) != list(self.predictors):
            raise CheckpointError(
                f"the checkpoint's jumps are predicted by {', '.join(saved)}, this run's by "
                f"{', '.join(self.predictors)}; write the predictors of the checkpoint"
            )
        self.history.load_state_dict(state["history"])
        for name, predictor in self.predictors.items():
            predictor.load_state_dict(saved[name])
        self.residuals.load_state_dict(state["residuals"])
        for name, correction in self.corrections.items():
            correction.load_state_dict(state["corrections"][name])
        self.budget = self.settings.budget.restored(state["budget"])
        self._step = int(state["step"])
        self._proposal, self._refusal = None, ""

    def _tried(self, proposal: Proposal, loss_of_batches: Losses) -> Verdict:
        best: Verdict | None = None
        scales, access = self.settings.scales, self._access
        with self._room(), access.aside(), Trial(access, proposal.deltas) as trial:
            before = self._losses(loss_of_batches)
            for scale in scales:
                trial.jump(scale)
                verdict = decide(
                    before,
                    self._losses(loss_of_batches),
                    risk=self.settings.risk,
                    candidates=len(scales),
                    scale=scale,
                )
                if verdict.accepted:
                    trial.keep()
                    return verdict
                if best is None or not best.gain >= verdict.gain:
                    best = verdict
        assert best is not None
        return best

    @torch.no_grad()
    def _losses(self, loss_of_batches: Losses) -> list[float]:
        self._spend(self.settings.batches)
        losses = [float(loss) for loss in loss_of_batches()]
        if len(losses) != self.settings.batches:
            raise RecipeError(
                f"a jump is judged on {self.settings.batches} micro-batches, and {len(losses)} "
                f"losses were given; give as many, or write batches={len(losses)}"
            )
        return losses

    def _learn(self, proposal: Proposal) -> None:
        """Compare the last movements with what the predictor says of them without having them.

        What follows a jump that was kept is never known without it, so the past is asked; one that
        learns has seen it, and looks a little better than it is.
        """
        predictor, history = self._named(proposal.predictor), self.history
        known = min(
            max(round(proposal.ahead_steps / history.settings.every), 1),
            len(history) - predictor.needs,
        )
        if known < 1 or self.settings.correction is None:
            return
        self._spend(self.settings.predictor_cost * predictor.cost)
        horizon, then = known * history.settings.every, history.without_last(known)
        predicted = predictor.predict(then, ahead_steps=horizon)
        actual = history.combine([0.0] * (len(history) - 1 - known) + [1.0] * known)
        residual = Residual(
            step=proposal.step,
            horizon=horizon,
            layers=measure(predicted, actual),
            features=proposal.features,
            confidence=proposal.confidence,
            predictor=predictor.name,
        )
        self.residuals.add(residual)
        of_layers = layer_features(then, ahead_steps=horizon)
        self.corrections[predictor.name].update(residual, of_layers)

    def _named(self, name: str) -> Predictor:
        if name not in self.predictors:
            raise RecipeError(
                f"the predictor {name!r} was asked, and there are {', '.join(self.predictors)}; "
                "write one of these"
            )
        return self.predictors[name]

    def _spend(self, cost: float) -> None:
        self.budget = self.budget.after_spending(cost)


def _mean(features: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(math.fsum(column) / len(features) for column in zip(*features, strict=True))
