"""What `prepare`, a step and a resume refuse, each with what to do instead."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from narrowcast.errors import CheckpointError, RecipeError, UnsupportedError
from narrowcast.precision.plan.plan import Plan
from narrowcast.precision.swap import Onlooker, is_swapped


def refuse_what_cannot_be(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse a model or an optimizer that cannot be prepared."""
    refuse_watched(model, doing="prepare()")
    if is_swapped(model):
        raise RecipeError("this model is prepared already; call release() on that first")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedError(
            "LBFGS evaluates the loss inside its step, where no gradient can be guarded; "
            "use AdamW, SGD or another optimizer whose step takes no closure"
        )
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise UnsupportedError(
            f"{type(optimizer).__name__} wraps another optimizer and has none of torch's own "
            "workings; give prepare() the one inside, often its `optimizer`"
        )
    for name, weight in model.named_parameters():
        if weight.requires_grad and weight.dtype != torch.float32:
            raise UnsupportedError(
                f"{name} is {weight.dtype}; weights are taken in fp32 and kept as the policy's "
                "`params` says, so call model.float() before prepare()"
            )
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedError(
                f"{name or 'the model'} is a scripted module, which cannot be rewritten; prepare "
                "the plain one, and use torch.compile"
            )
        if getattr(module, "sparse", False):
            raise UnsupportedError(
                f"{name} has sparse gradients, whose norm is not taken; write sparse=False"
            )
    if not any(group["params"] for group in optimizer.param_groups):
        raise RecipeError("the optimizer holds no parameters; give it model.parameters()")
    if next(model.parameters(), None) is None:
        raise RecipeError("the model has no parameters; there is nothing to prepare")


def refuse_watched(model: nn.Module, *, doing: str) -> None:
    """Refuse to give other classes to modules that somebody looks at, who would see no more."""
    if any(isinstance(module, Onlooker) for module in model.modules()):
        raise RecipeError(
            f"{doing}: this model is watched, by narrowcast.watch() or by a run that trains it; "
            "call close() on that watch, or let the run end, and watch it again afterwards"
        )


def refuse_senseless(*, clip_norm: float | None, ema_decay: float | None, patience: int) -> None:
    """Refuse settings of `prepare` that mean nothing."""
    if clip_norm is not None and not 0 < clip_norm < math.inf:
        raise RecipeError(
            f"clip_norm={clip_norm:g}: gradients are clipped to a norm above 0; "
            "write such a number, or None for no clipping"
        )
    if ema_decay is not None and not 0 <= ema_decay < 1:
        raise RecipeError(
            f"ema_decay={ema_decay:g}: the average keeps a share of itself from 0 to below 1; "
            "write 0.999, or None for no average"
        )
    if patience < 1:
        raise RecipeError(f"patience={patience}: it counts steps; write 1 or more")


def refuse_unscaled_gradients(*, ours: bool) -> None:
    """Refuse to unscale gradients that no backward pass of ours has made."""
    if not ours:
        raise RecipeError(
            "step() found gradients that backward() of the prepared model did not make, and would "
            "divide a loss scale out of them that is not in them; write step(loss), or "
            "backward(loss), in place of loss.backward()"
        )


def refuse_senseless_rates(optimizer: torch.optim.Optimizer) -> None:
    """Refuse a step whose optimizer has no finite learning rate."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], float) and not math.isfinite(group["lr"]):
            raise RecipeError(
                f"the learning rate is {group['lr']}, which would make every weight so; "
                "look at the learning-rate schedule"
            )


def refuse_foreign_plan(model: nn.Module, plan: Plan, *, mine: Plan) -> None:
    """Refuse to change to a plan that was made for another model or another device."""
    names = {name for name, _ in model.named_modules()}
    missing = next((m.name for m in plan.modules if m.name not in names), None)
    if missing is not None:
        raise RecipeError(
            f"the plan is of another model: this one has no module {missing!r}; "
            "make it with plan(prepared.model, …)"
        )
    if plan.hardware.device != mine.hardware.device:
        raise RecipeError(
            f"the plan was made for {plan.hardware.device}, and the model is prepared on "
            f"{mine.hardware.device}; make it with hardware=prepared.plan.hardware"
        )


def refuse_foreign_state(state: dict[str, Any], *, mine: dict[str, Any]) -> None:
    """Refuse a saved state that is not of a run prepared as this one is."""
    if not mine.keys() <= state.keys():
        raise CheckpointError(
            f"the state lacks {', '.join(sorted(mine.keys() - state.keys()))}: it is not "
            "that of a prepared model; give what its state_dict() returned"
        )
    if state["policy"] != mine["policy"]:
        raise CheckpointError(
            f"the checkpoint was written under the policy {state['policy']!r}, and this run has "
            f"{mine['policy']!r}; write the policy of the checkpoint"
        )
    for part in ("weights", "average", "scheduler", "scales", "amax"):
        if _outline(state[part]) != _outline(mine[part]):
            raise CheckpointError(
                f"the checkpoint's {part} are of another run: another model, or other settings "
                "of prepare(); prepare this one as that was"
            )


def _outline(state: Any) -> Any:
    """Return what must agree between a saved state and the one that takes it: keys and shapes."""
    match state:
        case Mapping():
            return {key: _outline(value) for key, value in state.items()}
        case list() if state and isinstance(state[0], Tensor):
            return [_outline(value) for value in state]
        case Tensor():
            return state.shape
        case None:
            return None
        case _:
            return "plain data"
