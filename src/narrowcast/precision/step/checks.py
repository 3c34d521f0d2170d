"""What `prepare` and a step refuse, each with what to do instead."""

import inspect
import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.precision.plan.gains import Execution
from narrowcast.precision.plan.plan import Plan
from narrowcast.precision.swap import Probe, is_swapped
from narrowcast.precision.weights.frozen_base import check_not_quantized
from narrowcast.precision.weights.lookahead import Lookahead
from narrowcast.precision.weights.ownership import check_not_prepared


def check_model_and_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse a model or an optimizer that cannot be prepared."""
    _check_types(model, optimizer)
    check_not_monitored(model, doing="prepare()")
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
    needed = needed_arguments(type(optimizer).step)[1:]
    if needed:
        raise UnsupportedError(
            f"step() of {type(optimizer).__name__} needs `{needed[0]}`, and evaluates the loss "
            "where no gradient can be guarded; use one whose step takes no closure"
        )
    check_not_prepared(model, optimizer)
    if is_swapped(model):
        raise ConfigError("this model is prepared already; call release() on that first")
    check_not_quantized(model, optimizer)
    for name, weight in model.named_parameters():
        if is_lazy(weight):
            raise ConfigError(
                f"{name} has no shape yet; run one batch through the model before the optimizer is "
                "built and prepare() is called"
            )
        if weight.requires_grad and weight.is_complex():
            raise UnsupportedError(
                f"{name} is {weight.dtype}, and weights are trained as real numbers; keep "
                "nn.Parameter(torch.view_as_real(…)) in its place, and call "
                "torch.view_as_complex on it in forward()"
            )
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
    _check_common_weights(model, optimizer)


def _check_types(model: object, optimizer: object) -> None:
    """Refuse arguments of `prepare` that are no model, or no optimizer."""
    if isinstance(model, torch.optim.Optimizer) and isinstance(optimizer, nn.Module):
        raise ConfigError(
            "prepare() was given the optimizer before the model; write prepare(model, optimizer)"
        )
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"prepare() was given a {type(model).__name__} for a model; give it an nn.Module: "
            "prepare(model, optimizer)"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"prepare() was given a {type(optimizer).__name__} for an optimizer; give it one that "
            "holds the parameters: prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))"
        )


def _check_common_weights(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse a model and an optimizer that have no weight in common."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if not held:
        raise ConfigError("the optimizer holds no parameters; give it model.parameters()")
    names = {p: name for name, p in model.named_parameters()}
    if not names:
        raise ConfigError("the model has no parameters; there is nothing to prepare")
    if not any(p in names for p in held):
        first, name = next(iter(names.items()))
        raise ConfigError(
            f"none of the {len(held)} parameters of the {type(optimizer).__name__} (the first is "
            f"{tuple(held[0].shape)}) is one of the {len(names)} of the {type(model).__name__} "
            f"({name} is {tuple(first.shape)}); build the optimizer from this model's "
            "parameters(), after it was copied or its layers replaced"
        )


def needed_arguments(function: Callable[..., Any]) -> list[str]:
    """Return the names of the arguments without which a function cannot be called."""
    return [
        p.name
        for p in inspect.signature(function).parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]


def check_buckets(model: nn.Module, plan: Plan) -> None:
    """Refuse to give weights another dtype that torch has sorted by theirs already."""
    if plan.policy.params == "fp32":
        return
    if any(isinstance(m, nn.parallel.DistributedDataParallel) for m in model.modules()):
        raise UnsupportedError(
            f"params={plan.policy.params} would change the dtype of weights whose gradients "
            "DistributedDataParallel waits for in fp32; prepare() the model inside it first, and "
            "wrap that: DistributedDataParallel(model)"
        )


def check_not_monitored(model: nn.Module, *, doing: str) -> None:
    """Refuse to give other classes to modules that somebody looks at, who would see no more."""
    if any(isinstance(module, Probe) for module in model.modules()):
        raise ConfigError(
            f"{doing}: this model is watched, by narrowcast.monitor() or by a run that trains it; "
            "call close() on that watch, or let the run end, and watch it again afterwards"
        )


def check_loss(loss: object) -> None:
    """Refuse to take the gradients of what is not a loss."""
    if not isinstance(loss, Tensor):
        raise ConfigError(
            f"backward() was given a {type(loss).__name__}; give it the loss as a tensor, with "
            "its graph: not loss.item(), and no closure"
        )
    if loss.numel() != 1 or not loss.requires_grad:
        what = f"of shape {tuple(loss.shape)}" if loss.numel() != 1 else "without gradients"
        raise ConfigError(
            f"backward() was given a loss {what}; give it one number that depends on the "
            "model's weights, computed outside torch.no_grad()"
        )


def check_settings(
    *,
    clip_norm: float | None,
    ema_decay: float | None,
    lookahead: object,
    max_skipped_steps: int,
    lost_updates_every: int,
) -> None:
    """Refuse settings of `prepare` that mean nothing."""
    if not isinstance(lookahead, Lookahead | None):
        raise ConfigError(
            f"lookahead={lookahead!r}: it is told by its settings; write "
            "lookahead=nc.Lookahead(), or None for none"
        )
    _check_number("clip_norm", clip_norm, such_as=1.0)
    _check_number("ema_decay", ema_decay, such_as=0.999)
    if clip_norm is not None and not 0 < clip_norm < math.inf:
        raise ConfigError(
            f"clip_norm={clip_norm:g}: gradients are clipped to a norm above 0; "
            "write such a number, or None for no clipping"
        )
    if ema_decay is not None and not 0 <= ema_decay < 1:
        raise ConfigError(
            f"ema_decay={ema_decay:g}: the average keeps a share of itself from 0 to below 1; "
            "write 0.999, or None for no average"
        )
    if max_skipped_steps < 1:
        raise ConfigError(
            f"max_skipped_steps={max_skipped_steps}: it counts steps; write 1 or more"
        )
    if lost_updates_every < 0:
        raise ConfigError(
            f"lost_updates_every={lost_updates_every}: it counts steps; write 1 or more, or 0 "
            "for no meter"
        )


def _check_number(name: str, value: object, *, such_as: float) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, Real)):
        raise ConfigError(f"{name}={value!r}: it is a number; write {name}={such_as:g}, or such")


def check_gradients_exist(present: Sequence[int], *, doing: str) -> None:
    """Refuse a step of no weight at all."""
    if not present:
        raise ConfigError(f"{doing} found no gradients; call backward(loss) first, or step(loss)")


def check_not_fp16(gradients: Sequence[Tensor]) -> None:
    """Refuse to unscale gradients in the format whose small numbers the scale is there for."""
    if any(g.dtype == torch.float16 for g in gradients):
        raise ConfigError(
            "unscale() would leave gradients in fp16 without their loss scale, where small ones "
            "vanish; write grads=fp32 in the policy, or give prepare() a clip_norm and leave "
            "unscale() out"
        )


def check_learning_rates(optimizer: torch.optim.Optimizer) -> None:
    """Refuse a step whose optimizer has no finite learning rate."""
    for group in optimizer.param_groups:
        rate = group.get("lr")  # an optimizer may find its own, and have none
        if isinstance(rate, float) and not math.isfinite(rate):
            raise ConfigError(
                f"the learning rate is {rate}, which would make every weight so; "
                "look at the learning-rate schedule"
            )


def check_execution(plan: Plan, execution: Execution | None) -> None:
    """Refuse to be told how the model runs beside a plan that was made for another way."""
    if execution not in (None, plan.execution):
        raise ConfigError(
            f"execution={execution!r} was given beside a plan that was made for {plan.execution} "
            "passes; "
            f"make it with plan(…, execution={execution!r}), or leave execution out"
        )


def check_plan(model: nn.Module, plan: Plan, *, mine: Plan) -> None:
    """Refuse to change to a plan that was made for another model or another device."""
    names = {name for name, _ in model.named_modules()}
    missing = next((m.name for m in plan.modules if m.name not in names), None)
    if missing is not None:
        raise ConfigError(
            f"the plan is of another model: this one has no module {missing!r}; "
            "make it with plan(prepared.model, …)"
        )
    if plan.hardware.device != mine.hardware.device:
        raise ConfigError(
            f"the plan was made for {plan.hardware.device}, and the model is prepared on "
            f"{mine.hardware.device}; make it with hardware=prepared.plan.hardware"
        )
    if plan.memory.requested != mine.memory.requested:
        raise ConfigError(
            "the plan saves memory in another way than the run does, and that is settled by "
            "prepare(); make it with memory=prepared.plan.memory.asked"
        )
