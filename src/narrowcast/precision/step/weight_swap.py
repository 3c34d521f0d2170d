"""Other values in the place of a model's weights for as long as a block lasts.

They lie in memory of their own, so that what is taken inside stays what it was, what is written
inside reaches nothing, and the weights are back where captured steps look for them.
"""

import contextlib
from collections.abc import Iterator

import torch

from narrowcast.precision.dtensor import replace_values
from narrowcast.precision.modules.rewrite import compact_recurrent
from narrowcast.precision.step.engine import Engine
from narrowcast.precision.weights.ownership import StandIn, ValueOf
from narrowcast.precision.weights.trained import TrainedWeights


@contextlib.contextmanager
def swapped_in(engine: Engine, what: StandIn, get_value: ValueOf) -> Iterator[None]:
    """Let the model have these values inside the block, in the formats of its weights."""
    weights = engine.weights
    with (
        engine.fp8.amax_frozen(),
        weights.ownership.swapped_in(what, get_value),
        _swapped_values(weights, get_value),
    ):
        # Weights that nothing stands in for must not move: captured steps look for them.
        compact_recurrent(engine.model, only=set(weights.all))
        yield


@contextlib.contextmanager
def _swapped_values(weights: TrainedWeights, get_value: ValueOf) -> Iterator[None]:
    stored, outer = [p.detach() for p in weights.all], dict(weights.aside)
    try:
        for parameter, own in zip(weights.all, stored, strict=True):
            value = get_value(parameter).to(parameter.dtype, copy=True)
            weights.aside.setdefault(parameter, own)  # the outermost block has the weight's own
            replace_values(parameter, value)
        _let_know(weights)
        yield
    finally:
        for parameter, own in zip(weights.all, stored, strict=True):
            replace_values(parameter, own)
        weights.aside = outer
        _let_know(weights)


def _let_know(weights: TrainedWeights) -> None:
    """Let whoever keeps something made from weights, fp8 or autocast, see that they are others."""
    torch.autograd.graph.increment_version(weights.all)
    torch.clear_autocast_cache()
