"""The ceiling of everything that only moves memory: one large copy on the device."""

import torch

from narrowcast.bench.measure.timing import Case, Trial
from narrowcast.bench.updates.weights import Weights

BYTES_PER_PARAMETER = 2 * 4


def build(weights: Weights) -> Trial:
    """Return a copy of as many fp32 numbers as there are parameters."""
    source = torch.ones(weights.count, device=weights.device)
    target = torch.empty_like(source)
    work = {"bytes": float(BYTES_PER_PARAMETER * weights.count)}
    case = Case(open=lambda: lambda: target.copy_(source), work=work, part_of_step=True)
    return Trial(cases={"step": case}, about={"bytes_per_parameter": BYTES_PER_PARAMETER})
