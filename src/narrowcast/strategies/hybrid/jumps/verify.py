"""Accept or roll back: whether a jump has made the loss smaller, beyond what chance would.

One micro-batch has a winner's curse: of jumps that do nothing, those are accepted that its noise
favours. So a loss is compared on eight or more, each with itself, and the mean must be smaller by a
margin that the noise of the differences asks for, the larger the more jumps were tried.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev
from types import TracebackType
from typing import final

import torch
from torch import Tensor

from narrowcast.errors import RecipeError
from narrowcast.strategies.hybrid.jumps.access import ExactWeights, WeightAccess

FEWEST_PAIRS = 8
"""Differences below which their own spread is too uncertain to judge by."""
SCALES = (1.0, 0.5, 0.25)
"""Shares of a predicted movement that are tried, in this order."""


@dataclass(frozen=True)
class Verdict:
    """Whether a jump is kept, and why."""

    accepted: bool
    gain: float
    """How much smaller the mean loss was; negative where it was larger, NaN where none was seen."""
    standard_error: float
    """Of the gain."""
    why: str
    scale: float = 0.0
    """The share of the prediction that was judged."""


def decide(
    before: Sequence[float],
    after: Sequence[float],
    *,
    risk: float = 0.05,
    candidates: int = 1,
    scale: float = 1.0,
) -> Verdict:
    """Accept where the mean loss fell by more than chance would make it, one-sided and paired.

    Of jumps that change nothing, or make it worse, at most `risk` are accepted, all `candidates`
    that are tried from one place together. Fewer than eight pairs of losses are refused.
    """
    pairs = len(before)
    if pairs != len(after) or pairs < FEWEST_PAIRS:
        raise RecipeError(
            f"a jump was to be judged by {pairs} losses before and {len(after)} after it, and it "
            f"takes {FEWEST_PAIRS} or more pairs of the same micro-batches; give as many"
        )
    if not all(map(math.isfinite, (*before, *after))):
        return Verdict(False, math.nan, math.nan, "a loss is not finite", scale)
    fell = [b - a for b, a in zip(before, after, strict=True)]
    gain, error = fmean(fell), stdev(fell) / math.sqrt(pairs)
    margin = quantile(1 - risk / candidates, freedom=pairs - 1) * error
    accepted = gain - margin > 0
    comparison = "more" if accepted else "no more"
    why = f"the loss fell by {gain:.3g}, {comparison} than the {margin:.3g} that chance allows"
    if gain < 0:
        why = f"the loss rose by {-gain:.3g}"
    return Verdict(accepted, gain, error, why, scale)


def quantile(probability: float, *, freedom: int) -> float:
    """Return Student's t at a probability, right to 2 % for 7 degrees of freedom and a risk of 1 %.

    By its expansion about the normal one (Abramowitz & Stegun 26.7.5).
    """
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return math.fsum([z, *(term / freedom**n for n, term in enumerate(terms, start=1))])


@final
class Trial:
    """Weights that are moved inside a block, and are exactly what they were after it, unless kept.

    Also where the block raises. Does not wait for the device.
    """

    def __init__(
        self, access: WeightAccess, deltas: Sequence[Tensor], *, with_moments: bool = False
    ) -> None:
        """Try to move weights by `deltas`; `with_moments` takes back their reset too."""
        self._access, self._deltas, self._with_moments = access, list(deltas), with_moments
        self._exact: ExactWeights | None = None
        self._moved = self._kept = False

    def __enter__(self) -> "Trial":
        self._exact = self._access.snapshot(with_moments=self._with_moments)
        return self

    @torch.no_grad()
    def jump(self, scale: float) -> None:
        """Move the weights by a share of the deltas from where they were before the block."""
        self.roll_back()
        self._moved = True
        self._access.write(torch._foreach_add(self._access.read(), self._deltas, alpha=scale))

    def roll_back(self) -> None:
        """Put the weights back where they were before the block, bit for bit."""
        assert self._exact is not None
        if self._moved or self._with_moments:
            self._access.restore(self._exact)
        self._moved = False

    def keep(self) -> None:
        """Leave the weights where they are now."""
        self._kept = True

    def bytes(self) -> int:
        """Return what the copies take that the way back needs."""
        return 0 if self._exact is None else self._exact.bytes()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None or not self._kept:
            self.roll_back()
        self._exact = None
