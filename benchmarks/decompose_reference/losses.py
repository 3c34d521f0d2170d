"""The terms of the objective. What is drawn is drawn by `draw`, so that a test can choose it.

Terms are fp32: autocast makes them so on CUDA, and here they are so everywhere.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from decompose_reference.components import ComponentModel, Mask

Divergence = Callable[[Tensor, Tensor], Tensor]


class Draw(Protocol):
    """Uniform numbers between 0 and 1, of a shape."""

    def __call__(self, *shape: int, device: torch.device) -> Tensor: ...


def mse(target: Tensor, found: Tensor) -> Tensor:
    """Mean squared error."""
    return ((target.float() - found.float()) ** 2).mean()


def kl(target: Tensor, found: Tensor) -> Tensor:
    """KL(softmax(target) || softmax(found)), mean over positions."""
    log_p, log_q = target.float().log_softmax(-1), found.float().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean()


def faithfulness(deltas: Mapping[str, Tensor]) -> Tensor:
    """Squared deltas, mean over all weights."""
    total = sum((delta**2).sum() for delta in deltas.values())
    return total / sum(delta.numel() for delta in deltas.values())


def importance_minimality(upper: Mapping[str, Tensor], p: float) -> Tensor:
    """Sum over modules and components of the mean of (importance + 1e-12)^p over positions."""
    return sum(((g.float() + 1e-12) ** p).flatten(0, -2).mean(0).sum() for g in upper.values())


def stochastic_masks(
    lower: Mapping[str, Tensor], deltas: Mapping[str, Tensor], draw: Draw = torch.rand
) -> dict[str, Mask]:
    """Draw m = g + (1 - g) u for components, and u for deltas."""
    masks = {}
    for name, g in lower.items():
        m = g + (1 - g) * draw(*g.shape, device=g.device)
        masks[name] = Mask(components=m, delta=(deltas[name], draw(*g.shape[:-1], device=g.device)))
    return masks


def subset_routing(lower: Mapping[str, Tensor], draw: Draw = torch.rand) -> dict[str, Tensor]:
    """At each position, draw how many modules use components (from 1 to all), and which."""
    first = next(iter(lower.values()))
    leading, device, count = first.shape[:-1], first.device, len(lower)
    k = (draw(*leading, device=device) * count).long().clamp(max=count - 1) + 1
    # The place of each module in a random order, by two sorts.
    places = draw(count, *leading, device=device).argsort(0).argsort(0)
    return {name: places[at] < k for at, name in enumerate(lower)}


def routed(masks: Mapping[str, Mask], where: Mapping[str, Tensor]) -> dict[str, Mask]:
    """Use masks at some positions only."""
    return {name: replace(mask, routed=where[name]) for name, mask in masks.items()}


def reconstruction(
    model: ComponentModel,
    batch: Tensor,
    target: Tensor,
    masks: Mapping[str, Mask],
    divergence: Divergence,
) -> Tensor:
    """How far what comes out with these masks is from what the target gives."""
    return divergence(target, model(batch, masks))


def layerwise(
    model: ComponentModel,
    batch: Tensor,
    target: Tensor,
    masks: Mapping[str, Mask],
    divergence: Divergence,
) -> Tensor:
    """The same with one module at a time: as many passes as there are modules."""
    terms = [
        reconstruction(model, batch, target, {name: mask}, divergence)
        for name, mask in masks.items()
    ]
    return sum(terms) / len(terms)


def adversarial_masks(
    model: ComponentModel,
    batch: Tensor,
    target: Tensor,
    lower: Mapping[str, Tensor],
    deltas: Mapping[str, Tensor],
    divergence: Divergence,
    *,
    steps: int,
    step_size: float,
    where: Mapping[str, Tensor] | None = None,
    draw: Draw = torch.rand,
) -> dict[str, Mask]:
    """Return masks whose sources all positions share, and ascend the loss by signs (PGD)."""

    def masks_of(sources: Mapping[str, Tensor]) -> dict[str, Mask]:
        masks = {}
        for name, g in lower.items():
            s = sources[name].expand(*g.shape[:-1], -1)
            m = g + (1 - g) * s[..., :-1]
            masks[name] = Mask(components=m, delta=(deltas[name], s[..., -1]))
        return masks if where is None else routed(masks, where)

    sources = {
        name: draw(*[1] * (g.ndim - 1), g.shape[-1] + 1, device=g.device).requires_grad_()
        for name, g in lower.items()
    }
    for _ in range(steps):
        loss = reconstruction(model, batch, target, masks_of(sources), divergence)
        grads = torch.autograd.grad(loss, list(sources.values()))
        with torch.no_grad():
            for source, grad in zip(sources.values(), grads, strict=True):
                source.add_(step_size * grad.sign()).clamp_(0, 1)
    return masks_of({name: source.detach() for name, source in sources.items()})
