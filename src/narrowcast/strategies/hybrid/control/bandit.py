"""Which predictor to ask, and how far ahead: a linear bandit that may also choose to hold.

LinUCB (Li et al. 2010) with whole matrices and forgetting: each arm is a ridge regression from a
few facts of the run to what a jump was worth, in steps; the arm with the highest upper bound is
chosen. To hold is worth nothing, exactly, so that it is chosen wherever no jump promises to pay.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from narrowcast.errors import CheckpointError, RecipeError
from narrowcast.strategies.hybrid.control.features import FeatureWindow


class Arm(NamedTuple):
    """A predictor and how many steps ahead it is asked for."""

    predictor: str
    horizon: int


HOLD = Arm("hold", 0)
"""No jump: nothing spent, nothing won."""

CONTEXT = ("always one", "instability", "trend", "score", "doubt", "log of the step")
"""The facts that `context` returns."""


class Choice(NamedTuple):
    """An arm, and why."""

    arm: Arm
    expected: float
    """What it is thought to be worth."""
    bonus: float
    """How much more it might be."""


def arms(predictors: Sequence[str], horizons: Sequence[int]) -> tuple[Arm, ...]:
    """Return every predictor with every horizon."""
    return tuple(Arm(predictor, horizon) for predictor in predictors for horizon in horizons)


def context(window: FeatureWindow, *, score: float, total: float) -> tuple[float, ...]:
    """Return the facts a jump is chosen by, all of the order of one; `CONTEXT` names them."""
    average = window.loss_average
    trend = average.spread / max(abs(average.slow), 1e-12)
    return (
        1.0,
        min(average.instability, 1.0),
        max(-1.0, min(1.0, 10 * trend)),
        score,
        min(total, 1.0),
        math.log10(1 + window.step) / 5,
    )


def worth(*, steps_gained: float, forwards: float, predictor_steps: float = 0.0) -> float:
    """Return what a jump was worth in steps: what it gained, less what finding out has cost.

    A forward pass counts a third of a step. `steps_gained` is what a rejected jump has none of.
    """
    return steps_gained - forwards / 3 - predictor_steps


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Bandit:
    """What is known of each arm; part of what a checkpoint keeps."""

    arms: tuple[Arm, ...]
    matrices: Tensor  # (arms, facts, facts), fp64
    """What has been seen of each arm's contexts: sums of outer products, with the ridge."""
    responses: Tensor  # (arms, facts), fp64
    """Sums of contexts times what came of them."""
    counts: tuple[int, ...]
    held: int = 0
    exploration: float = 1.0
    """How many deviations of doubt an arm is given."""
    ridge: float = 1.0
    memory: float = 500.0
    """Choices after which an old one counts for a third."""

    @classmethod
    def new(
        cls,
        arms: Sequence[Arm],
        *,
        facts: int = len(CONTEXT),
        exploration: float = 1.0,
        ridge: float = 1.0,
        memory: float = 500.0,
    ) -> "Bandit":
        """Return a bandit that knows nothing."""
        if not arms or HOLD in arms or len(set(arms)) < len(arms):
            raise RecipeError(
                f"{len(arms)} arms were given, {len(set(arms))} of them different; write each "
                "once, at least one, and leave out to hold, which there always is"
            )
        if not (exploration >= 0 and ridge > 0 and memory >= 1):
            raise RecipeError(
                f"exploration={exploration:g}, ridge={ridge:g}, memory={memory:g}: a bandit needs "
                "at least 0, more than 0, and at least 1"
            )
        return cls(
            arms=tuple(arms),
            matrices=ridge
            * torch.eye(facts, dtype=torch.float64, device="cpu").repeat(len(arms), 1, 1),
            responses=torch.zeros(len(arms), facts, dtype=torch.float64, device="cpu"),
            counts=(0,) * len(arms),
            exploration=exploration,
            ridge=ridge,
            memory=memory,
        )

    def choices(self, facts: Sequence[float]) -> tuple[Choice, ...]:
        """Return what each arm is thought to be worth here, and to hold at the end."""
        x = self._told(facts)
        solved = torch.linalg.solve(self.matrices, x.expand(len(self.arms), -1))
        expected = (solved * self.responses).sum(-1).tolist()
        bonus = (self.exploration * (solved @ x).clamp_min(0).sqrt()).tolist()
        rows = zip(self.arms, expected, bonus, strict=True)
        return (*(Choice(*row) for row in rows), Choice(HOLD, 0.0, 0.0))

    def choose(self, facts: Sequence[float]) -> Choice:
        """Return the arm that could be worth most; the first of those that are equal."""
        return max(self.choices(facts), key=lambda each: each.expected + each.bonus)

    def after(self, arm: Arm, facts: Sequence[float], *, reward: float) -> "Bandit":
        """Return the bandit after an arm was played; a jump that ended in a NaN cost a step."""
        keep = 1 - 1 / self.memory
        eye = self.ridge * torch.eye(self.matrices.shape[-1], dtype=torch.float64, device="cpu")
        matrices, responses = keep * self.matrices + (1 - keep) * eye, keep * self.responses
        if arm == HOLD:
            return replace(self, matrices=matrices, responses=responses, held=self.held + 1)
        if arm not in self.arms:
            raise RecipeError(f"no arm is {arm}; play one that `choose` returned")
        index, x = self.arms.index(arm), self._told(facts)
        matrices[index] += torch.outer(x, x)
        responses[index] += (reward if math.isfinite(reward) else -1.0) * x
        counts = tuple(count + (i == index) for i, count in enumerate(self.counts))
        return replace(self, matrices=matrices, responses=responses, counts=counts)

    def state_dict(self) -> dict[str, Any]:
        """Return what decides the choices from now on."""
        return {
            "arms": [list(arm) for arm in self.arms],
            "matrices": self.matrices.clone(),
            "responses": self.responses.clone(),
            "counts": list(self.counts),
            "held": self.held,
        }

    def restored(self, state: Mapping[str, Any]) -> "Bandit":
        """Return this bandit with what another of the same arms knew."""
        if [list(arm) for arm in state["arms"]] != [list(arm) for arm in self.arms]:
            raise CheckpointError(
                f"the saved bandit has the arms {state['arms']}, this one "
                f"{[list(arm) for arm in self.arms]}; write the predictors and horizons it had"
            )
        return replace(
            self,
            matrices=state["matrices"].clone(),
            responses=state["responses"].clone(),
            counts=tuple(state["counts"]),
            held=int(state["held"]),
        )

    def _told(self, facts: Sequence[float]) -> Tensor:
        x = torch.tensor(list(facts), dtype=torch.float64, device="cpu")
        if x.shape != self.responses.shape[1:] or not bool(x.isfinite().all()):
            raise RecipeError(
                f"a bandit of {self.responses.shape[1]} facts was told {list(facts)}; "
                "write as many finite numbers, as `context` does"
            )
        return x
