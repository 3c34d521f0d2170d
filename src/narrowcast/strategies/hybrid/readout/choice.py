"""Which weights a run returns: the point it trains, or an average; chosen where it is measured.

Choosing never moves what is trained. The measure is the task's own, on its held-out data, so the
choice is among a few and its bias is small; it is the same data that early stopping looks at. What
it costs is one measurement of each, or, batch by batch, no more than a share of the run.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, final

import torch
from torch import Tensor, nn

from narrowcast.errors import CheckpointError, ConfigError
from narrowcast.hardware.randomness import preserve_rng
from narrowcast.precision.step.outcome import Outcome
from narrowcast.precision.step.prepared import Prepared
from narrowcast.precision.step.weight_swap import swapped_in
from narrowcast.strategies.hybrid.budget import ChoosingBudget
from narrowcast.strategies.hybrid.readout.bank import AverageBank
from narrowcast.strategies.hybrid.readout.race import Better, Race, race
from narrowcast.training.evaluation import in_eval_mode

TRAINED = "trained"
"""The read-out that is no average: what the optimizer, or the lookahead point, has come to."""

B = TypeVar("B")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A read-out, and what each was measured at."""

    name: str
    scores: Mapping[str, float]
    """The measure by the name of the read-out; of one that was judged on fewer batches, by what it
    differs from the chosen one there."""
    batches: Mapping[str, int] = field(default_factory=dict)
    """How many batches each was judged on; empty where each was measured as a whole."""

    @property
    def is_average(self) -> bool:
        """Whether an average was better than what is trained: a prediction that came true."""
        return self.name != TRAINED


def half_lives_in_steps(shares: Iterable[float], steps: int) -> dict[str, float]:
    """Return half-lives that are given as shares of a run, by what their read-outs are called."""
    return {f"average {share:g}": max(share * steps, 1.0) for share in sorted(set(shares))}


def best_name(scores: Mapping[str, float], *, better: Better) -> str:
    """Return the name of the best; the first of equals, what is trained where none is a number."""
    sign = 1 if better == "lower" else -1
    finite = {name: sign * score for name, score in scores.items() if math.isfinite(score)}
    return min(finite, key=lambda name: finite[name]) if finite else TRAINED


@final
class Readouts:
    """The read-outs of a run: what is trained, and its averages by half-life."""

    def __init__(
        self,
        prepared: Prepared,
        *,
        half_lives: Mapping[str, float],
        every: int | None = None,
        budget: ChoosingBudget | None = None,
    ) -> None:
        """Take the half-lives of averages, in steps, by what the read-outs are called."""
        self._prepared = prepared
        self.bank = AverageBank(prepared, list(half_lives.values()), every=every)
        self._numbers = {name: number for number, name in enumerate(half_lives)}
        self.chosen = TRAINED
        """The read-out that the last measurement preferred."""
        self.budget = ChoosingBudget() if budget is None else budget
        """What choosing batch by batch has cost, and may."""
        self._steps = 0

    @property
    def names(self) -> list[str]:
        """Every read-out that there is now; averages of nothing are none."""
        return [TRAINED, *(self._numbers if self.bank.is_filled else ())]

    def after_step(self, outcome: Outcome) -> None:
        """Let the averages follow, when it is time to; waits for nothing."""
        self._steps = outcome.step
        if self._numbers and outcome.step % self.bank.every == 0:
            self.bank.update(applied=outcome.applied_on_device)

    def choose(self, measure: Callable[[str], float], *, better: Better) -> Choice:
        """Measure each read-out in the model's place, and prefer the best from now on.

        `measure` gets the name and returns a number.
        """
        scores = {}
        for name in self.names:
            with self.swapped_in(name):
                scores[name] = measure(name)
        self.chosen = best_name(scores, better=better)
        return Choice(name=self.chosen, scores=scores)

    def choose_on(
        self,
        batches: Iterable[B],
        measure: Callable[[B], float | Tensor],
        *,
        better: Better,
        passes: float | None = None,
    ) -> tuple[Choice, Race]:
        """Compare the read-outs on as many of the same batches as may be, and prefer the best.

        `passes` is how many forward passes may be spent; none: what the budget has left. Each is
        looked at once at least. The model is in eval mode, without gradients, and every read-out
        draws the same random numbers, none of them the run's. Waits for the device.
        """
        model = self._prepared.model
        device = self._prepared.engine.weights.device

        def look(name: str, chunk: Sequence[B]) -> list[float]:
            with (
                self.swapped_in(name),
                preserve_rng(device),
                in_eval_mode(model),
                torch.no_grad(),
            ):
                values = [measure(batch) for batch in chunk]
            return [float(each) for each in values]

        left = self.budget.left(self._steps) if passes is None else passes
        raced = race(self.names, look, batches=batches, passes=left, better=better)
        # A look that is had whatever is left leaves later choices, the last of all, what is theirs.
        self.budget = self.budget.after_spending(min(raced.passes, left))
        self.chosen = best_name(raced.means(), better=better)
        scores = raced.scores(self.chosen)
        return Choice(name=self.chosen, scores=scores, batches=raced.batches), raced

    def swapped_in(self, name: str | None = None) -> contextlib.AbstractContextManager[None]:
        """Let the model have a read-out inside the block; by default the one that was chosen."""
        name = self._known(name)
        if name == TRAINED:
            return self._prepared.use_eval_weights()
        return swapped_in(self._prepared.engine, "reading_out", self._value_fn(name))

    def weights(self, name: str | None = None) -> dict[str, Tensor]:
        """Return a read-out in fp32 by name, which the plain model loads; copies."""
        name = self._known(name)
        if name == TRAINED:
            return self._prepared.eval_state_dict()
        return self._prepared.engine.weights.copied_by_name(self._value_fn(name))

    def state_dict(self) -> dict[str, Any]:
        """Return the averages, the choice, and what choosing has cost."""
        counts = {"names": list(self._numbers), "steps": self._steps, "spent": self.budget.spent}
        return {"chosen": self.chosen, **counts, **self.bank.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where a saved run stood; refuse that of other averages."""
        if list(state.get("names", self._numbers)) != list(self._numbers):
            raise CheckpointError(
                f"the state is of a run with the read-outs {', '.join(state['names']) or 'none'}, "
                f"and this one has {', '.join(self._numbers) or 'none'}; give it the half_lives "
                "that it was saved with"
            )
        self.bank.load_state_dict({key: state[key] for key in ("updates", "averages")})
        self.chosen = self._known(str(state["chosen"]))
        self._steps = int(state["steps"])
        self.budget = replace(self.budget, spent=float(state["spent"]))

    def _known(self, name: str | None) -> str:
        name = self.chosen if name is None else name
        if name != TRAINED and name not in self._numbers:
            there = ", ".join([TRAINED, *self._numbers])
            raise ConfigError(f"no read-out is called {name!r}; there are {there}")
        return name

    def _value_fn(self, name: str) -> Callable[[nn.Parameter], Tensor]:
        number, weights = self._numbers[name], self._prepared.engine.weights

        def value(weight: nn.Parameter) -> Tensor:
            average = self.bank.of(number, weight)
            return weights.full(weight) if average is None else average

        return value
