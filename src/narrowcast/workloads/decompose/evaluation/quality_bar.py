"""How bad the worst masks are that importances allow: the bar that decompositions are held to."""

from collections.abc import Sequence

import torch
from torch import Tensor

from narrowcast.workloads.decompose.losses.adversary import PGD, initial, rising, split, stepped
from narrowcast.workloads.decompose.losses.terms import Step

ASCENTS, STEP_SIZE = 20, 0.1
"""Those of published figures."""


@torch.no_grad()
def quality_bar(
    steps: Sequence[Step], *, ascents: int = ASCENTS, step_size: float = STEP_SIZE
) -> Tensor:
    """Return for each seed (seeds,) the divergence under the worst sources that are found.

    One source for each component, and for what a site's components leave, at all positions of all
    batches: each ascent follows the gradient over all of them. Neither components nor importances
    get a gradient.
    """
    held = [step.hold() for step in steps]
    term = PGD(coefficient=1.0, step_size=step_size)
    (route,) = term.routes(held[0])
    rows = sum(step.rows for step in held)

    def divergence(values: Sequence[Tensor], step: Step) -> Tensor:
        return term.divergence(step, route, *split(values, step)) * (step.rows / rows)

    values = initial("random", held[0], 1)
    for _ in range(ascents):
        slopes = [torch.zeros_like(value) for value in values]
        for step in held:
            with torch.enable_grad():
                moving = [value.requires_grad_() for value in values]
                matches = rising(divergence(moving, step), moving)
            slopes = [slope + each for slope, each in zip(slopes, matches, strict=True)]
        values = stepped(values, slopes, step_size)
    return torch.stack([divergence(values, step) for step in held]).sum(dim=0)
