"""`Prepared`: what users hold of a model that was made ready.

A step is: scaled backward passes, one look at the gradients (norm, finite or not), unscale and clip
in one multiplication, the optimizer, the scale. Whether it is applied is decided on the device; the
host learns of it later, and only then does the learning-rate schedule move, so that it never moves
on a skipped step. How that is done, and the parts of a step for those who take it apart, is in
`engine`.
"""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.precision.dtensor import check_dtypes_stay
from narrowcast.precision.gradients.loss_scale import LossScale
from narrowcast.precision.gradients.scale_request import RequestedScale, settings_from
from narrowcast.precision.plan.diff import PrecisionChange, changes_between
from narrowcast.precision.plan.gains import Execution
from narrowcast.precision.plan.plan import Plan, make_plan
from narrowcast.precision.plan.presets import AnyPolicy
from narrowcast.precision.step.captured_step import SIGNATURES, CapturedStep
from narrowcast.precision.step.checks import (
    check_execution,
    check_gradients_exist,
    check_loss,
)
from narrowcast.precision.step.describe import described
from narrowcast.precision.step.engine import Engine
from narrowcast.precision.step.outcome import Outcome
from narrowcast.precision.step.saved_state import collect_state, load_state
from narrowcast.precision.step.stats import Stats
from narrowcast.precision.step.step_gradients import dropped_on_failure, give_back_gradients
from narrowcast.precision.step.weight_swap import swapped_in
from narrowcast.precision.weights.multi_optimizer import member_optimizers
from narrowcast.precision.weights.stored_bytes import bytes_by_role
from narrowcast.runs import FindingRecord


class Prepared:
    """A model with its formats, optimizer, master weights and loss scale; see `prepare`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        """The parts of a step, for those who replay it, look into it or measure it."""
        self.model = engine.model

    def __repr__(self) -> str:
        return described(self.engine)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be copied or pickled: model and optimizer are held in common with the user."""
        raise UnsupportedError(
            "Prepared cannot be copied or pickled because it shares the model and optimizer. Save "
            "run.state_dict() and load it into a new prepare()."
        )

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """Those that `prepare` was given, in order."""
        return member_optimizers(self.engine.optimizer)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The one that `prepare` was given; of several, see `optimizers`."""
        if len(self.optimizers) > 1:
            raise ConfigError(
                f"run.optimizer needs a single optimizer, got {len(self.optimizers)}. Use "
                "run.optimizers[0] or loop over run.optimizers."
            )
        return self.optimizers[0]

    @property
    def schedulers(self) -> tuple[Any, ...]:
        """The learning-rate schedules that `prepare` was given, in order."""
        return self.engine.schedules.all

    @property
    def plan(self) -> Plan:
        """What is carried out now."""
        return self.engine.plan

    @property
    def loss_scale(self) -> LossScale | None:
        """The settings of the loss scale in force; None without one. Of several, the first."""
        return self.engine.scales.settings

    def set_policy(
        self,
        policy: AnyPolicy | Plan,
        *,
        loss_scale: RequestedScale | None = None,
        keep_scale: bool = False,
        execution: Execution | None = None,
    ) -> list[PrecisionChange]:
        """Carry out another policy or plan from the next step on; return the modules it changes.

        Between two steps only. The optimizer, its learning rates and schedule, all counts, the
        average of the weights, leads and what buffers hold stay what they are; weights, master
        weights and moments are converted as exactly as the new formats allow (see
        `TrainedWeights.change`). A loss scale that both policies need goes on where it is; one that
        only the new one needs begins with `loss_scale`, or the settings `prepare` was given, or the
        default; one that the new one does not need ends, unless `keep_scale` is set. Delayed fp8
        scales go on in the modules that have had them. Waits for the device.

        Of a policy a plan is made for this run's device, emulated and `running` as `prepare` was
        told. Plans of your own: `plan(prepared.model, …, hardware=prepared.plan.hardware)`.
        """
        weights = self.engine.weights
        weights.ownership.check_not_swapped(doing="set_policy()")
        if weights.with_gradients():
            raise ConfigError(
                "set_policy() was called between backward() and step(), while gradients still "
                "have the formats and scale of the old policy. Call it after step()."
            )
        before, plan = self.plan, _resolve_plan(policy, self.engine, execution)
        self.engine.set_plan(plan, loss_scale=settings_from(loss_scale), keep_scale=keep_scale)
        return changes_between(before, plan)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Hold this over the forward pass and the loss."""
        return self.engine.autocast()

    def backward(self, loss: Tensor, *, name: str = "loss", retain_graph: bool = False) -> None:
        """Add a loss's gradients to those already there, scaled as the policy needs.

        Called n times before `step` this is gradient accumulation: divide the loss by n.
        """
        check_loss(loss)
        self.engine.backward(loss, name=name, retain_graph=retain_graph)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop every gradient there is, whoever made it; so does `optimizer.zero_grad()`.

        A step clears the gradients it has used. What passes through the model between two steps,
        another run's loss or a `loss.backward()`, leaves more: write this at the head of the step.
        """
        self.engine.weights.ownership.zero_grad(set_to_none=set_to_none)

    def unscale(self) -> None:
        """Divide the loss scale out of the gradients now, so that you can clip or edit them.

        Call it after the last `backward` of a step. Afterwards every weight's `.grad` is the true
        gradient; `step` does not unscale again. Without a loss scale gradients are true anyway, and
        this does nothing. Does not wait for the device.
        """
        self.engine.unscale()

    @torch.no_grad()
    def step(self, loss: Tensor | None = None) -> Outcome:
        """Update the weights, unless a gradient is not finite; then skip, and say so.

        Waits for the device only where the optimizer cannot skip by itself: fused ones can.
        """
        if loss is not None:
            with torch.enable_grad():
                self.backward(loss)
        engine = self.engine
        engine.begin_step()
        present = engine.weights.with_gradients()
        check_gradients_exist(present, doing="step()")
        engine.weights.ownership.gradients.before_step(scaled=engine.scales.value is not None)
        metered = engine.is_metered
        with dropped_on_failure(engine.weights):
            packed = engine.queue_update(present, metered=metered)
        return engine.end_step(packed, present, metered=metered)

    def graphed(
        self, loss_fn: Callable[..., Tensor], *, signatures: int = SIGNATURES
    ) -> CapturedStep:
        """Return what takes whole steps with this loss, replayed as CUDA graphs on a GPU.

        `loss_of` is given what a step is, and calls the model; `run.autocast()` is held over it.
        What Python decides in it is decided once for each of so many `signatures` of its inputs.
        """
        return CapturedStep(self.engine, loss_fn, step=self.step, signatures=signatures)

    def scheduler_step(self, metric: float | Tensor) -> None:
        """Give a metric to the `ReduceLROnPlateau` that `prepare` was given. Waits for the device.

        Call it where torch's own would be stepped: after an evaluation. `step` does not move it.
        """
        self.sync()
        self.engine.schedules.step_metric(
            metric.item() if isinstance(metric, Tensor) else float(metric)
        )

    def sync(self) -> None:
        """Wait for every step so far, and let schedule, counts and findings catch up."""
        self.engine.log.sync()

    def stats(self) -> Stats:
        """Return a copy of the counts of the run so far. Waits for the device."""
        self.sync()
        stats = copy.deepcopy(self.engine.log.stats)
        stats.bytes = bytes_by_role(self.engine.weights) | self.engine.fp8.bytes()
        scale = self.engine.scales.value
        stats.current_scale = 1.0 if scale is None else scale.item()
        return stats

    def findings(self) -> list[FindingRecord]:
        """Return what was found since this was last asked."""
        return self.engine.log.findings()

    @property
    def steps_attempted(self) -> int:
        """Steps tried."""
        return self.engine.steps_begun

    @property
    def steps_applied(self) -> int:
        """Steps that moved the weights. Waits for the device."""
        self.sync()
        return self.engine.log.stats.applied

    @property
    def update_path(self) -> str:
        """What updates the weights, and why: the fused optimizer or torch's own."""
        return self.engine.update_path

    @property
    def has_ema(self) -> bool:
        """Whether an average of the weights is kept."""
        return self.engine.weights.average is not None

    def use_ema(self) -> contextlib.AbstractContextManager[None]:
        """Let the model use the averaged weights inside the block; without an average, nothing.

        In the formats of the weights; `ema_state_dict` has every digit.
        """
        if not self.has_ema:
            return contextlib.nullcontext()
        return swapped_in(self.engine, "use_ema", self.engine.weights.averaged)

    def ema_state_dict(self) -> dict[str, Tensor]:
        """Return a copy of the averages in fp32, by name, which the plain model loads.

        Buffers, and weights that are not trained, are as they are now.
        """
        return self.engine.weights.averaged_by_name()

    @property
    def has_lookahead(self) -> bool:
        """Whether the weights are a lookahead point, and the answer is another."""
        return self.engine.weights.lookahead is not None

    def use_eval_weights(self) -> contextlib.AbstractContextManager[None]:
        """Let the model use the answer inside the block; without a lookahead point, nothing.

        In the formats of the weights; `eval_state_dict` has every digit.
        """
        if not self.has_lookahead:
            return contextlib.nullcontext()
        return swapped_in(self.engine, "use_eval_weights", self.engine.weights.answer)

    def eval_state_dict(self) -> dict[str, Tensor]:
        """Return a copy of the answer in fp32, by name, which the plain model loads.

        Buffers, and weights that are not trained, are as they are now. Without a lookahead point
        the weights themselves are the answer.
        """
        return self.engine.weights.copied_by_name(self.engine.weights.answer)

    def fp32_state_dict(self) -> dict[str, Tensor]:
        """Return a copy of the model's state with every digit that is kept: master values, by name.

        Further steps do not change it. Refused inside `use_ema()` and `use_eval_weights()`, where
        the
        model holds other weights.
        """
        self.engine.weights.ownership.check_not_swapped(doing="fp32_state_dict()")
        return self.engine.weights.copied_by_name(self.engine.weights.full)

    def release(self) -> nn.Module:
        """Undo `prepare`: plain modules, fp32 weights with all digits, the optimizer on them.

        Of a lookahead point these are where gradients were taken: take `eval_state_dict` first.
        Gradients of a step that was not taken have no loss scale any more; those of weights that
        were kept in 16 bits are dropped.
        """
        self.engine.weights.ownership.check_not_swapped(doing="release()")
        if self.engine.weights.masters.parameters:
            instead = "Load run.fp32_state_dict() into a model that is not sharded"
            check_dtypes_stay(self.model, doing="release()", instead=instead)
        self.sync()
        _give_back(self.engine)
        return self.model

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of all that decides the steps to come, but data order and random state.

        Further steps do not change it, so it can be kept to go back to. It takes as much memory
        on the device as weights and optimizer state do. Waits for the device.
        """
        self.engine.weights.ownership.check_not_swapped(doing="state_dict()")
        return copy.deepcopy(collect_state(self.engine))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where a saved run stood; that of another run is refused and changes nothing."""
        self.engine.weights.ownership.check_not_swapped(doing="load_state_dict()")
        load_state(self.engine, state)


def _give_back(engine: Engine) -> None:
    """Leave a plain model: gradients without a scale, buffers in the formats they came in."""
    give_back_gradients(engine.scales, engine.weights)
    engine.buffer_formats.give_back()
    if engine.weights.lookahead is not None:
        engine.weights.lookahead.give_back_momentum(engine.optimizer)
    engine.weights.restore()
    engine.schedules.release()


def _resolve_plan(policy: AnyPolicy | Plan, engine: Engine, running: Execution | None) -> Plan:
    """Return a plan, or that of a policy for the device that is trained on."""
    if isinstance(policy, Plan):
        check_execution(policy, running)
        return policy
    now = engine.plan
    if running is None and now.execution != "eager":  # a model may have been compiled since
        running = now.execution
    return make_plan(
        engine.model,
        policy,
        hardware=now.hardware,
        emulate=engine.emulate,
        fuse=now.fuse,
        memory=now.memory.requested,
        execution=running,
    )
