"""Which optimizer step updates the weights: torch's own, or one pass over memory; and why."""

import torch
from torch import Tensor
from torch.optim import optimizer as torch_optimizer

from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.kernels import launch
from narrowcast.kernels.tables import is_dense
from narrowcast.precision.dtensor import local_part
from narrowcast.precision.plan.policy import Policy
from narrowcast.precision.weights.multi_optimizer import member_optimizers
from narrowcast.precision.weights.ownership import OwnStepOnly


def update_path(
    optimizer: torch.optim.Optimizer, policy: Policy, *, requested: bool | None
) -> tuple[bool, str]:
    """Say whether the fused optimizer stands in, and in words what updates the weights and why.

    Refuses what was asked for and cannot be: `asked`, or moments that only it can keep.
    """
    theirs = " beside ".join(map(_optimizer_name, member_optimizers(optimizer)))
    needed = f"moments={policy.moments}" if policy.needs_fused_optimizer else ""
    if requested is False:
        if needed:
            raise ConfigError(
                f"{needed} needs the fused optimizer, but fused_optimizer=False was passed. Leave "
                "fused_optimizer out, or leave moments out of the policy."
            )
        return False, f"{theirs}: fused_optimizer=False was passed"
    device = next(p.device for group in optimizer.param_groups for p in group["params"])
    why = _unsupported_reason(optimizer)
    if device.type == "cuda":
        why = why or launch.unsupported_reason(device)
    if why:
        if requested or needed:
            what = needed or "fused_optimizer=True"
            instead = "leave moments out of the policy" if needed else "leave fused_optimizer out"
            raise UnsupportedError(
                f"{what} needs the fused optimizer, but {why}. Use plain torch.optim.AdamW or "
                f"Adam on one device, or {instead}."
            )
        return False, f"{theirs}: {why}"
    if device.type == "cuda":
        return True, "one pass over memory (Triton)"
    if requested or needed:
        why = needed or "fused_optimizer=True"
        return True, f"the fused optimizer in plain torch, requested by {why}"
    return False, f"{theirs}: as fast as the fused one without a GPU"


def _optimizer_name(optimizer: torch.optim.Optimizer) -> str:
    kind = type(optimizer)
    package = "torch.optim" if kind.__module__.startswith("torch.optim.") else kind.__module__
    return f"{package}.{kind.__name__}"


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether something is to happen around each of the optimizer's steps."""
    replaced = vars(optimizer).get("step")
    before = optimizer._optimizer_step_pre_hooks.values()
    return bool(
        any(not isinstance(hook, OwnStepOnly) for hook in before)
        or optimizer._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
        # A learning-rate schedule replaces it too, to learn that it was called.
        or (replaced is not None and not getattr(replaced, "_wrapped_by_lr_sched", False))
    )


def unsupported_settings(optimizer: torch.optim.Optimizer) -> str:
    """Say which of its groups' settings the fused step cannot obey; nothing where it can."""
    for group in optimizer.param_groups:
        for name in ("amsgrad", "maximize", "differentiable"):
            if group.get(name):
                return f"the fused kernel does not support {name}"
        if any(isinstance(beta, Tensor) for beta in group["betas"]):
            return "its betas are tensors"
    return ""


def _unsupported_reason(optimizer: torch.optim.Optimizer) -> str:
    """Say what about an optimizer the fused step cannot do; nothing where it can stand in."""
    if len(member_optimizers(optimizer)) > 1:
        return "the fused kernel supports one optimizer, not several"
    if type(optimizer) not in (torch.optim.AdamW, torch.optim.Adam):
        return f"the fused kernel does not support {type(optimizer).__name__}"
    why = unsupported_settings(optimizer)
    if why:
        return why
    if has_step_hooks(optimizer):
        return "its step has hooks"
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    if len({p.device for p in weights}) > 1:
        return "its weights are on several devices"
    for p in weights:
        if p.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"a weight is {p.dtype}"
        if not is_dense(local_part(p)):
            return "a weight is not contiguous in memory"
    return ""
