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
    """Run the passes of a step again and name the first number that is not finite; None if none is.

    `loss_of(batch)` is the loss of one micro-batch, `loss_scale` that of the step in question
    (`outcome.loss_scale`): after an overflow the scale in force is lower. Ask before the weights
    move again. Weights, gradients, buffers, scales and random numbers are left as they are.
    """
    replay_inputs = ReplayInputs.before(prepared, batches)
    if loss_scale is not None and replay_inputs.scales:
        first, *others = replay_inputs.scales
        replay_inputs = replace(replay_inputs, scales=[torch.full_like(first, loss_scale), *others])
    return replay(prepared, replay_inputs, loss_fn)
