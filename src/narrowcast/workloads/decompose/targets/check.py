"""Says before a network is decomposed whether there is something in it to find.

A network whose outputs are all zero is reconstructed without error by nothing at all: every loss of
its decomposition is perfect. So is a network that never trained close to one that did, by most
measures. Both are refused here.
"""

import math

from torch import Tensor

from narrowcast.errors import ConfigError

TOLERANCE = 0.25
"""How far from what is wanted, 0.75, a feature may come out. A dropped one is 0.75 off; those
learnt fall short the more, the more share a dimension: by 0.03 in TMS 5-2, by 0.14 in 40-10."""
LEARNT_NATS = 0.1
"""By which share of log(vocabulary) a language model must be better than to guess evenly. One of
random weights is worse than that; one that knows how frequent words are is better by a third."""
MOST_NAMED = 8


def check_features(
    name: str, *, inputs: Tensor, wanted: Tensor, tolerance: float = TOLERANCE
) -> None:
    """Refuse toy networks that do not bring out each feature, and it alone; waits for the device.

    `given` (seeds, features, features) is what the networks say of each feature by itself.
    """
    off = ~((inputs - wanted).abs() <= tolerance)  # (seeds, features asked, features answered)
    wrong = off.any(dim=2).sum(dim=1)
    dead = (inputs == 0).all(dim=2).all(dim=1) | ~inputs.isfinite().all(dim=2).all(dim=1)
    if not wrong.any():
        return
    features = off.shape[1]
    if dead.any():
        fact = f"{_seeds(dead)}: all outputs are 0, inf or NaN"
    else:
        fact = (
            f"{_seeds(wrong > 0)}: the outputs for up to {int(wrong.max())} of {features} features "
            f"are wrong by more than {tolerance:g}"
        )
    raise ConfigError(f"model.toy={name} did not learn its task. {fact}")


def check_accuracy(name: str, *, accuracy: Tensor, least: float) -> None:
    """Refuse networks that answer rightly less often than they should; waits for the device."""
    wrong = ~(accuracy >= least)
    if wrong.any():
        raise ConfigError(
            f"model.toy={name} did not learn its task. {_seeds(wrong)}: accuracy must be at least "
            f"{least:.0%}, got {float(accuracy.min()):.0%}"
        )


def check_language(name: str, *, cross_entropy: float, vocabulary: int) -> None:
    """Refuse a language model that predicts no better than chance."""
    even = math.log(vocabulary)
    if not cross_entropy <= (1 - LEARNT_NATS) * even:
        raise ConfigError(
            f"model.path={name} predicts this text no better than chance: {cross_entropy:.2f} nats "
            f"per token, and chance is {even:.2f}. Give a trained model, and text for its "
            "tokenizer."
        )


def _seeds(wrong: Tensor) -> str:
    which = wrong.nonzero().flatten().tolist()
    named = ", ".join(str(seed) for seed in which[:MOST_NAMED])
    more = f" and {len(which) - MOST_NAMED} more" if len(which) > MOST_NAMED else ""
    return f"seed{'s' if len(which) > 1 else ''} {named}{more} of {len(wrong)} (counted from 0)"
