"""Several torch optimizers as one: each updates its own groups, all share one state."""

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch.optim import Optimizer

_TOLD = ("grad_scale", "found_inf")
"""The attributes by which torch's GradScaler tells a fused optimizer to skip."""


@final
class SideBySide(Optimizer):
    """Steps its optimizers one after the other.

    `param_groups` and `state` are those of all of them: the very same objects, so that whoever
    exchanges parameters, sets a learning rate or saves them reaches each optimizer.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self._counts = [len(each.param_groups) for each in optimizers]
        super().__init__([group for each in optimizers for group in each.param_groups], {})
        for each in optimizers:
            self.state.update(each.state)
        # Whether each can be told on the device that a step is to be skipped.
        self._step_supports_amp_scaling = all(
            getattr(each, "_step_supports_amp_scaling", False) for each in optimizers
        )
        self._share()

    def __repr__(self) -> str:
        return " beside ".join(map(repr, self._optimizers))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None
        told = {name: vars(self)[name] for name in _TOLD if name in vars(self)}
        for each in self._optimizers:
            vars(each).update(told)
            each.step()
            for name in told:
                delattr(each, name)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        groups = iter(self.param_groups)
        for each, count in zip(self._optimizers, self._counts, strict=True):
            each.param_groups = [next(groups) for _ in range(count)]
            each.state = self.state
