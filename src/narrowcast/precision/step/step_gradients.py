"""A step's gradients: those of a loss times its scale are added up, and the scale divided out."""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from narrowcast.precision.gradients.check import Checked, Unscaled, check_gradients
from narrowcast.precision.gradients.loss_scales import Scales
from narrowcast.precision.products.autocast import autocast_off
from narrowcast.precision.products.entry import RegionEntry, passing_back
from narrowcast.precision.products.regions import tf32_products
from narrowcast.precision.step.checks import check_gradients_exist, check_not_fp16
from narrowcast.precision.weights.trained import TrainedWeights


def add_gradients(
    loss: Tensor,
    *,
    name: str,
    retain_graph: bool,
    scales: Scales,
    weights: TrainedWeights,
    entry: RegionEntry,
) -> None:
    """Add a loss's gradients to those of the weights, scaled as the policy needs."""
    scale = scales.of_loss(name)
    scaled = loss if scale is None else loss.float() * scale.value
    if not scales.per_loss:
        _run(scaled, entry, retain_graph=retain_graph)
        return
    others = [p.grad for p in weights.all]
    weights.forget_gradients()
    _run(scaled, entry, retain_graph=retain_graph)
    with torch.no_grad():
        fresh = [p.grad for p in weights.all if p.grad is not None]
        if fresh:
            scales.take_unscaled(name, fresh)
        for p, other in zip(weights.all, others, strict=True):
            if other is not None:
                p.grad = other if p.grad is None else p.grad.add_(other)


@torch.no_grad()
def unscale_gradients(scales: Scales, weights: TrainedWeights) -> None:
    """Divide the loss scale out of the gradients, once, and keep what was found in them."""
    watch = weights.ownership.gradients
    if watch.unscaled is not None:
        return
    present = weights.with_gradients()
    check_gradients_exist(present, doing="unscale()")
    gradients, inv_scale = weights.gradients(present), scales.inv_scale(present)
    check_not_fp16(gradients)
    watch.before_step(scaled=True, doing="unscale()")
    checked = check_gradients(gradients, inv_scale, take_norms=weights.norms)
    if weights.fused is not None:
        weights.fused.norms.taken_places()  # not kept: they may be moved before the step
    if inv_scale is not None:  # those of losses with their own scales are unscaled already
        weights.multiply_gradients(present, inv_scale)
    watch.unscaled = Unscaled(checked, present)


@contextlib.contextmanager
def dropped_on_failure(weights: TrainedWeights) -> Iterator[None]:
    """Drop the gradients of a step that an error ends: some may be clipped or unscaled by now."""
    try:
        yield
    except BaseException:
        weights.forget_gradients()
        weights.ownership.gradients.end_step()
        raise


@torch.no_grad()
def give_back_gradients(scales: Scales, weights: TrainedWeights) -> None:
    """Divide the loss scale out of gradients that no step has used, if they have it.

    Those that were unscaled, edited, or made by another backward pass are left as they are.
    """
    present = weights.with_gradients()
    inv_scale = scales.inv_scale(present) if present else None
    if inv_scale is not None and weights.ownership.gradients.are_scaled:
        weights.multiply_gradients(present, inv_scale)


def look_at_gradients(
    present: Sequence[int], scales: Scales, weights: TrainedWeights
) -> tuple[Checked, Tensor | None]:
    """Return what is true of the gradients in these places, and what still unscales them."""
    unscaled = weights.ownership.gradients.unscaled
    inv_scale = scales.inv_scale(present) if unscaled is None else None
    checked = check_gradients(weights.gradients(present), inv_scale, take_norms=weights.norms)
    return (checked if unscaled is None else unscaled.and_then(checked, present)), inv_scale


def move_scales(
    checked: Checked, present: Sequence[int], scales: Scales, weights: TrainedWeights
) -> Tensor:
    """Move every loss scale after a step; return whether none could have given way to it."""
    unscaled = weights.ownership.gradients.unscaled
    if unscaled is None:
        return scales.update(checked, present)
    overflowed = ~unscaled.checked.finite
    # What an edit has made not finite is no overflow: no scale is to move, or would have helped.
    return scales.update(unscaled.checked, unscaled.present) | ~(checked.finite | overflowed)


def _run(scaled: Tensor, entry: RegionEntry, *, retain_graph: bool) -> None:
    if entry.region.emulated:
        # Activation checkpointing runs forward passes again, here. A mode sees `backward` of a
        # tensor and steps aside for all that happens in it; that of an edge passes it by.
        with autocast_off(entry.region.device_type), passing_back(), entry.region.products():
            edge = torch.autograd.graph.get_gradient_edge(scaled)
            one = torch.ones_like(scaled)
            torch.autograd.backward(edge, grad_tensors=one, retain_graph=retain_graph)
        return
    # tf32 is a switch of the whole process, so the backward pass needs it thrown as well.
    native_tf32 = entry.region.format_name == "tf32"
    with passing_back(), tf32_products() if native_tf32 else contextlib.nullcontext():
        scaled.backward(retain_graph=retain_graph)
