"""`explain`: a verdict on given micro-batches, for loops of one's own."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from narrowcast.health.diagnose.diagnosis import Diagnosis
from narrowcast.health.diagnose.passes import ReplayInputs
from narrowcast.health.diagnose.replay import replay
from narrowcast.precision.step.prepared import Prepared


def explain(
    prepared: Prepared,
    batches: Sequence[Any],
    loss_fn: Callable[[Any], Tensor],
    *,
    loss_scale: float | None = None,
) -> Diagnosis | None:
    """Replay a step and return where the first inf or NaN appeared.

    Call it before the weights change again. Weights, gradients, buffers, scales and RNG state stay
    unchanged.

    Args:
        prepared: The run that skipped the step.
        batches: The micro-batches of the step.
        loss_fn: Function that returns the loss of one micro-batch.
        loss_scale: Loss scale of the step, `outcome.loss_scale`. After an overflow the active scale
            is lower. None: the active scale.

    Returns:
        The diagnosis, or None if everything is finite.

    Example:
        >>> if not outcome.applied:
        ...     print(nc.explain(run, [batch], loss_fn, loss_scale=outcome.loss_scale))
    """
    replay_inputs = ReplayInputs.before(prepared, batches)
    if loss_scale is not None and replay_inputs.scales:
        first, *others = replay_inputs.scales
        replay_inputs = replace(replay_inputs, scales=[torch.full_like(first, loss_scale), *others])
    return replay(prepared, replay_inputs, loss_fn)
