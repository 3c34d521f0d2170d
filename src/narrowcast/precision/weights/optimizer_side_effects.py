"""Optimizers that write weights in other ways than by their step, and what of it can be followed.

Schedule-free ones exchange two points of their own by `train()` and `eval()`; others clamp, average
or swap. Each such method is called with the master weights at hand, and what it leaves is kept. An
optimizer that knows weights by another way than its groups would write past the master weights, and
is refused.
"""

import functools
import types
import weakref
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, final

from torch import Tensor, nn
from torch.optim import Optimizer

from narrowcast.errors import UnsupportedError
from narrowcast.precision.plan.plan import Plan
from narrowcast.precision.weights.master import MasterWeights
from narrowcast.precision.weights.multi_optimizer import member_optimizers
from narrowcast.precision.weights.ownership import Ownership

_LOOKED_INTO = 4
"""How deep lists, dicts and objects of an optimizer are looked into for weights."""
_KNOWN = frozenset({"param_groups", "state", "defaults"})


def check_hidden_weights(
    optimizer: Optimizer, weights: AbstractSet[nn.Parameter], plan: Plan
) -> None:
    """Refuse an optimizer with weights outside its groups, where master weights replace those."""
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

    def __init__(self, optimizer: Optimizer, masters: MasterWeights, ownership: Ownership) -> None:
        self._taken: list[tuple[Optimizer, str]] = []
        if masters.kind == "none" or not masters.parameters:
            return
        for part in member_optimizers(optimizer):
            for name in _methods(type(part)):
                if name not in vars(part):
                    vars(part)[name] = _Writing(part, name, masters, ownership)
                    self._taken.append((part, name))

    def give_back(self) -> None:
        """Let the methods be the optimizers' own again."""
        for optimizer, name in self._taken:
            if isinstance(vars(optimizer).get(name), _Writing):
                del vars(optimizer)[name]
        self._taken = []


@final
class _Writing:
    """In place of a method of an optimizer: calls it with the master weights at hand.

    The optimizer holds this, which therefore holds neither it nor who does: no cycles.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        name: str,
        masters: MasterWeights,
        ownership: Ownership,
    ) -> None:
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
