"""Jumps of the weights: predict a movement, compare losses, keep it or leave every bit.

The weights move only once a jump is accepted, so every checkpoint, evaluation and average between
two steps has verified weights.
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
from narrowcast.hardware.randomness import preserve_rng
from narrowcast.numerics.rounding import nearest
from narrowcast.precision.dtensor import as_sharded
from narrowcast.precision.step.prepared import Prepared
from narrowcast.strategies.hybrid.history import WeightHistory
from narrowcast.training.evaluation import in_eval_mode

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


@dataclass(frozen=True, kw_only=True)
class JumpAccount:
    """Jumps so far: what they cost, and how many were accepted."""

    spent: float = 0.0
    """Forward passes of all jumps."""
    wasted: float = 0.0
    """Forward passes of rejected jumps, which the budget limits."""
    tried: int = 0
    accepted: int = 0
    rejections: int = 0
    """Since the last one that was accepted."""

    @property
    def confidence(self) -> float:
        """Probability that the next jump is accepted: a half before the first one."""
        return (self.accepted + 1) / (self.tried + 2)

    def after_window(self, *, cost: float, accepted: bool, final: bool = True) -> "JumpAccount":
        """Return the account after a verification; one that is not `final` is tried by half."""
        return JumpAccount(
            spent=self.spent + cost,
            wasted=self.wasted + (0.0 if accepted else cost),
            tried=self.tried + final,
            accepted=self.accepted + accepted,
            rejections=0 if accepted else self.rejections + final,
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
    """Keeps past weights, compares predicted weights with the present, and counts the cost."""

    def __init__(
        self, prepared: Prepared, *, every: int, budget: float, batches: int = FEWEST_PAIRS
    ) -> None:
        """Take a snapshot `every` so many steps; rejected jumps cost `budget` forward passes."""
        if any(as_sharded(p) is not None for p in prepared.engine.weights.all):
            raise UnsupportedError(
                "Jumps need weights on one device, got weights sharded over several. Train on one "
                "device, or write strategy.preset=balanced."
            )
        self.history = WeightHistory(every=every)
        self.account = JumpAccount()
        self._engine = prepared.engine
        self._budget, self._batches = budget, batches
        self._ahead, self._scale = 0, WHOLE
        self._pairs: list[Tensor] = []
        """Losses of present and predicted weights, on the device: a row for each micro-batch."""
        self._deltas: list[Tensor] | None = None

    def observe(self, step: int) -> None:
        """Take a snapshot after a training step if one is due; does not wait for the device."""
        if self.account.rejections >= MAX_REJECTIONS:
            self.history.clear()
        elif self.history.due(step):
            self.history.take(step, self._read())

    def refusal(self) -> str:
        """Return why the budget allows no jump; empty if it does."""
        rejections, cost = self.account.rejections, attempt_cost(self._batches)
        left = max(0.0, self._budget - self.account.wasted)
        if rejections >= MAX_REJECTIONS:
            return f"{rejections} jumps in a row were rejected"
        if cost > left:
            return f"a rejected jump costs {cost:g} forward passes, and {left:.4g} are left"
        return ""

    def begin(self, ahead_steps: int, *, scale: float = WHOLE) -> None:
        """Begin to compare the present weights with those predicted in so many steps."""
        self._ahead, self._scale, self._pairs, self._deltas = ahead_steps, scale, [], None

    @torch.no_grad()
    def compare(self, losses: Callable[[], Tensor]) -> Tensor:
        """Return the present losses of a step's micro-batches; take note of the predicted ones.

        `losses()` returns a row for each micro-batch, the total loss first. Both calls get the same
        random numbers. Weights, gradients, buffers, fp8 scales and random numbers stay as they are.
        Does not synchronise.
        """
        device = self._engine.weights.device
        with self._engine.isolated(), in_eval_mode(self._engine.model):
            with preserve_rng(device), self._at_prediction():
                after = losses().detach()
            with preserve_rng(device):  # last, because health samples the last pass
                before = losses().detach()
        self._pairs.append(torch.stack([before[:, 0], after[:, 0]], dim=1).float())
        return before

    @torch.no_grad()
    def decide(self) -> JumpResult:
        """Judge the comparisons since `begin`; move the weights if they pass. Synchronises."""
        pairs = torch.cat(self._pairs).tolist()
        self._pairs = []
        before, after = [row[0] for row in pairs], [row[1] for row in pairs]
        result = judge(before, after, scale=self._scale)
        if result.accepted:
            self._move()
        whole = self._scale == WHOLE
        self.account = self.account.after_window(
            cost=2.0 * len(pairs) + whole,  # a prediction costs about one
            accepted=result.accepted,
            final=result.accepted or not whole,
        )
        return result

    def end(self) -> None:
        """Forget the past weights: what comes after a jump is on another line."""
        self.history.clear()
        self._pairs, self._deltas = [], None

    def state_dict(self) -> dict[str, Any]:
        return {
            "history": self.history.state_dict(),
            "account": self.account.to_json(),
            "ahead": self._ahead,
            "scale": self._scale,
            "pairs": list(self._pairs),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        device = self._engine.weights.device
        self.history.load_state_dict(state["history"], device=device)
        self.account = JumpAccount(**state["account"])
        self.begin(int(state["ahead"]), scale=float(state["scale"]))
        self._pairs = [t.to(device, copy=True) for t in state["pairs"]]

    def _move(self) -> None:
        """Write the predicted weights."""
        if self._deltas is None:
            self._deltas = self.history.predict(self._ahead)
        self._write(torch._foreach_add(self._read(), self._deltas, alpha=self._scale))

    @contextlib.contextmanager
    def _at_prediction(self) -> Iterator[None]:
        """Hold the predicted weights inside the block, then put every bit back."""
        exact = [tensor.clone() for tensor in self._held()]
        try:
            self._move()
            yield
        finally:
            for tensor, saved in zip(self._held(), exact, strict=True):
                tensor.copy_(saved)

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
