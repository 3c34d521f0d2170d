"""The terms of a recipe and their weighted sum.

A small network takes as long for three copies of a batch as for one, because launches take the
time. So terms with random masks share one pass on devices with kernels.
"""

from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import Any, Literal

import torch
from torch import Tensor

from narrowcast.workloads.decompose.components.masked import has_kernels
from narrowcast.workloads.decompose.importance.masks import fixed_route, site_masks
from narrowcast.workloads.decompose.losses.adversary import PGD, PersistentPGD
from narrowcast.workloads.decompose.losses.penalties import Faithfulness, Minimality, SmoothL0
from narrowcast.workloads.decompose.losses.reconstruction import (
    HiddenActivations,
    ImportanceMasked,
    Stochastic,
    Unmasked,
    drawn,
)
from narrowcast.workloads.decompose.losses.terms import Loss, Step
from narrowcast.workloads.decompose.settings import LossesSection

KINDS: dict[str, type[Loss]] = {
    each.kind: each
    for each in (
        Faithfulness,
        Minimality,
        SmoothL0,
        Stochastic,
        ImportanceMasked,
        Unmasked,
        HiddenActivations,
        PGD,
        PersistentPGD,
    )
}


def make_losses(section: LossesSection) -> list[Loss]:
    """Return the terms with a coefficient."""
    losses = []
    for name, term in section.chosen.items():
        settings = term.model_dump()
        if name.endswith("_layerwise"):
            settings["routing"] = "layerwise"
        kind = name.removesuffix("_layerwise").removesuffix("_subset")
        losses.append(KINDS[kind](**settings))
    return losses


def total(
    losses: Sequence[Loss], step: Step, form: Sequence[int] | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the weighted sum over terms and seeds, and each term's mean over seeds."""
    chosen = [1] * len(losses) if form is None else form
    requested = [pair for pair in zip(losses, chosen, strict=True) if pair[1]]
    results = in_one_pass([loss for loss, _ in requested], step)
    terms = {
        loss.name: results[loss.name] if loss.name in results else loss(step, ascents)
        for loss, ascents in requested
    }
    # Times 1 and the sum over a single seed are launches that do nothing.
    weighed = [
        terms[loss.name] * loss.coefficient if loss.coefficient != 1 else terms[loss.name]
        for loss, _ in requested
    ]
    everything: Any = reduce(add, weighed) if weighed else torch.zeros(())
    parts = {name: each.detach() for name, each in terms.items()}
    if step.seeds == 1:
        return everything.reshape(()), {name: each.reshape(()) for name, each in parts.items()}
    return everything.sum(), {name: each.mean() for name, each in parts.items()}


def in_one_pass(losses: Sequence[Loss], step: Step) -> dict[str, Tensor]:
    """Return the terms that share one pass, by name: none, or at least two."""
    kernels = has_kernels(step.target.device.type)
    alike = [loss for loss in losses if isinstance(loss, Stochastic) and _may_share(loss, step)]
    if step.divergence != "mse" or not kernels or len(alike) < 2:
        return {}
    sites = len(step.lower)
    routings: list[Literal["all", "layerwise"]] = [
        "all" if loss.routing == "all" else "layerwise" for loss in alike
    ]
    route = fixed_route(routings, step.lower, saved=step.decomposition.fixed)
    masks = site_masks(route, step.lower, *drawn(step))
    output = step.masked(masks, copies=route.copies).output
    separate = step.squared_errors(output, copies=route.copies)  # (seeds, copies)
    each = separate.split([1 if loss.routing == "all" else sites for loss in alike], -1)
    return {
        loss.name: part.squeeze(-1) if part.shape[-1] == 1 else part.mean(-1)
        for loss, part in zip(alike, each, strict=True)
    }


def _may_share(loss: Stochastic, step: Step) -> bool:
    batched = loss.routing == "layerwise" and loss.is_batched(step)
    return not loss.recompute and (loss.routing == "all" or batched)
