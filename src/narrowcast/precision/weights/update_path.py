"""Which optimizer step updates the weights: torch's own, or one pass over memory; and why.

Other methods of an optimizer that write weights (schedule-free `train()` and `eval()`) are called
with the master weights at hand. An optimizer that bypasses its groups raises.
"""

import functools
import types
import weakref
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.kernels import launch
from narrowcast.kernels.launch import is_dense
from narrowcast.precision.dtensor import as_sharded, local_part, reshard
from narrowcast.precision.plan.plan import Plan
from narrowcast.precision.plan.policy import Policy
from narrowcast.precision.weights.master import MasterWeights
from narrowcast.precision.weights.multi_optimizer import member_optimizers
from narrowcast.precision.weights.ownership import Ownership, OwnStepOnly


def update_path(
    optimizer: torch.optim.Optimizer, policy: Policy, *, requested: bool | None
) -> tuple[bool, str]:
    """Return whether the fused optimizer is used, and why; raise if requested but unsupported."""
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
    """Return whether something is to happen around each of the optimizer's steps."""
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
    """Return the group settings that the fused step does not support; empty if all are."""
    for group in optimizer.param_groups:
        for name in ("amsgrad", "maximize", "differentiable"):
            if group.get(name):
                return f"the fused kernel does not support {name}"
        if any(isinstance(beta, Tensor) for beta in group["betas"]):
            return "its betas are tensors"
    return ""


def _unsupported_reason(optimizer: torch.optim.Optimizer) -> str:
    """Return what the fused step does not support of an optimizer; empty if it can replace it."""
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


_LOOKED_INTO = 4
"""How deep lists, dicts and objects of an optimizer are looked into for weights."""
_KNOWN = frozenset({"param_groups", "state", "defaults"})


def check_hidden_weights(
    optimizer: Optimizer, weights: AbstractSet[nn.Parameter], plan: Plan
) -> None:
    """Raise if master weights replace weights that an optimizer holds outside its groups."""
    narrow = any(module.policy.params != "fp32" for module in plan.modules)
    if not narrow or plan.policy.master in ("", "none"):
        return
    for part in member_optimizers(optimizer):
        for name, value in vars(part).items():
            known = name in _KNOWN or name.startswith("_optimizer_")
            if not known and any(t in weights for t in _tensors_in(value, _LOOKED_INTO, set())):
                raise UnsupportedError(
                    f"{type(part).__name__} holds weights of the model in `{name}`, outside its "
                    "param_groups, so it would bypass the master weights. Use a policy with "
                    "params=fp32, or an optimizer that takes its weights from its param_groups."
                )


@final
class OwnWrites:
    """The methods of optimizers that may write weights, which reach the model until `give_back`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        masters: MasterWeights,
        ownership: Ownership,
    ) -> None:
        self._taken: list[tuple[Optimizer, str]] = []
        has_masters = masters.kind != "none" and bool(masters.parameters)
        if not has_masters and all(as_sharded(p) is None for p in model.parameters()):
            return
        for part in member_optimizers(optimizer):
            for name in _methods(type(part)):
                if name not in vars(part):
                    vars(part)[name] = _Writing(model, part, name, masters, ownership)
                    self._taken.append((part, name))

    def give_back(self) -> None:
        """Restore the optimizers' own methods."""
        for optimizer, name in self._taken:
            if isinstance(vars(optimizer).get(name), _Writing):
                del vars(optimizer)[name]
        self._taken = []


@final
class _Writing:
    """In place of a method of an optimizer: calls it with the master weights at hand; no cycles."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        name: str,
        masters: MasterWeights,
        ownership: Ownership,
    ) -> None:
        self._model = weakref.ref(model)
        self._optimizer, self._ownership = weakref.ref(optimizer), weakref.ref(ownership)
        self._name, self._masters = name, masters
        functools.update_wrapper(self, getattr(type(optimizer), name))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        optimizer, ownership = self._optimizer(), self._ownership()
        assert optimizer is not None
        method = getattr(type(optimizer), self._name)
        if self._masters.are_at_hand:  # a step calls methods of its own
            return method(optimizer, *args, **kwargs)
        if ownership is not None:
            ownership.check_not_swapped(doing=f"optimizer.{self._name}()")
        if (model := self._model()) is not None:
            reshard(model)  # FSDP would go on with what it gathered for an evaluation
        with self._masters.at_hand():
            return method(optimizer, *args, **kwargs)


def _methods(kind: type[Optimizer]) -> list[str]:
    """Return the public methods that an optimizer has and torch's own have not."""
    if kind.__module__.startswith("torch.optim"):
        return []
    own = [each for each in kind.__mro__ if issubclass(each, Optimizer) and each is not Optimizer]
    return sorted(
        {
            name
            for each in own
            for name, value in vars(each).items()
            if isinstance(value, types.FunctionType)
            and not name.startswith("_")
            and not hasattr(Optimizer, name)
        }
    )


def _tensors_in(value: Any, depth: int, seen: set[int]) -> Iterator[Tensor]:
    """Yield the tensors that a value of an optimizer leads to."""
    if isinstance(value, Tensor):
        yield value
        return
    plain = isinstance(value, str | bytes | int | float | complex | type | None)
    if plain or depth == 0 or id(value) in seen or _is_ours(value):
        return
    seen.add(id(value))
    for item in _inside(value):
        yield from _tensors_in(item, depth - 1, seen)


def _inside(value: Any) -> list[Any]:
    match value:
        case Mapping():
            return [*value.keys(), *value.values()]
        case list() | tuple() | set() | frozenset():
            return list(value)
        case nn.Module():
            return list(value.parameters())
        case types.FunctionType():
            return [_content(cell) for cell in value.__closure__ or ()]
        case types.MethodType():
            return []  # of an object that is looked into where it is held
        case functools.partial():
            return [value.func, *value.args, *value.keywords.values()]
        case _:
            return list(getattr(value, "__dict__", {}).values())


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that has no value yet
        return None


def _is_ours(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "narrowcast"


def check_host_moments(weights: Sequence[Tensor], plan: Plan, *, fused: bool, path: str) -> None:
    """Raise if moments are to be on the host without the fused optimizer."""
    if not plan.memory.offloads_optimizer:
        return
    if not fused:
        raise UnsupportedError(
            f"memory.offload=[optimizer] needs the fused optimizer, got {path}. Use "
            "torch.optim.AdamW or Adam, or leave optimizer out of memory.offload."
        )
    if any(as_sharded(weight) is not None for weight in weights):
        raise UnsupportedError(
            "memory.offload=[optimizer] does not support sharded weights. Offload them with "
            "fully_shard(), or leave optimizer out of memory.offload."
        )
