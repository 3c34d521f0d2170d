"""Several torch optimizers as one: each updates its own groups, with its own state."""

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from narrowcast.errors import ConfigError

_TOLD = ("grad_scale", "found_inf")
"""The attributes through which torch's GradScaler makes a fused optimizer skip."""


def member_optimizers(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """Return the optimizers of a combined one; itself if it is a single one."""
    return optimizer.parts if isinstance(optimizer, SideBySide) else (optimizer,)


def as_one(optimizers: Sequence[Optimizer], model: nn.Module) -> Optimizer:
    """Return several optimizers of a model as one; refuse a weight that two of them would move."""
    if not optimizers:
        raise ConfigError("prepare() needs at least one optimizer, got an empty list.")
    if len(optimizers) == 1:
        return optimizers[0]
    names = {p: name for name, p in model.named_parameters()}
    seen: dict[nn.Parameter, int] = {}
    for number, optimizer in enumerate(optimizers):
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if seen.setdefault(p, number) != number:
                raise ConfigError(
                    f"{names.get(p, 'A weight')} is in two optimizers, {seen[p]} and {number}, "
                    "and both would update it. Give each weight to one optimizer."
                )
    return SideBySide(optimizers)


@final
class SideBySide(Optimizer):
    """Steps its optimizers in turn; `param_groups` and `state` are the same objects as theirs."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.parts = tuple(optimizers)
        """Those that are stepped, in order."""
        # torch's own `__init__` would make groups and a state of its own; this makes the rest.
        self.__setstate__({"defaults": {}})
        # Whether each can skip a step on the device.
        self._step_supports_amp_scaling = all(
            getattr(each, "_step_supports_amp_scaling", False) for each in optimizers
        )

    def __repr__(self) -> str:
        return " beside ".join(map(repr, self.parts))

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all of them."""
        return [group for each in self.parts for group in each.param_groups]

    @property
    def state(self) -> "_States":  # type: ignore[override]
        """The states of all of them."""
        return _States(self.parts)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None
        info = {name: vars(self)[name] for name in _TOLD if name in vars(self)}
        for each in self.parts:
            vars(each).update(info)
            try:
                each.step()
            finally:
                for name in info:
                    delattr(each, name)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise, because it is unclear which optimizer would update it."""
        raise ConfigError(
            "Parameter groups belong to a single optimizer here. Call add_param_group() on that "
            "optimizer before prepare()."
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all."""
        return {"optimizers": [each.state_dict() for each in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state."""
        for each, state in zip(self.parts, state_dict["optimizers"], strict=True):
            each.load_state_dict(state)


@final
class _States(MutableMapping[Tensor, Any]):
    """The states of several optimizers by parameter, each in that of the one which holds it."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers

    def __getitem__(self, key: Tensor) -> Any:
        return self._state_with(key)[key]

    def __setitem__(self, key: Tensor, value: Any) -> None:
        home = next(
            each
            for each in self._optimizers
            if any(p is key for group in each.param_groups for p in group["params"])
        )
        home.state[key] = value

    def __delitem__(self, key: Tensor) -> None:
        del self._state_with(key)[key]

    def __contains__(self, key: object) -> bool:
        return any(key in each.state for each in self._optimizers)

    def __iter__(self) -> Iterator[Tensor]:
        return (key for each in self._optimizers for key in each.state)

    def __len__(self) -> int:
        return sum(len(each.state) for each in self._optimizers)

    def _state_with(self, key: Tensor) -> MutableMapping[Tensor, Any]:
        for each in self._optimizers:
            if key in each.state:
                return each.state
        raise KeyError(key)
