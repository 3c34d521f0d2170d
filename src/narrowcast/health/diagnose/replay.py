"""A step taken again, aside: which number was first not finite, whose fault it is, what helps.

What is to blame and what would help is tried, not guessed: the passes are taken again without what
is suspected in the batch, and in wider formats.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from narrowcast.health.diagnose.diagnosis import Diagnosis, Remedy
from narrowcast.health.diagnose.inputs import Extreme
from narrowcast.health.diagnose.locations import Location
from narrowcast.health.diagnose.passes import Around, Passes, ReplayInputs
from narrowcast.health.diagnose.remedy import find_remedy
from narrowcast.precision.step.prepared import Prepared

TENSORS = 6
"""Tensors with bad numbers that are each suspected alone."""


def replay(
    prepared: Prepared,
    replay_inputs: ReplayInputs,
    loss_fn: Callable[[Any], Tensor],
    *,
    around: Around | None = None,
    backward: Callable[[Tensor, int], None] | None = None,
) -> Diagnosis | None:
    """Take a step again without its update, and say where it went wrong; None where it does not.

    `backward` is given each loss and the number of micro-batches; left out, the loss is of one
    piece. Waits for the device.
    """
    passes = Passes(
        prepared=prepared, inputs=replay_inputs, loss_fn=loss_fn, around=around, backward=backward
    )
    extremes: list[Extreme] = []
    verdict = passes.take(extremes=extremes)
    if verdict is None:
        return None
    verdict = replace(verdict, wording=prepared.engine.log.wording)
    if verdict.role == "weight" and verdict.kind != "large":
        return verdict
    try:
        cause = _cause(verdict, passes, extremes)
        if cause is not None:
            return replace(
                verdict, location=Location("", "batch"), amax=abs(cause.value), extreme=cause
            )
        return replace(verdict, remedy=find_remedy(verdict, passes))
    except torch.OutOfMemoryError:
        # Wider formats hold more. What came first is known all the same.
        torch.cuda.empty_cache()
        return replace(verdict, remedy=Remedy())


def _cause(verdict: Diagnosis, passes: Passes, extremes: list[Extreme]) -> Extreme | None:
    """Return which of the bad numbers that passes were given, if any, made them go wrong."""
    suspects = [[each] for each in extremes[:TENSORS]]
    if len(extremes) > 1:
        suspects.append(extremes)  # where each alone would have been enough
    for zero in suspects:
        again = passes.take(zero=zero)
        if again is None or not again.has_same_location(verdict):
            return zero[0]
    return None
