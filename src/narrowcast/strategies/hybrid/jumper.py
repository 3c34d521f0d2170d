"""Jumps of the weights: predict a movement, compare losses, keep it or put every bit back.

A run whose jumps are all rejected computes what a run without jumps does, bit for bit. Measured
against a tuned schedule, jumps saved nothing (0.94 to 1.01 of the steps, `benchmarks/hybrid.py`),
so they may cost a hundredth of the run and end after five rejections.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist, fmean, stdev
from typing import Any, final

import torch
from torch import Tensor

from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.numerics.rounding import nearest
from narrowcast.precision.dtensor import as_sharded
from narrowcast.precision.step.prepared import Prepared
from narrowcast.strategies.hybrid.history import WeightHistory

MAX_REJECTIONS = 5
"""Rejected jumps in a row after which no further jump is tried."""
FEWEST_JUMPS = 3
"""Jumps that are tried before their acceptance rate decides."""
FEWEST_PAIRS = 8
"""Differences below which their own spread is too uncertain to judge by."""
WHOLE, HALF = 1.0, 0.5
"""Fractions of a predicted movement: the whole, then half if that is rejected."""
RISK = 0.05
"""Largest probability that a jump is accepted which changes nothing."""

Losses = Callable[[], Sequence[float]]
"""Evaluates the same micro-batches at every call, without dropout, and returns their losses."""


@dataclass(frozen=True, kw_only=True)
class JumpAccount:
    """Jumps so far: what they cost, and how many were accepted."""

    spent: float = 0.0
    tried: int = 0
    accepted: int = 0
    rejections: int = 0
    """Since the last one that was accepted."""

    @property
    def confidence(self) -> float:
        """Probability that the next jump is accepted: a half before the first one."""
        return (self.accepted + 1) / (self.tried + 2)

    def after_jump(self, *, cost: float, accepted: bool) -> "JumpAccount":
        return JumpAccount(
            spent=self.spent + cost,
            tried=self.tried + 1,
            accepted=self.accepted + accepted,
            rejections=0 if accepted else self.rejections + 1,
        )

    def is_confident(self, threshold: float) -> bool:
        """Return whether the acceptance rate can still be as high as a threshold."""
        mean = self.confidence
        deviation = math.sqrt(mean * (1 - mean) / (self.tried + 3))
        return self.tried < FEWEST_JUMPS or mean + deviation >= threshold

    def to_json(self) -> dict[str, float]:
        return asdict(self)


@dataclass(frozen=True)
class JumpResult:
    """Whether a jump was accepted, and why."""

    accepted: bool
    gain: float
    """How much the mean loss fell; NaN where no loss was computed."""
    standard_error: float
    """Of the gain."""
    why: str
    scale: float = 0.0
    """Share of the prediction that was judged last."""


def attempt_cost(batches: int, *, rounds: int = 4) -> float:
    """Return the forward passes of one prediction and `rounds` of losses."""
    return 1.0 + rounds * batches


@final
class Jumper:
    """Keeps past weights, tries jumps along their line, and counts what that costs."""

    def __init__(
        self, prepared: Prepared, *, every: int, budget: float, batches: int = FEWEST_PAIRS
    ) -> None:
        """Take a snapshot `every` so many steps, and spend `budget` forward passes at most."""
        if any(as_sharded(p) is not None for p in prepared.engine.weights.all):
            raise UnsupportedError(
                "Jumps need weights on one device, got weights sharded over several. Train on one "
                "device, or write strategy.preset=balanced."
            )
        self.history = WeightHistory(every=every)
        self.account = JumpAccount()
        self._engine = prepared.engine
        self._budget, self._batches = budget, batches

    def observe(self, step: int) -> None:
        """Take a snapshot after a training step if one is due; does not wait for the device."""
        if self.account.rejections >= MAX_REJECTIONS:
            self.history.clear()
        elif self.history.due(step):
            self.history.take(step, self._read())

    def refusal(self) -> str:
        """Return why the budget allows no jump; empty if it does."""
        rejections, cost = self.account.rejections, attempt_cost(self._batches)
        left = max(0.0, self._budget - self.account.spent)
        if rejections >= MAX_REJECTIONS:
            return f"{rejections} jumps in a row were rejected"
        if cost > left:
            return f"a jump costs {cost:g} forward passes, and {left:.4g} are left"
        return ""

    def jump(
        self,
        ahead_steps: int,
        losses: Losses,
        *,
        before_correction: Callable[[], object] | None = None,
    ) -> JumpResult:
        """Move the weights to where they are predicted in so many steps, if the loss falls.

        `before_correction` is called before half of the movement is tried. Synchronises.
        """
        refusal = self.refusal()
        if refusal:
            return JumpResult(False, math.nan, math.nan, refusal)
        deltas = self.history.predict(ahead_steps)
        result = self._attempt(deltas, losses, scale=WHOLE)
        cost = attempt_cost(self._batches, rounds=2)
        if not result.accepted:
            if before_correction is not None:
                before_correction()
            result = self._attempt(deltas, losses, scale=HALF)
            cost = attempt_cost(self._batches)
        self.account = self.account.after_jump(cost=cost, accepted=result.accepted)
        if result.accepted:
            self.history.clear()
        return result

    def state_dict(self) -> dict[str, Any]:
        return {"history": self.history.state_dict(), "account": self.account.to_json()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.history.load_state_dict(state["history"], device=self._engine.weights.device)
        self.account = JumpAccount(**state["account"])

    @torch.no_grad()
    def _attempt(self, deltas: Sequence[Tensor], losses: Losses, *, scale: float) -> JumpResult:
        exact = [tensor.clone() for tensor in self._held()]
        accepted = False
        with self._isolated():
            try:
                before = self._losses(losses)
                self._write(torch._foreach_add(self._read(), list(deltas), alpha=scale))
                result = judge(before, self._losses(losses), scale=scale)
                accepted = result.accepted
            finally:
                if not accepted:
                    for tensor, saved in zip(self._held(), exact, strict=True):
                        tensor.copy_(saved)
        return result

    def _losses(self, losses: Losses) -> list[float]:
        values = [float(loss) for loss in losses()]
        if len(values) != self._batches:
            raise ConfigError(
                f"A jump is judged on {self._batches} micro-batches, got {len(values)} losses. "
                "Return one loss per micro-batch."
            )
        return values

    def _read(self) -> list[Tensor]:
        """Return every weight in fp32, with every digit of its master weight."""
        weights = self._engine.weights
        weights.ownership.check_not_swapped(doing="a jump")
        return [weights.full(p).float() for p in weights.all]

    def _write(self, values: Sequence[Tensor]) -> None:
        """Write every weight and its master weight in place, rounded to nearest."""
        weights = self._engine.weights
        masters = weights.masters
        numbers = {p: i for i, p in enumerate(masters.parameters)}
        for p, value in zip(weights.all, values, strict=True):
            p.copy_(nearest(value, p.dtype))
            if p in numbers:
                masters.take(numbers[p], value)

    def _held(self) -> list[Tensor]:
        """Return all tensors that hold weights: working weights and master weights."""
        weights = self._engine.weights
        masters = weights.masters
        extra = [masters.residual(i) for i in range(len(masters.parameters))]
        return [*(p.detach() for p in weights.all), *(t for t in extra if t is not None)]

    @contextlib.contextmanager
    def _isolated(self) -> Iterator[None]:
        """Leave gradients, buffers, fp8 scales and random numbers as they were."""
        device = self._engine.weights.device
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), self._engine.isolated():
            yield


def judge(before: Sequence[float], after: Sequence[float], *, scale: float = WHOLE) -> JumpResult:
    """Accept where the mean loss fell by more than chance allows, one-sided and paired.

    A single micro-batch has a winner's curse: its noise selects jumps that do nothing. So eight or
    more are compared, each with itself.
    """
    pairs = len(before)
    if pairs != len(after) or pairs < FEWEST_PAIRS:
        raise ConfigError(
            f"A jump needs {FEWEST_PAIRS} or more pairs of losses, got {pairs} before and "
            f"{len(after)} after it."
        )
    if not all(map(math.isfinite, (*before, *after))):
        return JumpResult(False, math.nan, math.nan, "a loss is not finite", scale)
    falls = [b - a for b, a in zip(before, after, strict=True)]
    gain, error = fmean(falls), stdev(falls) / math.sqrt(pairs)
    margin = student_quantile(1 - RISK / len((WHOLE, HALF)), freedom=pairs - 1) * error
    accepted = gain > margin
    comparison = "more" if accepted else "no more"
    why = f"the loss fell by {gain:.3g}, {comparison} than the {margin:.3g} that chance allows"
    if gain < 0:
        why = f"the loss rose by {-gain:.3g}"
    return JumpResult(accepted, gain, error, why, scale)


def student_quantile(probability: float, *, freedom: int) -> float:
    """Return Student's t by its expansion about the normal distribution.

    Abramowitz & Stegun 26.7.5; right to 2 % for 7 degrees of freedom and a risk of 1 %.
    """
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return math.fsum([z, *(term / freedom**n for n, term in enumerate(terms, start=1))])
