"""Which weights a run returns: the trained ones or an average, selected by a metric."""

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, final

import torch
from torch import Tensor, nn

from narrowcast.errors import CheckpointError, ConfigError
from narrowcast.hardware.randomness import preserve_rng
from narrowcast.precision.dtensor import local_part
from narrowcast.precision.nested import copy_tensors
from narrowcast.precision.step.outcome import Outcome
from narrowcast.precision.step.prepared import Prepared
from narrowcast.precision.step.weight_swap import swapped_in
from narrowcast.precision.weights.master import in_buckets
from narrowcast.strategies.hybrid.readout.race import Better, Race, race
from narrowcast.training.evaluation import in_eval_mode

STEP_COST = 3.0
"""Forward passes that a training step of one micro-batch costs (Kaplan et al. 2020)."""
TRAINED = "trained"
"""Name of the trained weights, which are not an average."""

B = TypeVar("B")


@dataclass(frozen=True, kw_only=True)
class ChoosingBudget:
    """What was spent on choosing among averages, and what is left."""

    share: float = 0.01
    """The largest cost of choosing, as a share of the training done so far."""
    step_cost: float = STEP_COST
    spent: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigError(
                "readout_budget must be a share of the run's work above 0 and up to 1, got "
                f"{self.share}. Write a number such as 0.01."
            )

    def left(self, steps: int, *, part: float = 1.0) -> float:
        """Return what can be spent after so many steps, if only this part of it may be."""
        return max(0.0, part * self.share * steps * self.step_cost - self.spent)

    def after_spending(self, passes: float) -> "ChoosingBudget":
        return replace(self, spent=self.spent + passes)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The selected weights, and the score of all candidates."""

    name: str
    scores: Mapping[str, float]
    """Metric by name; on fewer batches, the selected one's plus the difference there."""
    batches: Mapping[str, int] = field(default_factory=dict)
    """Batches that each was compared on; empty if each was evaluated in full."""

    @property
    def is_average(self) -> bool:
        """Whether an average was better than the trained weights."""
        return self.name != TRAINED


def half_lives_in_steps(shares: Iterable[float], steps: int) -> dict[str, float]:
    """Return half-lives in steps by name, from shares of a run."""
    return {f"average {share:g}": max(share * steps, 1.0) for share in sorted(set(shares))}


def best_name(scores: Mapping[str, float], *, better: Better) -> str:
    """Return the name of the best; the first of equals, the trained weights if none is finite."""
    sign = 1 if better == "lower" else -1
    finite = {name: sign * score for name, score in scores.items() if math.isfinite(score)}
    return min(finite, key=lambda name: finite[name]) if finite else TRAINED


@final
class Readouts:
    """The candidate weights of a run: the trained ones, and averages by half-life."""

    def __init__(
        self,
        prepared: Prepared,
        *,
        half_lives: Mapping[str, float],
        every: int | None = None,
        budget: ChoosingBudget | None = None,
        agreed: Callable[[list[float]], list[float]] = list,
    ) -> None:
        """Take the half-lives of averages, in steps, by name; `agreed` makes ranks agree."""
        self._prepared = prepared
        self.bank = AverageBank(prepared, list(half_lives.values()), every=every)
        self._numbers = {name: number for number, name in enumerate(half_lives)}
        self.chosen = TRAINED
        """Name of the weights that were selected last."""
        self.budget = ChoosingBudget() if budget is None else budget
        """What comparing on batches has cost, and may cost."""
        self._steps, self._agreed = 0, agreed

    @property
    def names(self) -> list[str]:
        """Names of all candidates; averages only once they were updated."""
        return [TRAINED, *(self._numbers if self.bank.is_filled else ())]

    def after_step(self, outcome: Outcome) -> None:
        """Update the averages if due; does not synchronise."""
        self._steps = outcome.step
        if self._numbers and outcome.step % self.bank.every == 0:
            self.bank.update(applied=outcome.applied_on_device)

    def choose(self, measure: Callable[[str], float], *, better: Better) -> Choice:
        """Measure each candidate in the model and select the best; `measure` gets its name."""
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
        """Compare the candidates on the same batches, and select the best. Synchronises.

        Every candidate draws the same random numbers, which are not the run's.
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
            return self._agreed([float(each) for each in values])

        left = self.budget.left(self._steps) if passes is None else passes
        raced = race(self.names, look, batches=batches, passes=left, better=better)
        # A look that is had whatever is left leaves later choices, the last of all, what is theirs.
        self.budget = self.budget.after_spending(min(raced.passes, left))
        self.chosen = best_name(raced.means(), better=better)
        scores = raced.scores(self.chosen)
        return Choice(name=self.chosen, scores=scores, batches=raced.batches), raced

    def swapped_in(self, name: str | None = None) -> contextlib.AbstractContextManager[None]:
        """Use the weights of a candidate inside the block, by default the selected one."""
        name = self._known(name)
        if name == TRAINED:
            return self._prepared.use_eval_weights()
        return swapped_in(self._prepared.engine, "reading_out", self._value_fn(name))

    def weights(self, name: str | None = None) -> dict[str, Tensor]:
        """Return the weights of a candidate in fp32 by name, as copies for a plain model."""
        name = self._known(name)
        if name == TRAINED:
            return self._prepared.eval_state_dict()
        return self._prepared.engine.weights.copied_by_name(self._value_fn(name))

    def state_dict(self) -> dict[str, Any]:
        counts = {"names": list(self._numbers), "steps": self._steps, "spent": self.budget.spent}
        return {"chosen": self.chosen, **counts, **self.bank.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict()`; raise if it has other averages."""
        if list(state.get("names", self._numbers)) != list(self._numbers):
            raise CheckpointError(
                f"The saved state has the averages {', '.join(state['names']) or 'none'}, and this "
                f"run has {', '.join(self._numbers) or 'none'}. Use the half_lives it was saved "
                "with."
            )
        self.bank.load_state_dict({key: state[key] for key in ("updates", "averages")})
        self.chosen = self._known(str(state["chosen"]))
        self._steps = int(state["steps"])
        self.budget = replace(self.budget, spent=float(state["spent"]))

    def _known(self, name: str | None) -> str:
        name = self.chosen if name is None else name
        if name != TRAINED and name not in self._numbers:
            there = ", ".join([TRAINED, *self._numbers])
            raise ConfigError(
                f"The name of candidate weights must be one of {there}, got {name!r}."
            )
        return name

    def _value_fn(self, name: str) -> Callable[[nn.Parameter], Tensor]:
        number, weights = self._numbers[name], self._prepared.engine.weights

        def value(weight: nn.Parameter) -> Tensor:
            average = self.bank.of(number, weight)
            return weights.full(weight) if average is None else average

        return value


SMALL = 2**16
"""Weights with fewer elements are updated together, because a launch for each takes longer."""
UPDATES_PER_HALF_LIFE = 10
"""With ten samples per half-life, an average differs from that of all steps by less than noise."""


def steps_between(half_lives: Sequence[float]) -> int:
    """Return the steps between two updates for these half-lives, in steps."""
    return max(1, int(min(half_lives, default=1) / UPDATES_PER_HALF_LIFE))


@final
class AverageBank:
    """fp32 averages of each trained weight, one set per half-life."""

    def __init__(
        self, prepared: Prepared, half_lives: Sequence[float], *, every: int | None = None
    ) -> None:
        """`half_lives` and `every` are in steps; by default `every` is a tenth of the shortest."""
        if any(not half_life > 0 for half_life in half_lives):
            raise ConfigError(
                f"half_lives must be numbers of steps above 0, got {list(half_lives)}."
            )
        self._weights = prepared.engine.weights
        self._parameters = [p for p in self._weights.all if p.requires_grad]
        self._places = {p: i for i, p in enumerate(self._parameters)}
        self.every = steps_between(half_lives) if every is None else every
        """Steps between two updates."""
        self.half_lives = tuple(half_lives)
        self._updates = 0
        self._averages = [
            [torch.zeros_like(p.detach(), dtype=torch.float32) for p in self._parameters]
            for _ in half_lives
        ]

    @property
    def is_filled(self) -> bool:
        return self._updates > 0

    def bytes(self) -> int:
        return sum(a.numel() * a.element_size() for each in self._averages for a in each)

    def of(self, number: int, weight: nn.Parameter) -> Tensor | None:
        """Return an average of a weight; None if the weight is not trained."""
        index = self._places.get(weight)
        return None if index is None else self._averages[number][index]

    @torch.no_grad()
    def update(self, *, applied: Tensor | None = None) -> None:
        """Move the averages towards the weights, unless the device flag `applied` is false.

        At first an average is the plain mean, so that a long half-life does not hold on to the
        initial weights. Does not synchronise.
        """
        if not self.half_lives:
            return
        self._updates += 1
        moves = 1.0 if applied is None else applied.to(torch.float32)
        for bucket in in_buckets(range(len(self._parameters)), self._parameters):
            values = [self._weights.full(self._parameters[i]) for i in bucket]
            local = [local_part(value).float() for value in values]
            for half_life, averages in zip(self.half_lives, self._averages, strict=True):
                share = max(1 - 0.5 ** (self.every / half_life), 1 / self._updates)
                these = [local_part(averages[i]) for i in bucket]
                _move(these, local, share * moves)

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self._updates, "averages": self._averages}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        copy_tensors(self._averages, state["averages"])
        self._updates = int(state["updates"])


def _move(averages: Sequence[Tensor], weights: Sequence[Tensor], share: float | Tensor) -> None:
    """Interpolate averages towards weights; does not synchronise."""
    small: tuple[list[Tensor], list[Tensor]] = [], []
    for average, weight in zip(averages, weights, strict=True):
        if average.numel() < SMALL:
            small[0].append(average)
            small[1].append(weight)
        else:
            average.lerp_(weight, share)  # one pass over memory, where lists take three
    if small[0]:
        way = torch._foreach_sub(small[1], small[0])
        torch._foreach_mul_(way, share)
        torch._foreach_add_(small[0], way)
