"""Fault injection: one bad number at a place, in one micro-batch of one step."""

import contextlib
import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from narrowcast.errors import ConfigError
from narrowcast.precision.nested import map_tensors, tensors_in
from narrowcast.precision.plan.module_plan import ROLES

_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16}
_EXPONENT_END = {
    torch.float64: 62,
    torch.float32: 30,
    torch.bfloat16: 14,
    torch.float16: 14,
}
"""The highest bit of the exponent."""


def corrupted(tensor: Tensor, value: str, *, index: int) -> Tensor:
    """Return a copy with one number replaced; gradients pass through unchanged.

    `value` is `inf`, `nan`, `large` (half of the dtype's largest) or `bit-flip` (of the highest
    exponent bit).
    """
    copy = tensor.clone()
    corrupt(copy.data, value, spot=unravel(copy, index))  # autograd is not to know
    return copy


def unravel(tensor: Tensor, index: int) -> tuple[int, ...]:
    """Return where a number is; `index` counts through the tensor, and round again."""
    location = torch.unravel_index(torch.tensor(index % tensor.numel()), tensor.shape)
    return tuple(int(i) for i in location)


def corrupt(tensor: Tensor, value: str, *, spot: tuple[int, ...]) -> None:
    """Replace one number where it lies."""
    match value:
        case "inf":
            tensor[spot] = math.inf
        case "nan":
            tensor[spot] = math.nan
        case "large":
            tensor[spot] = torch.finfo(tensor.dtype).max / 2
        case _:
            number = tensor[spot].detach().clone()
            bits = number.view(_BITS[number.dtype.itemsize])
            bits.bitwise_xor_(1 << _EXPONENT_END[number.dtype])
            tensor[spot] = number


FaultRole = Literal["input", "weight", "output", "grad_output", "grad_weight"]
FaultValue = Literal["inf", "nan", "large", "bit-flip"]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One number to be put in place of another."""

    step: int
    module: str
    """A name, or a glob that matches exactly one."""
    role: FaultRole
    value: FaultValue
    micro_batch: int = 1
    index: int | None = None
    """Which number of the tensor, counted through all of it; None: chosen by the seed."""

    def __str__(self) -> str:
        return (
            f"{self.value} in {self.module or 'the model'} {self.role}, "
            f"micro-batch {self.micro_batch}"
        )


class Faults:
    """The faults of a run on one model; asking for what cannot be is refused here."""

    def __init__(self, model: nn.Module, faults: Sequence[Fault], *, seed: int) -> None:
        self._model, self._seed = model, seed
        self._names = [_one_module(model, fault) for fault in faults]
        self._faults = list(faults)

    def at(self, step: int) -> "StepFaults | None":
        due = [
            _Planned(fault, name, self._model.get_submodule(name), self._draw(fault, name))
            for fault, name in zip(self._faults, self._names, strict=True)
            if fault.step == step
        ]
        return StepFaults(due) if due else None

    def _draw(self, fault: Fault, name: str) -> int:
        """Return which number is hit, before the size of the tensor is known."""
        if fault.index is not None:
            return fault.index
        text = f"{self._seed} {fault.step} {name} {fault.role} {fault.micro_batch}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "little")


@dataclass(frozen=True)
class _Planned:
    fault: Fault
    name: str
    module: nn.Module
    index: int


@dataclass(frozen=True)
class StepFaults:
    """The faults of one step. They are the same however often the step is taken."""

    planned: Sequence[_Planned]

    @property
    def faults(self) -> list[tuple[Fault, str]]:
        """Each fault, and the module it hits."""
        return [(each.fault, each.name) for each in self.planned]

    @contextlib.contextmanager
    def during(self, micro_batch: int) -> Iterator[None]:
        """Inject into the eager passes of a micro-batch; raise if nothing was hit."""
        with contextlib.ExitStack() as stack:
            hits = [
                stack.enter_context(_installed(each))
                for each in self.planned
                if each.fault.micro_batch == micro_batch
            ]
            yield
        for hit in hits:
            if not hit.times:
                raise ConfigError(
                    f"faults: step {hit.planned.fault.step}: {hit.planned.name} has no "
                    f"floating-point {hit.planned.fault.role}. Choose another role or module."
                )


class _Hit:
    """One fault in force: it strikes once."""

    def __init__(self, planned: _Planned) -> None:
        self.planned, self.times = planned, 0

    def strike(self, tensor: Tensor) -> Tensor:
        """Return the tensor with its number replaced, the first time."""
        if self.times or not tensor.numel():
            return tensor
        self.times += 1
        return corrupted(tensor, self.planned.fault.value, index=self.planned.index)


@contextlib.contextmanager
def _installed(planned: _Planned) -> Iterator[_Hit]:
    hit, module = _Hit(planned), planned.module
    match planned.fault.role:
        case "weight":
            with _weight_corrupted(hit):
                yield hit
            return
        case "input":
            handle: Any = module.register_forward_pre_hook(
                lambda _, args, kwargs: (_first_struck(hit, args), _first_struck(hit, kwargs)),
                with_kwargs=True,
            )
        case "output":
            handle = module.register_forward_hook(lambda _, __, out: _first_struck(hit, out))
        case "grad_output":
            handle = module.register_forward_hook(lambda _, __, out: _gradient_struck(hit, out))
        case "grad_weight":
            with _own_gradient_struck(hit):
                yield hit
            return
    try:
        yield hit
    finally:
        handle.remove()


@contextlib.contextmanager
def _weight_corrupted(hit: _Hit) -> Iterator[None]:
    weight = own_weight(hit.planned.module)
    spot = unravel(weight, hit.planned.index)
    before = weight.detach()[spot].clone()
    # Torch is to know, here and below: a copy of the weight in fp8 has to be made anew.
    with torch.no_grad():
        corrupt(weight, hit.planned.fault.value, spot=spot)
    hit.times += 1
    try:
        yield
    finally:
        with torch.no_grad():
            weight[spot] = before


@contextlib.contextmanager
def _own_gradient_struck(hit: _Hit) -> Iterator[None]:
    """Strike what a module makes of its weight's gradient, to which others may add theirs."""
    module = hit.planned.module
    weight = own_weight(module)
    key = next(name for name, p in module._parameters.items() if p is weight)
    slots: dict[str, Any] = module._parameters
    before: list[Tensor] = []

    def enter(module: nn.Module, args: Any) -> None:
        before.append(slots[key])
        if torch.is_grad_enabled():
            with torch._C.DisableTorchFunction():
                slots[key] = slots[key].view_as(slots[key])
            slots[key].register_hook(hit.strike)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        slots[key] = before.pop()

    handles = [
        module.register_forward_pre_hook(enter),
        module.register_forward_hook(leave, always_call=True),
        weight.register_hook(hit.strike),  # where only others use the weight
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        slots[key] = weight


def own_weight(module: nn.Module) -> nn.Parameter:
    """Return the weight that a fault in a module's weight hits: `weight`, or the first trained."""
    own = {name: p for name, p in module.named_parameters(recurse=False) if p.requires_grad}
    return own["weight"] if "weight" in own else next(iter(own.values()))


def _first_struck(hit: _Hit, value: Any) -> Any:
    return map_tensors(value, lambda t: hit.strike(t) if t.is_floating_point() else t)


def _gradient_struck(hit: _Hit, value: Any) -> None:
    """Strike the gradient of the first tensor in a value that has one."""
    for tensor in tensors_in(value):
        if tensor.requires_grad:
            tensor.register_hook(partial(_Hit.strike, hit))
            return


def _one_module(model: nn.Module, fault: Fault) -> str:
    """Return the name of the one module that a fault matches, or raise."""
    names = [name for name, _ in model.named_modules()]
    matches = [fault.module] if fault.module in names else []
    matches = matches or [name for name in names if fnmatchcase(name, fault.module)]
    where = f"faults: step {fault.step}: module={fault.module!r}"
    if len(matches) != 1:
        few = ", ".join(matches[:3])
        many = f"matches {len(matches)} modules ({few}, …)" if matches else "matches no module"
        raise ConfigError(f"{where} {many}. Write one module name that `narrowcast plan` lists.")
    module = model.get_submodule(matches[0])
    trained = [p for p in module.parameters(recurse=False) if p.requires_grad]
    if fault.role in ("weight", "grad_weight") and not trained:
        others = ", ".join(role for role in ROLES if not role.endswith("weight"))
        raise ConfigError(f"{where} has no trained weight. Choose role={others}.")
    if fault.role == "input" and isinstance(module, nn.Embedding | nn.EmbeddingBag):
        raise ConfigError(f"{where} takes integers. Choose role=output or role=weight.")
    return matches[0]
