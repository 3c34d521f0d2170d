"""Intervals by the bootstrap: documents drawn again and again, each time with their own tokens.

What is compared is compared on the same documents, so that a hard one counts on both sides. Random
masks are drawn again as well: twenty are a sample, too.
"""

import numpy as np
from numpy.typing import NDArray

from narrowcast.workloads.sft.ica.study.ablation import Interval

TIMES = 4000
BOUNDS = (2.5, 97.5)
Sums = NDArray[np.float64]


def difference(one: Sums, others: Sums, tokens: Sums, *, seed: int) -> Interval:
    """Return the mean loss of one less that of others, with its interval.

    `one` (documents) and `others` (masks, documents) are sums of losses over each document.
    """
    chance = np.random.default_rng(seed)
    documents, masks = len(one), len(others)
    drawn = chance.multinomial(documents, np.full(documents, 1 / documents), size=TIMES)
    weights = drawn / (drawn @ tokens)[:, None]  # (times, documents)
    chosen = chance.multinomial(masks, np.full(masks, 1 / masks), size=TIMES) / masks
    rest = ((weights @ others.T) * chosen).sum(1)
    low, high = np.percentile(weights @ one - rest, BOUNDS)
    value = (one.sum() - others.mean(0).sum()) / tokens.sum()
    return Interval(value=float(value), low=float(low), high=float(high))
