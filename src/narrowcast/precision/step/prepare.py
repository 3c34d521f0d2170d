"""A model made ready: its formats, its optimizer, its loss scale, and the step that joins them.

`Prepared` is the one thing here that changes. A step is: scaled backward passes, one look at the
gradients (norm, finite or not), unscale and clip in one multiplication, the optimizer, the scale.
Whether it is applied is decided on the device; the host learns of it later, and only then does the
learning-rate schedule move, so that it never moves on a skipped step.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from narrowcast.errors import DivergedError, RecipeError, UnsupportedError
from narrowcast.hardware import probe
from narrowcast.precision.gradients.check import Checked, check_gradients, clip_factor
from narrowcast.precision.gradients.loss_scale import LossScale
from narrowcast.precision.plan.diff import PrecisionChange, changes_between
from narrowcast.precision.plan.plan import Plan, make_plan
from narrowcast.precision.plan.policy import Policy
from narrowcast.precision.products.regions import tf32_products
from narrowcast.precision.step.buffers import BufferGuard
from narrowcast.precision.step.checks import (
    refuse_foreign_state,
    refuse_senseless,
    refuse_senseless_rates,
    refuse_unscaled_gradients,
    refuse_what_cannot_be,
)
from narrowcast.precision.step.cuda_graph import CapturedStep
from narrowcast.precision.step.engine import Carried
from narrowcast.precision.step.first_scales import FirstScales
from narrowcast.precision.step.isolation import grads_and_buffers_kept
from narrowcast.precision.step.outcome import Flight, Outcome, pack
from narrowcast.precision.step.stats import Finding, Stats
from narrowcast.precision.step.step_log import Ledger, Scheduler

PATIENCE = 50
"""Steps in a row that may be skipped, at the smallest scale, before training is given up."""
METER_EVERY = 10
"""Steps between two looks at lost updates: a look costs about one part in a hundred of a step."""


def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    policy: str | Policy | Plan = "default",
    clip_norm: float | None = None,
    scheduler: Scheduler | None = None,
    loss_scale: LossScale | Mapping[str, LossScale] | None = None,
    scale_groups: Sequence[str] = (),
    ema_decay: float | None = None,
    patience: int = PATIENCE,
    meter_every: int = METER_EVERY,
    emulate: bool | None = None,
    one_pass: bool | None = None,
) -> "Prepared":
    """Make a model train in a policy's formats, with any torch optimizer.

    The model and the optimizer are changed in place. `loss_scale` is a scale's settings, or several
    by the name of the loss; left out, a policy that needs one gets the default. `scale_groups` are
    globs of modules that have a further scale of their own. `meter_every=0` turns off the
    lost-update meter. `emulate` is as for `plan`, unless a plan is given. `one_pass` says whether
    AdamW and Adam are taken over by a kernel that updates all weights in one pass over memory: None
    where that runs and can stand in, False nowhere, True or it is refused (without a GPU its
    arithmetic is then done in plain torch). `Prepared.update_path` tells what is in force.
    """
    refuse_what_cannot_be(model, optimizer)
    refuse_senseless(clip_norm=clip_norm, ema_decay=ema_decay, patience=patience)
    chosen = policy
    if not isinstance(chosen, Plan):
        hardware = probe(str(next(model.parameters()).device))
        chosen = make_plan(model, chosen, hardware=hardware, emulate=emulate)
    if loss_scale is None and chosen.policy.needs_loss_scale:
        loss_scale = LossScale()
    return Prepared(
        model,
        optimizer,
        chosen,
        clip_norm=clip_norm,
        scheduler=scheduler,
        loss_scale=loss_scale,
        scale_groups=scale_groups,
        ema_decay=ema_decay,
        patience=patience,
        meter_every=meter_every,
        one_pass=one_pass,
    )


class Prepared:
    """A model with its formats, optimizer, master weights and loss scale; see `prepare`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        chosen: Plan,
        *,
        clip_norm: float | None,
        scheduler: Scheduler | None,
        loss_scale: LossScale | Mapping[str, LossScale] | None,
        scale_groups: Sequence[str],
        ema_decay: float | None,
        patience: int,
        meter_every: int,
        one_pass: bool | None,
    ) -> None:
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self._clip_norm, self._meter_every = clip_norm, meter_every
        self._carried = Carried(
            model,
            optimizer,
            chosen,
            loss_scale=loss_scale,
            scale_groups=scale_groups,
            one_pass=one_pass,
        )
        self._weights = self._carried.weights
        self._buffers = BufferGuard(model)
        if ema_decay is not None:
            self._weights.keep_average(decay=ema_decay)
        self._ledger = Ledger(
            scheduler,
            patience=patience,
            weights=len(self._weights.all),
            scaled=self._carried.scales.value is not None,
        )
        self._steps_begun = 0
        self._first_scales = FirstScales(self._ledger, device=self._weights.device)
        self._begin_scales(step=0, applied_before=0)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be copied or pickled: model and optimizer are held in common with the user."""
        raise UnsupportedError(
            "what prepare() returned can be neither copied nor pickled: it shares model and "
            "optimizer with whoever called prepare(); save its state_dict(), and load that into "
            "another that was prepared alike"
        )

    @property
    def plan(self) -> Plan:
        """What is carried out now."""
        return self._carried.plan

    @property
    def loss_scale(self) -> LossScale | None:
        """The settings of the loss scale in force; None without one. Of several, the first."""
        return self._carried.scales.settings

    def change(
        self, plan: Plan, *, loss_scale: LossScale | Mapping[str, LossScale] | None = None
    ) -> list[PrecisionChange]:
        """Carry out another plan from the next step on; return the modules it changes.

        Between two steps only. The optimizer, its learning rates and schedule, all counts, the
        average of the weights and what buffers hold stay what they are; weights, master weights and
        moments are converted as exactly as the new formats allow (see `TrainedWeights.change`). A
        loss scale that both policies need goes on where it is; one that only the new one needs
        begins with `loss_scale`, or the settings `prepare` was given, or the default. Delayed fp8
        scales go on in the modules that have had them. Waits for the device.

        Make the plan with `make_plan(prepared.model, …, hardware=prepared.plan.hardware)`.
        """
        self._weights.ownership.refuse_ema_swapped_in(doing="change()")
        if self._weights.with_gradients():
            raise RecipeError(
                "change() was called between backward() and step(), and gradients have the formats "
                "and the scale of the old policy; call it after step()"
            )
        before, applied = self.plan, self.steps_applied
        self._carried.change(plan, loss_scale=loss_scale, seed=self._steps_begun)
        self._ledger.scaled = self._carried.scales.value is not None
        self._begin_scales(step=self._steps_begun, applied_before=applied)
        return changes_between(before, plan)

    def refuse_impossible(self, plan: Plan) -> None:
        """Raise what `change` to this plan would raise; change nothing."""
        self._carried.terms(plan)

    def compute(self) -> contextlib.AbstractContextManager[Any]:
        """Hold this over the forward pass and the loss."""
        if not torch.compiler.is_compiling():
            self._first_scales.take_back(step=self._steps_begun)
        self._carried.fp8.refresh()
        return self._carried.region()

    def backward(self, loss: Tensor, *, name: str = "loss", retain_graph: bool = False) -> None:
        """Add a loss's gradients to those already there, scaled as the policy needs.

        Called n times before `step` this is gradient accumulation: divide the loss by n.
        """
        if loss.numel() != 1 or not loss.requires_grad:
            what = f"of shape {tuple(loss.shape)}" if loss.numel() != 1 else "without gradients"
            raise RecipeError(
                f"backward() was given a loss {what}; give it one number that depends on the "
                "model's weights, computed outside torch.no_grad()"
            )
        self._weights.ownership.has_scaled_gradients = True
        scale = self._carried.scales.of_loss(name)
        scaled = loss if scale is None else loss.float() * scale.value
        if not self._carried.scales.per_loss:
            self._run_backward(scaled, retain_graph=retain_graph)
            return
        others = [p.grad for p in self._weights.all]
        self._weights.forget_gradients()
        self._run_backward(scaled, retain_graph=retain_graph)
        with torch.no_grad():
            fresh = [p.grad for p in self._weights.all if p.grad is not None]
            if fresh:
                self._carried.scales.take_unscaled(name, fresh)
            for p, other in zip(self._weights.all, others, strict=True):
                if other is not None:
                    p.grad = other if p.grad is None else p.grad.add_(other)

    @torch.no_grad()
    def step(self, loss: Tensor | None = None) -> Outcome:
        """Update the weights, unless a gradient is not finite; then skip, and say so.

        Waits for the device only where the optimizer cannot skip by itself: fused ones can.
        """
        if loss is not None:
            with torch.enable_grad():
                self.backward(loss)
        self.begin_step()
        present = self._weights.with_gradients()
        if not present:
            raise RecipeError("step() found no gradients; call backward(loss) first, or step(loss)")
        if self._carried.scales.value is not None:
            refuse_unscaled_gradients(ours=self._weights.ownership.has_scaled_gradients)
        self._weights.ownership.has_scaled_gradients = False
        metered = self.is_metered
        return self.end_step(self.queue_update(present, metered=metered), present, metered=metered)

    def begin_step(self) -> None:
        """Refuse to go on where every step would be skipped; else let the host catch up."""
        try:
            self._ledger.refuse_to_go_on()
        except DivergedError:
            self._buffers.restore()
            raise
        refuse_senseless_rates(self.optimizer)
        self._weights.ownership.refuse_ema_swapped_in(doing="step()")
        self._weights.ownership.refuse_changes()
        self.sync()

    @torch.no_grad()
    def queue_update(self, present: Sequence[int], *, metered: bool) -> Tensor:
        """Queue all that a step does with its gradients; return its numbers, packed, on the device.

        Nothing here waits where the optimizer skips by itself, so a CUDA graph can capture it.
        """
        inverse = self._carried.scales.inverse(present)
        checked = check_gradients(
            [self._weights.all[i].grad for i in present], inverse, take_norms=self._weights.norms
        )
        one = torch.ones_like(checked.norm)
        scale = one if self._carried.scales.value is None else self._carried.scales.value.clone()
        lost = None
        on_device = self._carried.decides_on_device
        if on_device or bool(checked.finite):
            lost = self._weights.update(
                present,
                factor=self._factor(checked, inverse),
                finite=checked.finite if on_device else None,
                metered=metered,
            )
        at_floor = self._carried.scales.update(checked, present)
        growth = self._carried.scales.growth_since(scale)
        self._carried.fp8.advance(checked.finite, loss_growth=growth)
        self._buffers.after_step(checked.finite)
        self._weights.forget_gradients()
        return pack(
            finite=checked.finite,
            norm=checked.norm,
            scale=scale,
            next_scale=one if self._carried.scales.value is None else self._carried.scales.value,
            lost=lost,
            at_floor=at_floor,
            norms=checked.norms,
        )

    def end_step(self, packed: Tensor, present: Sequence[int], *, metered: bool) -> Outcome:
        """Send a step's numbers on their way to the host, and return what will hold them."""
        flight = Flight(
            packed,
            names=[self._weights.names[i] for i in present],
            lr=float(self.optimizer.param_groups[0]["lr"]),
            metered=metered,
        )
        self._steps_begun += 1
        outcome = self._ledger.enter(flight, step=self._steps_begun)
        if self._weights.device.type == "cpu":
            self.sync()
        return outcome

    def scale_values(self) -> list[Tensor]:
        """Return copies of every loss scale in force: of the losses, then of parts of the model."""
        return [value.clone() for value in self._carried.scales.values]

    @contextlib.contextmanager
    def isolated(self, scales: Sequence[Tensor] | None = None) -> Iterator[None]:
        """Leave no trace of the passes that are made inside the block, and make no step in it.

        Gradients, buffers, fp8 weights and what their scales come from are afterwards as they were.
        `scales`, from `scale_values`, are in force inside. Random numbers are drawn as ever.
        """
        values = self._carried.scales.values if scales is None else scales
        with (
            self._first_scales.unchanged(),
            self._carried.fp8.unchanged(),
            self._carried.scales.set_to(values),
            grads_and_buffers_kept(self.model),
        ):
            yield

    def sync(self) -> None:
        """Wait for every step so far, and let schedule, counts and findings catch up."""
        self._ledger.sync()

    def stats(self) -> Stats:
        """Return the counts of the run so far. Waits for the device."""
        self.sync()
        self._ledger.stats.bytes = self._weights.bytes() | self._carried.fp8.bytes()
        return self._ledger.stats

    def findings(self) -> list[Finding]:
        """Return what was found since this was last asked."""
        return self._ledger.findings()

    @property
    def captured(self) -> CapturedStep:
        """What a CUDA graph of this model's step needs."""
        return CapturedStep(self._weights, update_path=self.update_path)

    @property
    def is_metered(self) -> bool:
        """Whether the next step counts lost updates."""
        return self._meter_every > 0 and self._steps_begun % self._meter_every == 0

    @property
    def steps_attempted(self) -> int:
        """Steps tried."""
        return self._steps_begun

    @property
    def steps_applied(self) -> int:
        """Steps that moved the weights. Waits for the device."""
        self.sync()
        return self._ledger.stats.applied

    @property
    def update_path(self) -> str:
        """What updates the weights, and why: the one-pass optimizer or torch's own."""
        return self._carried.update_path

    @property
    def has_average(self) -> bool:
        """Whether an average of the weights is kept."""
        return self._weights.average is not None

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Let the model use the averaged weights inside the block; without an average, nothing."""
        average = self._weights.average
        if average is None:
            yield
            return
        with (
            self._carried.fp8.amax_frozen(),
            self._weights.ownership.ema_swapped_in(),
            average.in_place_of_weights(),
        ):
            yield

    def full_weights(self) -> dict[str, Tensor]:
        """Return the model's state with every digit that is kept: master values, by name.

        Refused inside `averaged()`, where the model holds other weights.
        """
        self._weights.ownership.refuse_ema_swapped_in(doing="full_weights()")
        return self._weights.full_by_name()

    def release(self) -> nn.Module:
        """Undo `prepare`: plain modules, fp32 weights with all digits, the optimizer on them."""
        self._weights.ownership.refuse_ema_swapped_in(doing="release()")
        self.sync()
        self._weights.widen()
        return self.model

    def state_dict(self) -> dict[str, Any]:
        """Return all that decides the steps to come, but data order and random state."""
        self._weights.ownership.refuse_ema_swapped_in(doing="state_dict()")
        self.sync()
        # Or a run that goes on would, and one that resumes not.
        self._first_scales.take_back(step=self._steps_begun)
        average = self._weights.average
        return {
            "policy": str(self.plan.policy),
            "weights": self.model.state_dict(),
            "master": self._weights.masters.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "scales": self._carried.scales.state_dict(),
            "average": None if average is None else average.averages,
            "amax": self._carried.fp8.state_dict(),
            "applied_before": self._first_scales.applied_before,
            "stats": self._ledger.stats.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where a saved run stood; that of another run is refused and changes nothing."""
        refuse_foreign_state(state, mine=self.state_dict())
        self.model.load_state_dict(state["weights"])
        self._weights.masters.load_state_dict(state["master"])
        self._weights.load_optimizer(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        self._carried.scales.load_state_dict(state["scales"])
        if self._weights.average is not None:
            for mine, saved in zip(self._weights.average.averages, state["average"], strict=True):
                mine.copy_(saved)
        self._carried.fp8.load_state_dict(state["amax"])
        self._ledger.stats = Stats.from_state(state["stats"])
        self._steps_begun = self._ledger.stats.steps
        self._begin_scales(step=0, applied_before=int(state["applied_before"]))
        self._buffers.reset()

    def _begin_scales(self, *, step: int, applied_before: int) -> None:
        emulated, fp8 = self.plan.emulated, self._carried.fp8
        self._first_scales.begin(fp8, emulated=emulated, step=step, applied_before=applied_before)

    def _run_backward(self, scaled: Tensor, *, retain_graph: bool) -> None:
        if self.plan.emulated:
            # Activation checkpointing runs forward passes again, here. A mode sees `backward` of a
            # tensor and steps aside for all that happens in it; that of an edge passes it by.
            with self._carried.region():
                edge = torch.autograd.graph.get_gradient_edge(scaled)
                one = torch.ones_like(scaled)
                torch.autograd.backward(edge, grad_tensors=one, retain_graph=retain_graph)
            return
        # tf32 is a switch of the whole process, so the backward pass needs it thrown as well.
        native_tf32 = self.plan.policy.functional == "tf32"
        with tf32_products() if native_tf32 else contextlib.nullcontext():
            scaled.backward(retain_graph=retain_graph)

    def _factor(self, checked: Checked, inverse: Tensor | None) -> Tensor | None:
        """Return what each gradient is multiplied by, to unscale and clip it; None for by one."""
        factor = None if self._clip_norm is None else clip_factor(checked.norm, self._clip_norm)
        if inverse is not None:
            factor = inverse if factor is None else factor * inverse
        return factor
