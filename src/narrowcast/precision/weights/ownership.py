"""What `prepare` changed, whose gradients the weights have, and outside changes.

Stepping the optimizer by hand, replacing a layer or casting the model would train something else
without notice. So would gradients of another run or of a plain `loss.backward()`, which lack the
loss scale. The first check takes the host about half a microsecond per weight, the second 50 ns.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter, is_
from types import NoneType
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from narrowcast.errors import ConfigError
from narrowcast.kernels.launch import are_same
from narrowcast.precision.gradients.check import Unscaled

_GRAD, _VERSION = attrgetter("grad"), attrgetter("_version")  # mapped over all weights
_Marks = tuple[list[Tensor | None], list[int]]


@final
class GradientWatch:
    """Knows the gradients that backward passes of the run have made since its last step."""

    def __init__(self, weights: Sequence[nn.Parameter], names: Sequence[str]) -> None:
        self._weights, self._names = weights, names
        self._are_ours = False
        self._cleared = False
        """Whether `zero_grad` was called since the last step."""
        self._cleared_weights: set[nn.Parameter] = set()
        """The weights of the optimizers of which that is so."""
        self._marks = self._none
        """Gradients as they were last made or cleared; with a loss scale only."""
        self.unscaled: Unscaled | None = None
        """What was found when the scale was divided out of them before the step."""

    def before_backward(self, *, scaled: bool) -> None:
        """Raise if there are gradients that this run did not make, unless they are wanted."""
        if self._are_ours and not scaled:
            return
        gradients = list(map(_GRAD, self._weights))
        if not any(g is not None for g in gradients):
            self._are_ours, self.unscaled = False, None
            return
        if self.unscaled is not None:
            raise ConfigError(
                "backward() was called after unscale(), which would add scaled gradients to "
                "unscaled ones. Call every backward() of a step first, then unscale(), then "
                "step()."
            )
        if not scaled and self._cleared:
            return
        name = self._first_foreign()
        if name and self._are_ours:
            raise ConfigError(_changed(name, before="this backward()"))
        if name and self._cleared:
            raise ConfigError(_unscaled(name))
        if name:
            raise ConfigError(
                f"{name} has a gradient that was not made by backward() of this run, but by "
                "another run's loss or by loss.backward(). Call run.zero_grad() (or "
                "optimizer.zero_grad()) at the start of the step to drop it."
            )

    def after_backward(self, *, scaled: bool) -> None:
        """Take the gradients that are there for the run's own."""
        self._are_ours = True
        self._cleared_weights.clear()
        self._marks = self._now() if scaled else self._none

    def before_step(self, *, scaled: bool, doing: str = "step()") -> None:
        """Raise if the gradients do not have the loss scale, or no longer."""
        if scaled and self.unscaled is None:
            if not self._are_ours:
                raise ConfigError(_unscaled(""))
            if name := self._first_foreign():
                raise ConfigError(_changed(name, before=doing))
        self._marks = self._none  # or they would outlive the update

    @property
    def are_scaled(self) -> bool:
        """Whether all gradients have the loss scale of the run. May synchronise."""
        return self._are_ours and self.unscaled is None and not self._first_foreign()

    def clear(self, weights: Sequence[nn.Parameter], *, set_to_none: bool) -> None:
        """Clear the gradients of weights, as torch does: all, or those of one optimizer of some."""
        for p in weights:
            if set_to_none:
                p.grad = None
            elif p.grad is not None:
                p.grad.detach_().zero_()
        self._cleared_weights.update(weights)
        none_left = all(g is None for g in map(_GRAD, self._weights))
        if none_left or len(self._cleared_weights) == len(self._weights):
            self._are_ours, self._cleared, self.unscaled = False, True, None
            self._marks = self._none if set_to_none else self._now()
        else:
            (known, counts), (gradients, versions), cleared = self._marks, self._now(), set(weights)
            places = [i for i, p in enumerate(self._weights) if p in cleared]
            for i in places:
                known[i], counts[i] = gradients[i], versions[i]

    def end_step(self) -> None:
        """Forget the gradients of a step that has ended."""
        self._are_ours, self._cleared = False, False
        self.unscaled, self._marks = None, self._none
        self._cleared_weights.clear()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Begin the block as if no gradients had been made; know afterwards what was known."""
        known, cleared = (
            (self._are_ours, self._cleared, self.unscaled, self._marks),
            set(self._cleared_weights),
        )
        self.end_step()
        try:
            yield
        finally:
            self._are_ours, self._cleared, self.unscaled, self._marks = known
            self._cleared_weights = cleared

    @contextlib.contextmanager
    def set_aside(self, places: Sequence[int], *, rescale: Callable[[], None]) -> Iterator[None]:
        """Take the gradients in these places away for a step of the others.

        `rescale` gives them the loss scale that applies after the block. Those that were the run's
        own stay so.
        """
        (known, counts), are_ours = self._marks, self._are_ours
        stored = [(i, self._weights[i].grad) for i in places]
        own = [i for i, g in stored if g is known[i] and g is not None and g._version == counts[i]]
        for i, _ in stored:
            self._weights[i].grad = None
        try:
            yield
        finally:
            for i, gradient in stored:
                self._weights[i].grad = gradient
            if stored and are_ours:
                rescale()
                self._are_ours = True
                marks, versions = self._marks
                for i in own:
                    gradient = self._weights[i].grad
                    assert gradient is not None
                    marks[i], versions[i] = gradient, gradient._version

    def _first_foreign(self) -> str:
        """Return the name of a weight with a foreign gradient that is not zero, if any.

        Synchronises only if there is one: `model.zero_grad(set_to_none=False)` leaves zeros.
        """
        (gradients, versions), (known, counts) = self._now(), self._marks
        if versions == counts and all(map(is_, gradients, known)):
            return ""
        pairs = zip(gradients, versions, strict=True), zip(known, counts, strict=True)
        for name, (now, version), (then, count) in zip(self._names, *pairs, strict=True):
            is_known = now is then and version == count
            if now is not None and not is_known and bool(now.any()):
                return name
        return ""

    def _now(self) -> _Marks:
        gradients = list(map(_GRAD, self._weights))
        if NoneType not in map(type, gradients):
            return gradients, list(map(_VERSION, gradients))
        return gradients, [0 if g is None else g._version for g in gradients]

    @property
    def _none(self) -> _Marks:
        count = len(self._weights)
        return [None] * count, [0] * count


def _changed(name: str, *, before: str) -> str:
    return (
        f"The gradient of {name} was changed between backward() and {before}, while it still has "
        "the loss scale. Call run.unscale() after the last backward(), then clip, edit or add to "
        "gradients."
    )


def _unscaled(name: str) -> str:
    where = f" (for example {name})" if name else ""
    return (
        f"Some gradients{where} were not made by backward() of the prepared model, so they do not "
        "have the loss scale that step() would divide out. Write step(loss) or backward(loss) "
        "instead of loss.backward(). Prepare models that share a loss as one: "
        "prepare(nn.ModuleList([…]), [optimizer, …])."
    )


StandIn = Literal["use_ema", "use_eval_weights", "reading_out"]
"""What may be in the place of weights for a while, by the block it is so in."""
ValueOf = Callable[[nn.Parameter], Tensor]
"""The swapped-in value of a weight, with all its digits."""
_STAND_INS: dict[StandIn, str] = {
    "use_ema": "averages of its weights",
    "use_eval_weights": "the evaluation weights",
    "reading_out": "weights selected for evaluation",
}
# Mapped over all weights in every step: a loop in Python would take several times as long.
_DTYPE, _DEVICE = attrgetter("dtype"), attrgetter("device")
_REQUIRES_GRAD = attrgetter("requires_grad")


@final
class OwnStepOnly:
    """A hook before the optimizer's step that refuses every step but our own."""

    def __init__(self) -> None:
        self._ours = False

    @contextlib.contextmanager
    def let_pass(self) -> Iterator[None]:
        """Step the optimizer inside the block."""
        self._ours = True
        try:
            yield
        finally:
            self._ours = False

    def __call__(self, *_: Any) -> None:
        """Raise unless it is our own step."""
        if not self._ours:
            raise ConfigError(
                "optimizer.step() was called after prepare(), when gradients may be scaled and "
                "the optimizer may hold master weights. Call run.step(loss), or call "
                "run.release() first."
            )


@final
class Ownership:
    """A model and its optimizer as they were taken over, until `give_back`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        weights: Sequence[nn.Parameter],
        names: Sequence[str],
        *,
        held: Mapping[torch.optim.Optimizer, Sequence[nn.Parameter]],
    ) -> None:
        """Take over: `held` says which of the weights each optimizer has, were there several."""
        self._optimizer, self._weights, self._names = optimizer, list(weights), list(names)
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self._layout = _layout(self._weights)
        self._homes = _Homes(model, set(self._weights))
        self.own_step = OwnStepOnly()
        own, groups = set(self._weights), optimizer.param_groups
        self._masters = [p for group in groups for p in group["params"] if p not in own]
        self.gradients = GradientWatch(self._weights, names)
        """Distinguishes gradients of the run from others."""
        self._zero_grads = {
            each: _ZeroGrad(self.gradients, own, each) for each, own in held.items()
        }
        self._stand_in: tuple[StandIn, ValueOf] | None = None
        # Weakly, and only these: an activation may well be shared with another model.
        self.modules = weakref.WeakSet(m for m in model.modules() if m._parameters)
        self._hooks = _hooked(held, self.own_step)  # after all that can fail
        for each, zero_grad in self._zero_grads.items():
            vars(each)["zero_grad"] = zero_grad
        _TAKEN.add(self)

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        """Clear all gradients, those of the optimizer's own weights too."""
        for zero_grad in self._zero_grads.values():
            zero_grad(set_to_none)

    def check_unchanged(self) -> None:
        """Raise if weights, groups or dtypes are not those of `prepare`."""
        groups = [group["params"] for group in self._optimizer.param_groups]
        if len(groups) != len(self._groups) or not all(map(are_same, groups, self._groups)):
            raise ConfigError(
                "The optimizer's parameters changed after prepare(), and the new ones would be "
                "neither unscaled nor checked. Call release(), change them, and call prepare() "
                "again."
            )
        if not all(map(_REQUIRES_GRAD, self._masters)):
            raise ConfigError(
                "A weight was frozen through the optimizer's param_groups, which hold master "
                "weights since prepare(). Call requires_grad_(False) on the weight of the model."
            )
        if name := self._homes.first_changed():
            raise ConfigError(
                f"{name} of the model was replaced after prepare(), so it has no policy and the "
                "optimizer does not hold it. Call release(), replace it, add its weights to the "
                "optimizer, and call prepare() again."
            )
        stored = _layout(self._weights)
        if stored != self._layout:
            before, after = zip(*self._layout, strict=True), zip(*stored, strict=True)
            each = zip(self._names, before, after, strict=True)
            name, was, now = next((n, a, b) for n, a, b in each if a != b)
            module = name.rpartition(".")[0] or "NAME"
            raise ConfigError(
                f"{name} changed after prepare() from {_describe(was)} to {_describe(now)}, which "
                "the policy and the optimizer state do not follow. Resize the model or call "
                "model.to(…) before prepare(). If the model casts the weight in its forward, "
                f"write `{module}: fp32` in the policy."
            )

    @property
    def weights(self) -> set[nn.Parameter]:
        """The weights that were taken over."""
        return set(self._weights)

    @contextlib.contextmanager
    def swapped_in(self, what: StandIn, get_value: ValueOf) -> Iterator[None]:
        """Mark the working weights as swapped inside the block; reading them raises."""
        before, self._stand_in = self._stand_in, (what, get_value)
        try:
            yield
        finally:
            self._stand_in = before

    @property
    def stand_in(self) -> ValueOf | None:
        """What the working weights hold now, if not themselves."""
        return None if self._stand_in is None else self._stand_in[1]

    def check_not_swapped(self, *, doing: str) -> None:
        """Raise if other values are swapped in for the trained weights."""
        if self._stand_in is not None:
            block, _ = self._stand_in
            raise ConfigError(
                f"{doing} was called inside {block}(), where the model holds {_STAND_INS[block]}. "
                "Leave the block first."
            )

    def give_back(self) -> None:
        """Allow `optimizer.step()` again."""
        _TAKEN.discard(self)
        for hook in self._hooks:
            hook.remove()
        for each, zero_grad in self._zero_grads.items():
            if vars(each).get("zero_grad") is zero_grad:
                del vars(each)["zero_grad"]
                if zero_grad.theirs is not None:
                    vars(each)["zero_grad"] = zero_grad.theirs


_TAKEN: "weakref.WeakSet[Ownership]" = weakref.WeakSet()
"""What live runs own at the moment."""


def check_not_prepared(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise if a run already has this model, a part of it, or this optimizer."""
    if any(isinstance(hook, OwnStepOnly) for hook in optimizer._optimizer_step_pre_hooks.values()):
        raise ConfigError(
            "This optimizer is already prepared. Use that run, or call release() on it first. If "
            "you no longer have it, build the model and the optimizer again."
        )
    held = {p for group in optimizer.param_groups for p in group["params"]}
    for taken in list(_TAKEN):
        for name, module in model.named_modules():
            if module in taken.modules:
                raise ConfigError(
                    f"{name or 'This model'} is already prepared. Use that run, or call release() "
                    "on it first. Prepare models that share a module as one nn.ModuleList."
                )
        shared = held & taken.weights
        for name, p in model.named_parameters():
            if p in shared:
                raise ConfigError(
                    f"{name} is already trained by another run. Prepare models that share it as "
                    "one nn.ModuleList, or call release() on the other run first."
                )


def _hooked(
    optimizers: Iterable[torch.optim.Optimizer], own_step: OwnStepOnly
) -> list[RemovableHandle]:
    """Add step hooks to all optimizers, or to none if one does not support them."""
    hooks: list[RemovableHandle] = []
    try:
        for each in optimizers:
            hooks.append(each.register_step_pre_hook(own_step))
            # One that wraps another may write down its state in a way of its own.
            if hasattr(each, "_optimizer_state_dict_pre_hooks"):
                hooks.append(each.register_state_dict_pre_hook(_drop_empty_states))
    except BaseException:
        for hook in hooks:
            hook.remove()
        raise
    return hooks


def _drop_empty_states(optimizer: torch.optim.Optimizer) -> None:
    """Drop the empty states that reading `optimizer.state[weight]` leaves, unsaved."""
    held = {p for group in optimizer.param_groups for p in group["params"]}
    for weight in [w for w, state in optimizer.state.items() if w not in held and not state]:
        del optimizer.state[weight]


@final
class _ZeroGrad:
    """In place of an optimizer's `zero_grad`: clears the gradients of the model too.

    Does not hold the optimizer: a cycle would keep all weights until garbage collection.
    """

    def __init__(
        self,
        gradients: GradientWatch,
        weights: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self._gradients, self._optimizer = gradients, weakref.ref(optimizer)
        self._weights = weights
        self.theirs: Any = vars(optimizer).get("zero_grad")

    def __call__(self, set_to_none: bool = True) -> None:
        """Clear all gradients, as torch's own would."""
        self._gradients.clear(self._weights, set_to_none=set_to_none)
        optimizer = self._optimizer()
        if self.theirs is not None:
            self.theirs(set_to_none)
        elif optimizer is not None:
            type(optimizer).zero_grad(optimizer, set_to_none)


def check_not_resized(weight: Tensor, saved: Tensor | None) -> None:
    """Raise if a weight and its residual differ in shape."""
    if saved is not None and saved.shape != weight.shape:
        raise ConfigError(
            f"A weight changed shape after prepare() from {tuple(saved.shape)} to "
            f"{tuple(weight.shape)}, unlike its master weight. Resize the model before prepare()."
        )


@final
class _Homes:
    """Where in a model the trained weights are, and the modules on the way to them."""

    def __init__(self, model: nn.Module, trained: set[nn.Parameter]) -> None:
        self._holders: list[dict[str, Any]] = []
        self._keys: list[str] = []
        self._held: list[object] = []
        self._names: list[str] = []
        for path, module in model.named_modules():
            before = f"{path}." if path else ""
            for key, child in module._modules.items():
                if child is not None and any(p in trained for p in child.parameters()):
                    self._add(module._modules, key, child, before + key)
            for key, p in module._parameters.items():
                if p in trained:
                    self._add(module._parameters, key, p, before + key)

    def first_changed(self) -> str:
        """Return the name of one that was replaced; empty if none was."""
        now = list(map(dict.get, self._holders, self._keys))
        if are_same(now, self._held):
            return ""
        return next(n for n, a, b in zip(self._names, now, self._held, strict=True) if a is not b)

    def _add(self, holder: dict[str, Any], key: str, held: object, name: str) -> None:
        self._holders.append(holder)
        self._keys.append(key)
        self._held.append(held)
        self._names.append(name)


def _layout(weights: Sequence[Tensor]) -> tuple[list[Any], ...]:
    """Return dtypes, devices, strides and sizes of weights as lists, which compare fastest."""
    requested = (_DTYPE, _DEVICE, Tensor.stride, Tensor.numel)
    return tuple(list(map(each, weights)) for each in requested)


def _describe(stored: tuple[Any, ...]) -> str:
    dtype, device, strides, count = stored
    return f"{count} numbers in {dtype} on {device} with strides {strides}"
