"""What each optimizer of a run needs to go on, with what it belongs to: its class and weights."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from narrowcast.precision.weights.multi_optimizer import member_optimizers
from narrowcast.precision.weights.trained import TrainedWeights


def optimizer_states(weights: TrainedWeights) -> list[dict[str, Any]]:
    """Return the state of each optimizer, its class, and its weights in its own order."""
    names = dict(zip(weights.all, weights.names, strict=True))
    return [
        {
            **each.state_dict(),
            "class": type(each).__name__,
            "weights": [f"{names[p]} of {tuple(p.shape)}" for p in weights.held[each]],
        }
        for each in member_optimizers(weights.optimizer)
    ]


def load_optimizer_states(weights: TrainedWeights, states: Sequence[Mapping[str, Any]]) -> None:
    """Give the optimizers saved states, bit for bit."""
    for each, state in zip(member_optimizers(weights.optimizer), states, strict=True):
        theirs = {key: state[key] for key in state if key not in ("class", "weights")}
        if weights.fused is not None:
            # It takes the tensors itself: torch would cast them, and put them on the device.
            each.load_state_dict({**theirs, "state": _without_tensors(theirs["state"])})
            weights.fused.restore(theirs)
        else:
            # torch keeps the tensors it is given, and another run may be using them.
            each.load_state_dict(copy.deepcopy(theirs))


def _without_tensors(state: Mapping[Any, Mapping[str, Any]]) -> dict[Any, dict[str, Any]]:
    return {
        key: {name: copy.deepcopy(v) for name, v in values.items() if not isinstance(v, Tensor)}
        for key, values in state.items()
    }
