"""`prepare`: make a model train in a policy's formats, with any torch optimizer."""

from collections.abc import Sequence

import torch
from torch import nn

from narrowcast.precision.gradients.loss_scale import LossScale
from narrowcast.precision.gradients.scale_request import RequestedScale, settings_from
from narrowcast.precision.plan.fusing import Fuse
from narrowcast.precision.plan.gains import Execution
from narrowcast.precision.plan.memory import Memory
from narrowcast.precision.plan.plan import Plan, make_plan
from narrowcast.precision.plan.policy import AnyPolicy
from narrowcast.precision.step.checks import (
    check_buckets,
    check_execution,
    check_model_and_optimizer,
    check_settings,
)
from narrowcast.precision.step.engine import Engine
from narrowcast.precision.step.prepared import Prepared
from narrowcast.precision.step.schedules import AnyScheduler, Schedules
from narrowcast.precision.weights.lookahead import Lookahead
from narrowcast.precision.weights.multi_optimizer import as_one


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
