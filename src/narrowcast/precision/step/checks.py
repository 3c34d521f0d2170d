"""What `prepare` and a step refuse, each with what to do instead."""

import contextlib
import inspect
import math
import re
from collections.abc import Callable, Iterator, Sequence
from numbers import Real
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.precision.dtensor import as_sharded
from narrowcast.precision.plan.gains import Execution
from narrowcast.precision.plan.plan import Plan
from narrowcast.precision.quantized_frozen import QuantizedFrozenLayer
from narrowcast.precision.swap import Probe, is_swapped
from narrowcast.precision.weights.lookahead import Lookahead
from narrowcast.precision.weights.ownership import check_not_prepared


def check_model_and_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise if the model or the optimizer cannot be prepared."""
    check_not_monitored(model, doing="prepare()")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedError(
            "LBFGS evaluates the loss inside its step, where gradients cannot be checked. Use "
            "AdamW, SGD or another optimizer whose step() needs no closure."
        )
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise UnsupportedError(
            f"prepare() needs a torch optimizer, got {type(optimizer).__name__}, which wraps "
            "another one. Pass the optimizer inside it, often its `optimizer` attribute."
        )
    needed = needed_arguments(type(optimizer).step)[1:]
    if needed:
        raise UnsupportedError(
            f"step() of {type(optimizer).__name__} needs `{needed[0]}` and evaluates the loss "
            "where gradients cannot be checked. Use an optimizer whose step() needs no closure."
        )
    if isinstance(optimizer, torch.optim.Adafactor | torch.optim.Rprop) and any(
        as_sharded(p) is not None for group in optimizer.param_groups for p in group["params"]
    ):
        raise UnsupportedError(
            f"torch.optim.{type(optimizer).__name__} cannot step sharded weights (DTensors) in "
            f"torch {torch.__version__}. Use AdamW, Muon, SGD or another optimizer."
        )
    check_not_prepared(model, optimizer)
    if is_swapped(model):
        raise ConfigError("This model is already prepared. Call release() on its Prepared first.")
    check_not_quantized(model, optimizer)
    for name, weight in model.named_parameters():
        if is_lazy(weight):
            raise ConfigError(
                f"{name} has no shape yet. Run one batch through the model before you build the "
                "optimizer and call prepare()."
            )
        if weight.requires_grad and weight.is_complex():
            raise UnsupportedError(
                f"Trained weights must be real, got {weight.dtype} for {name}. Store "
                "nn.Parameter(torch.view_as_real(…)) and call torch.view_as_complex on it in "
                "forward()."
            )
        if weight.requires_grad and weight.dtype != torch.float32:
            raise UnsupportedError(
                f"Trained weights must be torch.float32 before prepare(), got {weight.dtype} for "
                f"{name}. Call model.float() first; `params` of the policy sets the format they "
                "are stored in."
            )
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedError(
                f"{name or 'The model'} is a scripted module, which cannot be rewritten. Prepare "
                "the unscripted module and use torch.compile."
            )
        if getattr(module, "sparse", False):
            raise UnsupportedError(
                f"{name} has sparse gradients, which are not supported. Build it with sparse=False."
            )
    _check_common_weights(model, optimizer)


def check_types(model: object, optimizer: object) -> None:
    """Raise if the arguments of `prepare` are not a model and an optimizer."""
    if isinstance(model, torch.optim.Optimizer) and isinstance(optimizer, nn.Module):
        raise ConfigError(
            "prepare() got the optimizer before the model. Write prepare(model, optimizer)."
        )
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"The model must be an nn.Module, got {type(model).__name__}. Write prepare(model, "
            "optimizer)."
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"The optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}. "
            "Write prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))."
        )


def _check_common_weights(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise if the model and the optimizer share no weights."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if not held:
        raise ConfigError("The optimizer has no parameters. Build it from model.parameters().")
    names = {p: name for name, p in model.named_parameters()}
    if not names:
        raise ConfigError("The model has no parameters to train. Pass the model that you train.")
    if not any(p in names for p in held):
        first, name = next(iter(names.items()))
        raise ConfigError(
            f"The {type(optimizer).__name__} and the {type(model).__name__} share no parameters, "
            f"got {len(held)} in the optimizer (the first of shape {tuple(held[0].shape)}) and "
            f"{len(names)} in the model ({name} of shape {tuple(first.shape)}). Build the "
            "optimizer from model.parameters() after copying the model or replacing its layers."
        )


def needed_arguments(function: Callable[..., Any]) -> list[str]:
    """Return the names of a function's required arguments."""
    return [
        p.name
        for p in inspect.signature(function).parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]


def check_buckets(model: nn.Module, plan: Plan) -> None:
    """Raise if DistributedDataParallel already holds weights whose dtype would change."""
    if plan.policy.params == "fp32":
        return
    if any(isinstance(m, nn.parallel.DistributedDataParallel) for m in model.modules()):
        raise UnsupportedError(
            f"params={plan.policy.params} changes the dtype of weights, but "
            "DistributedDataParallel expects fp32 gradients. Call prepare() on the model inside "
            "it first, then wrap it: DistributedDataParallel(model)."
        )


def check_not_monitored(model: nn.Module, *, doing: str) -> None:
    """Raise if a monitor is attached to the model."""
    if any(isinstance(module, Probe) for module in model.modules()):
        raise ConfigError(
            f"{doing} cannot be used while this model is monitored by narrowcast.monitor() or a "
            "run. Call close() on the monitor or end the run first, then monitor it again."
        )


def check_loss(loss: object) -> None:
    """Raise if this is not a scalar loss with a graph."""
    if not isinstance(loss, Tensor):
        raise ConfigError(
            f"The loss must be a tensor with its graph, got {type(loss).__name__}. Pass the loss "
            "itself, not loss.item() and not a closure."
        )
    if loss.numel() != 1 or not loss.requires_grad:
        what = f"of shape {tuple(loss.shape)}" if loss.numel() != 1 else "without gradients"
        raise ConfigError(
            f"The loss must be one number that requires grad, got one {what}. Compute it from the "
            "model's weights, outside torch.no_grad()."
        )


def check_settings(
    *,
    clip_norm: float | None,
    ema_decay: float | None,
    lookahead: object,
    max_skipped_steps: int,
    lost_updates_every: int,
) -> None:
    """Raise if a setting of `prepare` is out of range."""
    if not isinstance(lookahead, Lookahead | None):
        raise ConfigError(f"lookahead must be an nc.Lookahead or None, got {lookahead!r}.")
    _check_number("clip_norm", clip_norm, such_as=1.0)
    _check_number("ema_decay", ema_decay, such_as=0.999)
    if clip_norm is not None and not 0 < clip_norm < math.inf:
        raise ConfigError(
            "clip_norm must be a finite number above 0, or None for no clipping, got "
            f"{clip_norm:g}."
        )
    if ema_decay is not None and not 0 <= ema_decay < 1:
        raise ConfigError(
            f"ema_decay must be at least 0 and below 1, or None for no EMA, got {ema_decay:g}. A "
            "common value is 0.999."
        )
    if max_skipped_steps < 1:
        raise ConfigError(f"max_skipped_steps must be at least 1, got {max_skipped_steps}.")
    if lost_updates_every < 0:
        raise ConfigError(
            "lost_updates_every must be at least 1, or 0 to turn the measurement off, got "
            f"{lost_updates_every}."
        )


def _check_number(name: str, value: object, *, such_as: float) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, Real)):
        raise ConfigError(
            f"{name} must be a number, got {value!r}. Write for example {name}={such_as:g}."
        )


def check_gradients_exist(present: Sequence[int], *, doing: str) -> None:
    """Raise if there are no gradients."""
    if not present:
        raise ConfigError(
            f"{doing} has no gradients to use. Call backward(loss) first, or step(loss)."
        )


def check_not_fp16(gradients: Sequence[Tensor]) -> None:
    """Raise if unscaled gradients would be stored in fp16."""
    if any(g.dtype == torch.float16 for g in gradients):
        raise ConfigError(
            "unscale() would leave fp16 gradients without their loss scale, so small ones become "
            "zero. Write grads=fp32 in the policy, or pass clip_norm to prepare() and drop the "
            "call to unscale()."
        )


def check_learning_rates(optimizer: torch.optim.Optimizer) -> None:
    """Raise if a learning rate is inf or NaN."""
    for group in optimizer.param_groups:
        rate = group.get("lr")  # an optimizer may find its own, and have none
        if isinstance(rate, float) and not math.isfinite(rate):
            raise ConfigError(
                f"The learning rate must be finite, got {rate}. Check the learning-rate schedule."
            )


def check_execution(plan: Plan, execution: Execution | None) -> None:
    """Raise if the plan was made for another execution mode."""
    if execution not in (None, plan.execution):
        raise ConfigError(
            f"execution must match the plan, got execution={execution!r} with a plan made for "
            f"{plan.execution!r}. Make it with plan(…, execution={execution!r}), or leave "
            "execution out."
        )


def check_plan(model: nn.Module, plan: Plan, *, mine: Plan) -> None:
    """Raise if the plan was made for another model, device or memory setting."""
    names = {name for name, _ in model.named_modules()}
    missing = next((m.name for m in plan.modules if m.name not in names), None)
    if missing is not None:
        raise ConfigError(
            f"The plan was made for another model: this one has no module {missing!r}. Make it "
            "with plan(prepared.model, …)."
        )
    if plan.hardware.device != mine.hardware.device:
        raise ConfigError(
            f"The plan must be for {mine.hardware.device}, where the model is prepared, got one "
            f"for {plan.hardware.device}. Make it with hardware=prepared.plan.hardware."
        )
    if plan.memory.requested != mine.memory.requested:
        raise ConfigError(
            "The plan must have the memory settings of this run, because only prepare() can set "
            "them. Make it with memory=prepared.plan.memory.requested."
        )


_OF_PRODUCTS = re.compile(r"mat1 and mat2|self and mat|batch1|Input type|expected scalar type")
_NARROW = (torch.bfloat16, torch.float16)
_SAYS = "narrowcast: "


@contextlib.contextmanager
def explaining_dtypes(model: nn.Module) -> Iterator[None]:
    """Explain the errors that are raised in the block."""
    try:
        yield
    except RuntimeError as error:
        explain_dtypes(model, error)
        raise


def explain_dtypes(model: nn.Module, error: BaseException) -> None:
    """Add to a dtype error of torch which weights may stay in fp32, and how."""
    if not _is_of_formats(str(error)) or any(map(_is_ours, getattr(error, "__notes__", []))):
        return
    name = _innermost(error.__traceback__, model)
    if name is None:
        return
    error.add_note(
        f"{_SAYS}the weights of {name or 'the model'} are stored in 16 bits and its input was not "
        f"cast to their format, for example because autocast is off. Write `{name or '*'}: "
        "params=fp32` in the policy, or cast the input to the weight's dtype."
    )


def _is_of_formats(said: str) -> bool:
    """Return whether a product was given fp32 and 16 bits, and nothing else."""
    narrow = "BFloat16" in said or "Half" in said
    wide = re.search(r"\b[Ff]loat|FloatT", said) is not None
    whole = re.search(r"Long|Int|Byte|Bool|Char|Short", said) is not None
    return bool(_OF_PRODUCTS.search(said)) and narrow and wide and not whole


def _is_ours(note: str) -> bool:
    return note.startswith(_SAYS)


def _innermost(traceback: TracebackType | None, model: nn.Module) -> str | None:
    """Return the name of the module with 16-bit weights that was called last; None without one."""
    names = {id(module): name for name, module in model.named_modules()}
    result = None
    while traceback is not None:
        module = traceback.tb_frame.f_locals.get("self")
        if id(module) in names and isinstance(module, nn.Module):
            narrow = any(p.dtype in _NARROW for p in module.parameters(recurse=False))
            result = names[id(module)] if narrow else result
        traceback = traceback.tb_next
    return result


def check_not_quantized(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise if a weight stored in e4m3 would be trained."""
    held = {p for group in optimizer.param_groups for p in group["params"]}
    for name, module in model.named_modules():
        if isinstance(module, QuantizedFrozenLayer):
            weight = module.weight_e4m3
            if weight.requires_grad or weight in held:
                raise ConfigError(
                    f"The weight of {name} is stored in e4m3 and cannot be trained. Pass [p for p "
                    "in model.parameters() if p.requires_grad] to the optimizer, or call "
                    "dequantize_frozen(model) and build the optimizer again."
                )
