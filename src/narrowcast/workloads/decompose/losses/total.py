"""The number to minimise: terms with their weights, and those that draw masks alike in one pass.

A small network takes as long for a pass of three copies of a batch as for one: what takes time is
to launch it. So where there are kernels, terms of masks drawn at random are parts of one pass.
"""

from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import Any, Literal

import torch
from torch import Tensor

from narrowcast.workloads.decompose.components.fused import has_kernels
from narrowcast.workloads.decompose.importance.masks import Routing, fixed_route, site_masks
from narrowcast.workloads.decompose.losses.reconstruction import Stochastic, drawn
from narrowcast.workloads.decompose.losses.terms import Loss, Step


def total(
    losses: Sequence[Loss], step: Step, form: Sequence[int] | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the number to minimise, a sum over seeds, and each term's mean over them.

    `form` says how many steps each term's adversary takes; a term of 0 is left out.
    """
    chosen = [1] * len(losses) if form is None else form
    requested = [pair for pair in zip(losses, chosen, strict=True) if pair[1]]
    results = in_one_pass([loss for loss, _ in requested], step)
    terms = {
        loss.name: results[loss.name] if loss.name in results else loss(step, ascents)
        for loss, ascents in requested
    }
    # One by one these are launches that do nothing: times 1, and the sum over a single seed.
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
    """Return the terms that are parts of one pass, by name: none, or two and more.

    They draw masks anew in any case, so which pass they draw them in is of no account.
    """
    kernels = has_kernels(step.target.device.type)
    alike = [loss for loss in losses if isinstance(loss, Stochastic) and _may_share(loss, step)]
    if step.divergence != "mse" or not kernels or len(alike) < 2:
        return {}
    sites = len(step.lower)
    routings = [_as_fixed(loss.routing) for loss in alike]
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


def _as_fixed(routing: Routing) -> Literal["all", "layerwise"]:
    return "all" if routing == "all" else "layerwise"
