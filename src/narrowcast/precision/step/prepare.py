"""`prepare`: make a model train in a policy's formats, with any torch optimizer."""

from collections.abc import Sequence

import torch
from torch import nn

from narrowcast.precision.gradients.loss_scale import LossScale
from narrowcast.precision.gradients.scale_request import RequestedScale, settings_from
from narrowcast.precision.plan.fusing import AUTO, Fuse
from narrowcast.precision.plan.gains import Execution
from narrowcast.precision.plan.memory import AS_IT_IS, Memory
from narrowcast.precision.plan.plan import Plan, make_plan
from narrowcast.precision.plan.presets import AnyPolicy
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

PATIENCE = 50
"""Steps in a row that may be skipped, at the smallest scale, before training is given up."""
METER_EVERY = 10
"""Steps between two looks at lost updates: a look costs about one part in a hundred of a step."""


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
    max_skipped_steps: int = PATIENCE,
    lost_updates_every: int = METER_EVERY,
    emulate: bool | None = None,
    fused_optimizer: bool | None = None,
    fuse: Fuse = AUTO,
    memory: Memory = AS_IT_IS,
    execution: Execution | None = None,
) -> Prepared:
    """Make a model train in a policy's formats, with any torch optimizer.

    The model and the optimizer are changed in place; several optimizers are given as a list, each
    with weights of its own. `policy` is a text, a `Policy`, a plan made before, or a dtype by
    torch's name. A `scheduler`, or each of several, moves with every applied step; a
    `ReduceLROnPlateau` does by `Prepared.scheduler_step`. `loss_scale` is a scale's settings, the
    number
    it begins with, or several by the name of the loss; left out, a policy that needs one gets the
    default. `scale_groups` are globs of modules that have a further scale of their own.
    A `lookahead` point has gradients taken ahead of an average of the weights, which is the answer:
    evaluate inside `Prepared.use_eval_weights()`, and keep `Prepared.eval_state_dict()`.
    `lost_updates_every=0` turns off the lost-update meter. `emulate`, `fuse`, `memory` and
    `running` are
    as for `plan`, unless a plan is given: a model that is compiled or captured only later says so
    now (`execution="compiled"`, or "graphed" for `Prepared.graphed`), for the fp8 that gains
    there.
    `fused_optimizer` says whether AdamW and Adam are taken over by a kernel that updates all
    weights in one pass over memory: None where that runs and can stand in, False nowhere, True or
    it is refused (without a GPU its arithmetic is then done in plain torch).
    `Prepared.update_path` tells what is in force.
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
