"""`prepare` and `Prepared`: make a model train in a policy's formats, with any torch optimizer.

Whether a step is applied is decided on the device. The host learns of it later, and only then does
the learning-rate schedule move, so it never moves on a skipped step.
"""

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.precision.dtensor import check_dtypes_stay, check_not_gathered, reshard
from narrowcast.precision.gradients.loss_scale import LossScale, RequestedScale, settings_from
from narrowcast.precision.plan.fusing import Fuse
from narrowcast.precision.plan.gains import Execution
from narrowcast.precision.plan.memory import Memory
from narrowcast.precision.plan.module_plan import multiplies
from narrowcast.precision.plan.plan import Plan, PrecisionChange, changes_between, make_plan
from narrowcast.precision.plan.policy import AnyPolicy, short_text
from narrowcast.precision.step.captured_step import CapturedStep
from narrowcast.precision.step.checks import (
    check_buckets,
    check_execution,
    check_gradients_exist,
    check_loss,
    check_model_and_optimizer,
    check_settings,
    check_types,
)
from narrowcast.precision.step.engine import Engine, dropped_on_failure, give_back_gradients
from narrowcast.precision.step.outcome import Outcome
from narrowcast.precision.step.saved_state import collect_state, load_state
from narrowcast.precision.step.step_log import AnyScheduler, Schedules, Stats
from narrowcast.precision.step.weight_swap import swapped_in
from narrowcast.precision.weights.lookahead import Lookahead
from narrowcast.precision.weights.multi_optimizer import as_one, member_optimizers
from narrowcast.precision.weights.trained import bytes_by_role
from narrowcast.runs import FindingRecord


def described(engine: Engine) -> str:
    """Return what is trained, in which formats, how it is updated, and how far it has come."""
    policy, plan = engine.plan.policy, engine.plan
    lines = {
        "policy": f"{short_text(policy)}, {_how(plan)} on {plan.hardware.name}",
        "weights": f"{_weights(engine)}, stored in {policy.params}, master {policy.master}",
        "update": _update(engine),
        "steps": _steps(engine),
        "loss scale": _scale(engine),
    }
    if (point := engine.weights.lookahead) is not None:
        ahead = point.settings
        lines["lookahead"] = (
            f"interpolation {ahead.interpolation:g}, rate {ahead.rate:g}, leads in {ahead.storage}"
        )
    lines |= {"rows": str(plan.rows)} if any(each.rows for each in plan.modules) else {}
    fused = dict.fromkeys(each.piece for each in plan.fused if each.fused)
    lines |= {"fused": ", ".join(fused)} if fused else {}
    saved = "; ".join(text for _, text in plan.memory.lines)
    lines |= {"memory": saved} if saved else {}
    name = type(engine.model).__name__
    return "\n".join([f"{name}, prepared", *(f"  {key:<12}{text}" for key, text in lines.items())])


def _how(plan: Plan) -> str:
    ways = {module.how for module in plan.modules if multiplies(module.kind)}
    if "emulated" not in ways:
        return "native"
    return "part native, part emulated" if "native" in ways else "emulated"


def _weights(engine: Engine) -> str:
    trained = sum(weight.numel() for weight in engine.weights.all)
    whole = sum(weight.numel() for weight in engine.model.parameters())
    return f"{trained:,}" if trained == whole else f"{trained:,} trained of {whole:,}"


def _update(engine: Engine) -> str:
    name, path = type(engine.optimizer).__name__, engine.update_path
    return path if name in path else f"{name}, {path}"


def _steps(engine: Engine) -> str:
    stats = engine.log.stats
    on_their_way = engine.steps_begun - stats.steps
    later = f"; {on_their_way} more pending on the device" if on_their_way > 0 else ""
    return f"{stats.applied:,} applied, {stats.skipped:,} skipped{later}"


def _scale(engine: Engine) -> str:
    value = engine.scales.value
    if value is None:
        return "none"
    if value.device.type == "cpu":
        return f"{float(value):g}"
    known = engine.log.stats.scale_history
    return f"{known[-1][1]:g} in the last finished step" if known else "on the device"


class Prepared:
    """A model and optimizer that train in a policy's precision, returned by `prepare`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        """The parts of a step, for code that replays, inspects or measures it."""
        self.model = engine.model

    def __repr__(self) -> str:
        return described(self.engine)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise: a copy would share the model and optimizer with this run."""
        raise UnsupportedError(
            "Prepared cannot be copied or pickled because it shares the model and optimizer. Save "
            "run.state_dict() and load it into a new prepare()."
        )

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """The optimizers passed to `prepare`, in order."""
        return member_optimizers(self.engine.optimizer)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer passed to `prepare`. Raises if there are several; see `optimizers`."""
        if len(self.optimizers) > 1:
            raise ConfigError(
                f"run.optimizer needs a single optimizer, got {len(self.optimizers)}. Use "
                "run.optimizers[0] or loop over run.optimizers."
            )
        return self.optimizers[0]

    @property
    def schedulers(self) -> tuple[Any, ...]:
        """The learning-rate schedulers passed to `prepare`, in order."""
        return self.engine.schedules.all

    @property
    def plan(self) -> Plan:
        """The active plan. Print it to see the format of every module."""
        return self.engine.plan

    @property
    def loss_scale(self) -> LossScale | None:
        """Settings of the active loss scale, or None. With several, the first."""
        return self.engine.scales.settings

    def set_policy(
        self,
        policy: AnyPolicy | Plan,
        *,
        loss_scale: RequestedScale | None = None,
        keep_scale: bool = False,
        execution: Execution | None = None,
    ) -> list[PrecisionChange]:
        """Switch to another policy or plan from the next step on.

        Call it between steps. The optimizer, learning rates, schedulers, counts, EMA and buffers
        stay unchanged. Weights, master weights and moments are converted as exactly as the new
        formats allow. Modules keep their delayed fp8 scales. Synchronises with the device.

        Args:
            policy: The new policy, or a plan made with
                `plan(prepared.model, …, hardware=prepared.plan.hardware)`.
            loss_scale: Loss scale to start with if only the new policy needs one. None: the
                settings passed to `prepare`, or the default.
            keep_scale: Keep the loss scale even if the new policy does not need one.
            execution: How the model will run. None: as before.

        Returns:
            The modules whose precision changes.

        Raises:
            ConfigError: There are gradients of an unfinished step, or the plan is for another
            model.
        """
        weights = self.engine.weights
        weights.ownership.check_not_swapped(doing="set_policy()")
        reshard(self.engine.model)
        if weights.with_gradients():
            raise ConfigError(
                "set_policy() was called between backward() and step(), while gradients still "
                "have the formats and scale of the old policy. Call it after step()."
            )
        before, plan = self.plan, resolve_plan(policy, self.engine, execution)
        self.engine.set_plan(plan, loss_scale=settings_from(loss_scale), keep_scale=keep_scale)
        return changes_between(before, plan)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager for the forward pass and the loss in the policy's precision.

        Use it like `torch.autocast`, in training and in evaluation.
        """
        return self.engine.autocast()

    def backward(self, loss: Tensor, *, name: str = "loss", retain_graph: bool = False) -> None:
        """Add the gradients of a loss to the existing ones, scaled if the policy needs it.

        For gradient accumulation over n micro-batches, divide each loss by n and call it n times
        before `step()`.

        Args:
            loss: One number that depends on the model's weights.
            name: Name of the loss, if `prepare` got several loss scales.
            retain_graph: Keep the graph for another backward pass.
        """
        check_loss(loss)
        self.engine.backward(loss, name=name, retain_graph=retain_graph)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, like `optimizer.zero_grad()`.

        `step` clears the gradients that it used. Call this at the start of a step if another loss
        ran backward through the model since then.
        """
        self.engine.weights.ownership.zero_grad(set_to_none=set_to_none)

    def unscale(self) -> None:
        """Divide the gradients by the loss scale now, so that you can clip or edit them.

        Call it after the last `backward` of a step. `step` does not unscale again. Without a loss
        scale it does nothing. Does not synchronise with the device.
        """
        self.engine.unscale()

    @torch.no_grad()
    def step(self, loss: Tensor | None = None) -> Outcome:
        """Update the weights, or skip the step if a gradient is inf or NaN.

        A skipped step leaves weights, optimizer state, EMA and schedulers unchanged. Synchronises
        with the device only if the optimizer cannot skip on the device; the fused optimizer can.

        Args:
            loss: Run `backward(loss)` first. None: use the gradients that are there.

        Returns:
            The outcome: applied or skipped, gradient norm, loss scale.

        Raises:
            ConfigError: There are no gradients.
            DivergedError: `max_skipped_steps` steps in a row were skipped at the smallest loss
            scale.
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
        self,
        loss_fn: Callable[..., Tensor],
        *,
        signatures: int = 4,
        gradient_accumulation_steps: int = 1,
    ) -> CapturedStep:
        """Return a callable that takes whole steps, replayed as CUDA graphs on a GPU.

        Args:
            loss_fn: Function that calls the model and returns the loss. It runs inside
                `autocast()`. Python code in it runs once per signature.
            signatures: How many combinations of input shapes, dtypes and plain values are captured.
                Each capture holds the memory of one step.
            gradient_accumulation_steps: Number of micro-batches per step. Every tensor is split
                along its first dimension into so many equal parts, and the mean of their losses is
                trained. A step needs the activations of one micro-batch.

        Returns:
            The step: call it with the arguments of `loss_fn`. It raises `UnsupportedError` if
            DistributedDataParallel wraps the model.
        """
        return CapturedStep(
            self.engine,
            loss_fn,
            step=self.step,
            signatures=signatures,
            micro_batches=gradient_accumulation_steps,
        )

    def scheduler_step(self, metric: float | Tensor) -> None:
        """Step the `ReduceLROnPlateau` passed to `prepare` with a metric, after an evaluation.

        `step` does not move this scheduler. Synchronises with the device.
        """
        self.sync()
        self.engine.schedules.step_metric(
            metric.item() if isinstance(metric, Tensor) else float(metric)
        )

    def sync(self) -> None:
        """Wait for all steps so far, and update schedulers, counts and findings."""
        self.engine.log.sync()

    def stats(self) -> Stats:
        """Return a copy of the counts of this run. Synchronises with the device."""
        self.sync()
        stats = copy.deepcopy(self.engine.log.stats)
        stats.bytes = bytes_by_role(self.engine.weights) | self.engine.fp8.bytes()
        scale = self.engine.scales.value
        stats.current_scale = 1.0 if scale is None else scale.item()
        return stats

    def findings(self) -> list[FindingRecord]:
        """Return the findings since the last call."""
        return self.engine.log.findings()

    @property
    def steps_attempted(self) -> int:
        """Number of steps so far, skipped ones included."""
        return self.engine.steps_begun

    @property
    def steps_applied(self) -> int:
        """Number of steps that changed the weights. Synchronises with the device."""
        self.sync()
        return self.engine.log.stats.applied

    @property
    def update_path(self) -> str:
        """Which optimizer code updates the weights, and why."""
        return self.engine.update_path

    @property
    def has_ema(self) -> bool:
        """Whether an EMA of the weights is computed."""
        return self.engine.weights.average is not None

    def use_ema(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager in which the model uses the EMA weights.

        Without an EMA it does nothing. The weights have the policy's format; `ema_state_dict` has
        full precision.
        """
        if not self.has_ema:
            return contextlib.nullcontext()
        return swapped_in(self.engine, "use_ema", self.engine.weights.averaged)

    def ema_state_dict(self) -> dict[str, Tensor]:
        """Return a copy of the EMA weights in fp32, which the plain model can load.

        Buffers and frozen weights have their current values.
        """
        return self.engine.weights.averaged_by_name()

    @property
    def has_lookahead(self) -> bool:
        """Whether training uses a lookahead point, so that evaluation needs other weights."""
        return self.engine.weights.lookahead is not None

    def use_eval_weights(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager in which the model uses the evaluation weights of the lookahead.

        Without a lookahead it does nothing. The weights have the policy's format; `eval_state_dict`
        has full precision.
        """
        if not self.has_lookahead:
            return contextlib.nullcontext()
        return swapped_in(self.engine, "use_eval_weights", self.engine.weights.answer)

    def eval_state_dict(self) -> dict[str, Tensor]:
        """Return a copy of the evaluation weights in fp32, which the plain model can load.

        Buffers and frozen weights have their current values. Without a lookahead these are the
        trained weights.
        """
        return self.engine.weights.copied_by_name(self.engine.weights.answer)

    def fp32_state_dict(self) -> dict[str, Tensor]:
        """Return a copy of the model's state with master weights in fp32.

        Further steps do not change it. Raises inside `use_ema()` and `use_eval_weights()`, where
        the model holds other weights.
        """
        self.engine.weights.ownership.check_not_swapped(doing="fp32_state_dict()")
        return self.engine.weights.copied_by_name(self.engine.weights.full)

    def release(self) -> nn.Module:
        """Undo `prepare` and return the plain model with fp32 weights.

        With a lookahead the model keeps the weights at which gradients were computed, so call
        `eval_state_dict` first. Gradients of an unfinished step are unscaled; those of 16-bit
        weights are dropped.
        """
        self.engine.weights.ownership.check_not_swapped(doing="release()")
        if self.engine.weights.masters.parameters:
            instead = "Load run.fp32_state_dict() into a model that is not sharded"
            check_dtypes_stay(self.model, doing="release()", instead=instead)
        self.sync()
        _give_back(self.engine)
        return self.model

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of all state of the run except data order and RNG state.

        Further steps do not change it. It takes as much device memory as weights and optimizer
        state. Synchronises with the device.
        """
        self.engine.weights.ownership.check_not_swapped(doing="state_dict()")
        return copy.deepcopy(collect_state(self.engine))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict()`.

        Raises:
            CheckpointError: The state does not match this run. Nothing is changed.
        """
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


def resolve_plan(policy: AnyPolicy | Plan, engine: Engine, running: Execution | None) -> Plan:
    """Return a plan, or the plan of a policy for the training device."""
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
        gemm_rows=now.rows,
        execution=running,
    )


def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    policy: AnyPolicy | Plan = "default",
    clip_norm: float | None = None,
    scheduler: AnyScheduler | Sequence[AnyScheduler] | None = None,
    loss_scale: RequestedScale | None = None,
    scale_groups: Sequence[str] = (),
    ema_decay: float | None = None,
    lookahead: Lookahead | None = None,
    max_skipped_steps: int = 50,
    lost_updates_every: int = 10,
    emulate: bool | None = None,
    fused_optimizer: bool | None = None,
    fuse: Fuse = "auto",
    memory: Memory | None = None,
    execution: Execution | None = None,
) -> Prepared:
    """Prepare a model and its optimizer to train in a policy's precision.

    The model and the optimizer are changed in place. `Prepared.release` undoes it.

    Args:
        model: The model to train, with fp32 weights.
        optimizer: Any torch optimizer that steps without a closure, or a list of them with
            disjoint weights.
        policy: A preset name or policy text, a `Policy`, a `Plan`, or a torch dtype.
        clip_norm: Clip gradients to this total norm. None: no clipping.
        scheduler: A learning-rate scheduler or a list of them, stepped after every applied step.
            Step a `ReduceLROnPlateau` with `Prepared.scheduler_step`.
        loss_scale: A `LossScale`, the initial scale, or a dict of either by loss name. None: the
            default if the policy needs one.
        scale_groups: Globs of modules that get an additional loss scale.
        ema_decay: Decay of an exponential moving average (EMA) of the weights. None: no EMA.
        lookahead: Settings of a lookahead point. Evaluate inside `Prepared.use_eval_weights` and
            save `Prepared.eval_state_dict`.
        max_skipped_steps: Raise `DivergedError` after this many skipped steps in a row at the
            smallest loss scale.
        lost_updates_every: Measure lost updates every so many steps, which takes about 1% of a
            step. 0 turns it off.
        emulate: As in `plan`; unused if `policy` is a `Plan`.
        fused_optimizer: Use the fused kernel for AdamW and Adam. None: where it is supported.
            True: always, in plain torch without a GPU. False: never. `Prepared.update_path` shows
            the choice.
        fuse: As in `plan`; unused if `policy` is a `Plan`.
        memory: As in `plan`; unused if `policy` is a `Plan`.
        execution: How the model will run: "eager", "compiled" or "graphed" (for
            `Prepared.graphed`). None: detected. Set it if you compile or capture later, so that
            the plan counts the host cost of fp8 correctly.

    Returns:
        The prepared run: call `autocast()` and `step(loss)` on it.

    Raises:
        ConfigError: An argument is invalid, or the model or optimizer is already prepared.
        UnsupportedError: The model, the optimizer or this machine cannot do what was requested.

    Example:
        ```python
        run = nc.prepare(model, optimizer, policy="bf16", clip_norm=1.0)
        for x, y in loader:
            with run.autocast():
                loss = F.cross_entropy(model(x), y)
            outcome = run.step(loss)
        ```
    """
    optimizers = optimizer if isinstance(optimizer, Sequence) else [optimizer]
    for each in optimizers:
        check_types(model, each)
    gathered = reshard(model)
    for each in optimizers:
        check_not_gathered(gathered, each)
        check_model_and_optimizer(model, each)
    whole = as_one(optimizers, model)
    check_settings(
        clip_norm=clip_norm,
        ema_decay=ema_decay,
        lookahead=lookahead,
        max_skipped_steps=max_skipped_steps,
        lost_updates_every=lost_updates_every,
    )
    settings = settings_from(loss_scale)
    if isinstance(policy, Plan):
        plan = policy
        check_execution(plan, execution)
    else:
        plan = make_plan(
            model,
            policy,
            emulate=emulate,
            fuse=fuse,
            memory=memory,
            execution=execution,
        )
    check_buckets(model, plan)
    if settings is None and plan.policy.needs_loss_scale:
        settings = LossScale()
    engine = Engine(
        model,
        whole,
        plan,
        clip_norm=clip_norm,
        schedules=Schedules(scheduler, optimizer=whole),
        loss_scale=settings,
        scale_groups=scale_groups,
        ema_decay=ema_decay,
        lookahead=lookahead,
        max_skipped_steps=max_skipped_steps,
        lost_updates_every=lost_updates_every,
        fused_optimizer=fused_optimizer,
        emulate=emulate,
    )
    engine.schedules.hold()
    return Prepared(engine)
