"""`prepare`: make a model train in a policy's formats, with any torch optimizer."""

from collections.abc import Sequence

import torch
from torch import nn

from narrowcast.precision.gradients.loss_scale import LossScale
from narrowcast.precision.gradients.scale_request import Asked, settings_from
from narrowcast.precision.plan.fusing import AUTO, Fuse
from narrowcast.precision.plan.gains import Running
from narrowcast.precision.plan.memory import AS_IT_IS, Memory
from narrowcast.precision.plan.plan import Plan, make_plan
from narrowcast.precision.plan.presets import AnyPolicy
from narrowcast.precision.step.checks import (
    refuse_another_running,
    refuse_buckets,
    refuse_senseless,
    refuse_what_cannot_be,
)
from narrowcast.precision.step.engine import Engine
from narrowcast.precision.step.prepared import Prepared
from narrowcast.precision.step.schedules import AnyScheduler, Schedules
from narrowcast.precision.weights.lookahead import Lookahead
from narrowcast.precision.weights.side_by_side import as_one

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
    loss_scale: Asked | None = None,
    scale_groups: Sequence[str] = (),
    ema_decay: float | None = None,
    lookahead: Lookahead | None = None,
    patience: int = PATIENCE,
    meter_every: int = METER_EVERY,
    emulate: bool | None = None,
    fused_optimizer: bool | None = None,
    fuse: Fuse = AUTO,
    memory: Memory = AS_IT_IS,
    running: Running | None = None,
) -> Prepared:
    """Make a model train in a policy's formats, with any torch optimizer.

    The model and the optimizer are changed in place; several optimizers are given as a list, each
    with weights of its own. `policy` is a text, a `Policy`, a plan made before, or a dtype by
    torch's name. A `scheduler`, or each of several, moves with every applied step; a
    `ReduceLROnPlateau` does by `Prepared.plateau`. `loss_scale` is a scale's settings, the number
    it begins with, or several by the name of the loss; left out, a policy that needs one gets the
    default. `scale_groups` are globs of modules that have a further scale of their own.
    A `lookahead` point has gradients taken ahead of an average of the weights, which is the answer:
    evaluate inside `Prepared.answering()`, and keep `Prepared.answer_weights()`.
    `meter_every=0` turns off the lost-update meter. `emulate`, `fuse`, `memory` and `running` are
    as for `plan`, unless a plan is given: a model that is compiled or captured only later says so
    now (`running="compiled"`, or "captured" for `Prepared.graphed`), for the fp8 that gains there.
    `fused_optimizer` says whether AdamW and Adam are taken over by a kernel that updates all
    weights in one pass over memory: None where that runs and can stand in, False nowhere, True or
    it is refused (without a GPU its arithmetic is then done in plain torch).
    `Prepared.update_path` tells what is in force.
    """
    optimizers = optimizer if isinstance(optimizer, Sequence) else [optimizer]
    for each in optimizers:
        refuse_what_cannot_be(model, each)
    whole = as_one(optimizers, model)
    refuse_senseless(
        clip_norm=clip_norm,
        ema_decay=ema_decay,
        lookahead=lookahead,
        patience=patience,
        meter_every=meter_every,
    )
    settings = settings_from(loss_scale)
    if isinstance(policy, Plan):
        plan = policy
        refuse_another_running(plan, running)
    else:
        plan = make_plan(
            model,
            policy,
            emulate=emulate,
            fuse=fuse,
            memory=memory,
            running=running,
        )
    refuse_buckets(model, plan)
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
        patience=patience,
        meter_every=meter_every,
        fused_optimizer=fused_optimizer,
        emulate=emulate,
    )
    engine.schedules.hold()
    return Prepared(engine)
