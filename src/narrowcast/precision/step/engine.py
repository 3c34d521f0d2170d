"""The engine of a prepared model: what is in force on it, and the parts of its step.

`Prepared.step` is `begin_step` (the host catches up), `queue_update` (all that the device does,
which a CUDA graph can capture) and `end_step` (the numbers are copied to the host).
"""

import contextlib
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from narrowcast.errors import DivergedError
from narrowcast.precision.fp8.state import FirstScales, Fp8Model
from narrowcast.precision.gradients.check import Checked, Unscaled, clip_and_unscale
from narrowcast.precision.gradients.loss_scale import ScaleRequest, Scales, Settings, scale_parts
from narrowcast.precision.plan.gains import GemmRows
from narrowcast.precision.plan.plan import Plan, changes_between, with_rows
from narrowcast.precision.plan.policy import Policy
from narrowcast.precision.plan.wording import Wording
from narrowcast.precision.products.autocast import autocast_off
from narrowcast.precision.products.regions import (
    Pass,
    RegionEntry,
    get_entry,
    passing_back,
    tf32_products,
)
from narrowcast.precision.step.buffers import BufferFormats, BufferGuard, preserve_grads_and_buffers
from narrowcast.precision.step.checks import (
    check_buckets,
    check_gradients_exist,
    check_learning_rates,
    check_not_fp16,
    check_not_monitored,
    check_plan,
    explain_dtypes,
    explaining_dtypes,
)
from narrowcast.precision.step.learned_rows import await_rows, stop_awaiting
from narrowcast.precision.step.outcome import Outcome, pack
from narrowcast.precision.step.step_log import Losing, Schedules, StepLog
from narrowcast.precision.weights.lookahead import Lookahead, check_lookahead
from narrowcast.precision.weights.trained import TrainedWeights, undone_on_failure
from narrowcast.precision.weights.update_path import update_path

_log = logging.getLogger(__name__)


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
        present = weights.with_gradients()
        if present:
            scales.take_unscaled(name, weights, present)
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
    inv_scale = scales.inv_scale(present)
    check_not_fp16(weights.gradients(present))
    watch.before_step(scaled=True, doing="unscale()")
    _average_replicated(weights)
    checked = weights.check_gradients(present, inv_scale)
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
    """Divide the loss scale out of unused gradients that still have it."""
    present = weights.with_gradients()
    inv_scale = scales.inv_scale(present) if present else None
    if inv_scale is not None and weights.ownership.gradients.are_scaled:
        weights.multiply_gradients(present, inv_scale)


def look_at_gradients(
    present: Sequence[int], scales: Scales, weights: TrainedWeights
) -> tuple[Checked, Tensor | None]:
    """Return what is true of the gradients in these places, and what still unscales them."""
    unscaled = weights.ownership.gradients.unscaled
    if unscaled is None:
        _average_replicated(weights)
    inv_scale = scales.inv_scale(present) if unscaled is None else None
    checked = weights.check_gradients(present, inv_scale)
    return (checked if unscaled is None else unscaled.and_then(checked, present)), inv_scale


def move_scales(
    checked: Checked, present: Sequence[int], scales: Scales, weights: TrainedWeights
) -> Tensor:
    """Move every loss scale after a step; return whether none could have given way to it."""
    unscaled = weights.ownership.gradients.unscaled
    if unscaled is None:
        return scales.update(checked, present)
    overflowed = ~unscaled.checked.finite
    # Inf or NaN from an edit is not an overflow, so the loss scale does not change.
    return scales.update(unscaled.checked, unscaled.present) | ~(checked.finite | overflowed)


def _average_replicated(weights: TrainedWeights) -> None:
    """Average the gradients of weights that every rank holds whole beside sharded ones."""
    if weights.ranks is not None:
        weights.ranks.average_replicated(dtype=weights.reduce_dtype)


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


@final
class Engine:
    """What is in force: weights as they are kept, loss scales, the fp8 side; and the step."""

    plan: Plan
    scales: Scales
    fp8: Fp8Model

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        plan: Plan,
        *,
        clip_norm: float | None,
        schedules: Schedules,
        loss_scale: Settings | None,
        scale_groups: Sequence[str],
        ema_decay: float | None,
        lookahead: Lookahead | None,
        max_skipped_steps: int,
        lost_updates_every: int,
        fused_optimizer: bool | None,
        emulate: bool | None,
    ) -> None:
        self.model, self.optimizer, self.schedules = model, optimizer, schedules
        self._meter_every, self.emulate = lost_updates_every, emulate
        self.clip_norm = clip_norm
        """Largest total norm of the gradients; another trainer's loop may set it per step."""
        self.weights = TrainedWeights(model, optimizer)
        # What a step packs if there is nothing to report.
        self._zero, self._one, self._none = torch.tensor(
            [0.0, 1.0, -1.0], device=self.weights.device
        ).unbind()
        # What can be refused is refused before anything is changed.
        self._request = ScaleRequest(
            model,
            settings=loss_scale,
            scale_groups=scale_groups,
            names=self.weights.names,
            device=self.weights.device,
        )
        scales, self._fused_requested = self._request.first(plan.policy), fused_optimizer
        fused, path = update_path(optimizer, plan.policy, requested=fused_optimizer)
        self.weights.check_plan(plan, fused=fused, path=path)
        if lookahead is not None:
            check_lookahead(optimizer, plan, lookahead)
        self.buffer_formats = BufferFormats(model)
        with undone_on_failure(model, self.weights):
            self.weights.apply(plan, fused=fused)
            self.buffers = BufferGuard(model)
            self._take(plan, scales, path)
            if ema_decay is not None:
                self.weights.keep_average(decay=ema_decay)
            if lookahead is not None:
                self.weights.look_ahead(lookahead)
            self.log = StepLog(
                schedules,
                max_skipped_steps=max_skipped_steps,
                weights=dict(zip(self.weights.names, self.weights.all, strict=True)),
                scaled=self.scales.value is not None,
                wording=Wording(policy=plan.policy, clipped=clip_norm is not None),
            )
            self.log.params_lose = _lose(plan.policy)
            self.steps_begun = 0
            self.first_scales = FirstScales(self.log.counts, device=self.weights.device)
            self.begin_first_scales(step=0, applied_before=0)
            await_rows(self)

    def set_plan(
        self, plan: Plan, *, loss_scale: Settings | None, keep_scale: bool = False
    ) -> None:
        """Replace the plan in force, or raise without a change; synchronises with the device.

        A loss scale that both policies need continues, with `keep_scale` also one that the new
        policy does not need. Delayed scaling continues for modules of the same name.
        """
        applied = self.log.counts().applied
        check_not_monitored(self.model, doing="set_policy()")
        fused, path, scales = self._resolve_change(
            plan, loss_scale=loss_scale, keep_scale=keep_scale
        )
        before = self.fp8
        self.weights.convert(self.plan, plan, fused=fused, seed=self.steps_begun)
        self._take(plan, scales, path)
        self.fp8.take_over(before)
        self.log.scaled = self.scales.value is not None
        self.log.params_lose = _lose(plan.policy)
        self.log.wording = replace(self.log.wording, policy=plan.policy)
        self.begin_first_scales(step=self.steps_begun, applied_before=applied)
        await_rows(self)

    def set_rows(self, rows: GemmRows) -> None:
        """Plan again for other numbers of rows; synchronises with the device."""
        before, plan = self.plan, with_rows(self.plan, self.model, rows)
        changed = len(changes_between(before, plan))
        if changed:
            self.set_plan(plan, loss_scale=None)
            self.fp8.refresh()
        else:
            self.plan = plan
        stop_awaiting(self.model)
        await_rows(self)
        _log.info("planned for rows of %s: %d modules have other formats", rows, changed)

    def check_plan_change(
        self, plan: Plan, *, loss_scale: Settings | None = None, keep_scale: bool = False
    ) -> None:
        """Raise what `change` to this plan would raise; change nothing."""
        self._resolve_change(plan, loss_scale=loss_scale, keep_scale=keep_scale)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return what holds over the forward pass and the loss; make fp8 weights ready for it."""
        if torch.compiler.is_compiling():
            return self.entry.region()
        self.take_back_first_scales()
        self.fp8.refresh()
        return Pass(self.entry, explain=partial(explain_dtypes, self.model))

    def backward(self, loss: Tensor, *, name: str, retain_graph: bool) -> None:
        """Add a loss's gradients to those already there, scaled as the policy needs."""
        watch, scaled = self.weights.ownership.gradients, self.scales.value is not None
        watch.before_backward(scaled=scaled)
        if self.weights.ranks is not None:
            self.weights.ranks.see_loss(loss)
        with explaining_dtypes(self.model), self.buffers.passes_again():
            add_gradients(
                loss,
                name=name,
                retain_graph=retain_graph,
                scales=self.scales,
                weights=self.weights,
                entry=self.entry,
            )
        watch.after_backward(scaled=scaled)

    def unscale(self) -> None:
        """Divide the loss scale out of the gradients now, before the step does. Does not wait."""
        if self.scales.value is not None:
            unscale_gradients(self.scales, self.weights)
        else:
            _average_replicated(self.weights)

    def begin_step(self) -> None:
        """Raise if every step would be skipped; otherwise let the host catch up."""
        try:
            self.log.check_not_diverged()
        except DivergedError:
            self.buffers.restore()
            raise
        check_learning_rates(self.optimizer)
        self.weights.ownership.check_not_swapped(doing="step()")
        self.weights.ownership.check_unchanged()
        self.log.sync()
        if self.weights.lookahead is not None:
            self.weights.lookahead.before_step(self.steps_begun, self.optimizer)

    @torch.no_grad()
    def queue_update(self, present: Sequence[int], *, metered: bool) -> Tensor:
        """Queue the update of a step; return its numbers, packed, on the device.

        Does not synchronise if the optimizer skips on the device, so a CUDA graph can capture it.
        """
        checked, inv_scale = look_at_gradients(present, self.scales, self.weights)
        scale = self._one if self.scales.value is None else self.scales.value.clone()
        lost = None
        on_device = self._decides_on_device
        if on_device or bool(checked.finite):
            lost = self.weights.update(
                present,
                factor=clip_and_unscale(checked, inv_scale, clip_norm=self.clip_norm),
                finite=checked.finite if on_device else None,
                metered=metered,
            )
            if lost is not None and self.weights.ranks is not None:
                lost = self.weights.ranks.mean(lost)
        at_floor = move_scales(checked, present, self.scales, self.weights)
        growth = self.scales.growth_since(scale)
        self.fp8.advance(checked.finite, loss_growth=growth)
        self.buffers.after_passes(checked.finite)
        self.weights.forget_gradients()
        return pack(
            finite=checked.finite,
            norm=checked.norm,
            scale=scale,
            next_scale=self._one if self.scales.value is None else self.scales.value,
            lost=self._zero if lost is None else lost,
            at_floor=at_floor,
            norms=checked.norms,
            bad_rank=self._none if checked.bad_rank is None else checked.bad_rank,
            mixed=self._none if checked.mixed is None else checked.mixed,
        )

    def end_step(
        self,
        packed: Tensor,
        present: Sequence[int],
        *,
        metered: bool,
        forward_only: bool = False,
    ) -> Outcome:
        """Send a step's numbers on their way to the host, and return what will hold them."""
        self.steps_begun += 1
        torch.clear_autocast_cache()  # it has weights as they were, where `autocast()` goes on
        self.buffers.end_step()
        self.weights.ownership.gradients.end_step()
        outcome = Outcome(
            packed,
            step=self.steps_begun,
            names=[self.weights.last_uses[i] for i in present],
            lr=_rate(self.optimizer),
            metered=metered,
            forward_only=forward_only,
            sync=self.log.sync,
        )
        self.log.enter(outcome)
        if self.weights.device.type == "cpu":
            self.log.sync()
        return outcome

    @torch.no_grad()
    def forward_step(self, loss: Tensor) -> Outcome:
        """Count a step without a backward pass; it is skipped if its loss is not finite."""
        self.begin_step()
        scale = self._one if self.scales.value is None else self.scales.value.clone()
        packed = pack(
            finite=loss.isfinite(),
            norm=self._zero * math.nan,  # there are no gradients
            scale=scale,
            next_scale=scale,
            lost=self._zero,
            at_floor=self._zero,
            norms=self._zero.new_empty(0),
            bad_rank=self._none,
            mixed=self._none,
        )
        return self.end_step(packed, (), metered=False, forward_only=True)

    @property
    def is_metered(self) -> bool:
        """Whether the next step counts lost updates."""
        return self._meter_every > 0 and self.steps_begun % self._meter_every == 0

    def scale_values(self) -> list[Tensor]:
        """Return copies of every loss scale in force: of the losses, then of parts of the model."""
        return [value.clone() for value in self.scales.values]

    @contextlib.contextmanager
    def isolated(self, scales: Sequence[Tensor] | None = None) -> Iterator[None]:
        """Undo all traces of passes in the block except random numbers; steps are not allowed."""
        values = self.scales.values if scales is None else scales
        with (
            self.first_scales.unchanged(),
            self.fp8.unchanged(),
            self.scales.set_to(values),
            self.weights.ownership.gradients.aside(),
            self.buffers.aside(),
            preserve_grads_and_buffers(self.model, self.weights.all),
        ):
            yield

    def begin_first_scales(self, *, step: int, applied_before: int) -> None:
        """Track the delayed scales of the model from this step count on."""
        emulated = self.plan.emulated
        self.first_scales.begin(
            self.fp8, emulated=emulated, step=step, applied_before=applied_before
        )

    def take_back_first_scales(self) -> None:
        """Forget the delayed scales that skipped steps alone have decided."""
        self.first_scales.take_back(step=self.steps_begun)

    def _resolve_change(
        self, plan: Plan, *, loss_scale: Settings | None, keep_scale: bool
    ) -> tuple[bool, str, Scales]:
        """Return whether the update would be fused, and why, and the loss scales; or refuse."""
        check_plan(self.model, plan, mine=self.plan)
        check_buckets(self.model, plan)
        fused, path = update_path(self.optimizer, plan.policy, requested=self._fused_requested)
        self.weights.check_plan(plan, fused=fused, path=path)
        if self.weights.lookahead is not None:
            check_lookahead(self.optimizer, plan, self.weights.lookahead.settings)
        scales = self._request.next(
            plan.policy, scales=self.scales, settings=loss_scale, keep=keep_scale
        )
        return fused, path, scales

    def _take(self, plan: Plan, scales: Scales, path: str) -> None:
        """Activate a plan whose weight formats are already in place."""
        self.plan, self.entry = plan, get_entry(self.model)
        self.entry.model.tell(self.buffers)
        self.scales, self.update_path = scales, path
        self.fp8 = Fp8Model(self.model)
        scale_parts(self._request.parts, scales.parts)

    @property
    def _decides_on_device(self) -> bool:
        """Whether the update skips by itself; otherwise the host decides, one wait on a GPU."""
        torch_fused = bool(getattr(self.optimizer, "_step_supports_amp_scaling", False))
        on_gpu = self.weights.device.type == "cuda"
        return self.weights.fused is not None or (torch_fused and on_gpu)


def _lose(policy: Policy) -> Losing:
    """Return how a weight of this policy may lose an update, all of it."""
    if policy.params == "fp32":
        return "never"
    match policy.master:
        case "none":
            return "always"
        case "stochastic":
            return "by chance"
        case _:
            return "never"


def _rate(optimizer: torch.optim.Optimizer) -> float:
    """Return the learning rate of the first group; NaN where an optimizer finds its own."""
    rate = optimizer.param_groups[0].get("lr")
    return math.nan if rate is None else float(rate)
