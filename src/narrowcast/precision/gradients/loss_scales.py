"""All loss scales of a run: one, or one per loss, and further ones for parts of the model.

A part with a scale of its own multiplies the gradients inside it by that scale as well, so its
weights are scaled by the product of both. When gradients overflow, the part they overflowed in
backs off; the scale of the whole loss does where no part is to blame or none can give way further.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from narrowcast.errors import ConfigError
from narrowcast.precision.gradients.check import Checked, check_gradients
from narrowcast.precision.gradients.loss_scale import LossScale, RunningScale

# A part's scale begins at one and stays within fp16's own spread of exponents of it.
PART_SPREAD = 2.0**15


class Scales:
    """The running scales, and which parameter is under which."""

    def __init__(
        self,
        settings: LossScale | Mapping[str, LossScale] | None,
        *,
        parts: Sequence[str],
        group_indices: Sequence[int],
        device: torch.device,
    ) -> None:
        named = settings if isinstance(settings, Mapping) else {"loss": settings}
        self._losses = {
            name: RunningScale(value, device) for name, value in named.items() if value is not None
        }
        # The tensor itself: a scale moves in place.
        self.value = next((scale.value for scale in self._losses.values()), None)
        """The scale of the first loss; none where losses are not scaled."""
        self.per_loss = isinstance(settings, Mapping) and len(self._losses) > 1
        if parts and (self.per_loss or not self._losses):
            raise ConfigError(
                "scale_groups needs a single loss scale, because parts of the model add their own "
                "scale to it. Write one loss scale and a policy that uses it (fp16)."
            )
        self.parts = {glob: RunningScale(self._part_settings(), device) for glob in parts}
        # 0 stands for the parameters outside all parts.
        self._group_of_weight = torch.tensor(group_indices, device=device)
        self._finite: dict[str, Tensor] = {}
        self._nothing_gives_way = torch.ones((), dtype=torch.bool, device=device)

    def of_loss(self, name: str) -> RunningScale | None:
        """Return the scale of a loss; None where losses are not scaled."""
        if not self._losses:
            return None
        if name not in self._losses:
            raise ConfigError(
                f"There is no loss scale for {name!r}; prepare() got scales for "
                f"{', '.join(self._losses)}. Use one of these names."
            )
        return self._losses[name]

    def growth_since(self, value: Tensor) -> Tensor | None:
        """Return how many times larger all gradients are than under that scale of the loss.

        None where losses have no scale, or have their own.
        """
        return None if self.value is None or self.per_loss else self.value / value

    @property
    def settings(self) -> LossScale | None:
        """How the scale of the first loss begins and moves."""
        return next(iter(self._losses.values())).settings if self._losses else None

    @property
    def values(self) -> list[Tensor]:
        """Every scale, as it is: those of the losses, then those of the parts."""
        return [scale.value for scale in (*self._losses.values(), *self.parts.values())]

    @contextlib.contextmanager
    def set_to(self, values: Sequence[Tensor]) -> Iterator[None]:
        """Let other values be in force inside the block, and what it finds be forgotten."""
        before, finite = [value.clone() for value in self.values], dict(self._finite)
        try:
            for scale, value in zip(self.values, values, strict=True):
                scale.copy_(value)
            yield
        finally:
            for scale, value in zip(self.values, before, strict=True):
                scale.copy_(value)
            self._finite = finite

    def take_unscaled(self, name: str, gradients: Sequence[Tensor]) -> None:
        """Divide one loss's scale out of its gradients at once, so that the next can be added."""
        scale = self._losses[name]
        inv_scale = scale.value.reciprocal()
        checked = check_gradients(gradients, inv_scale)
        torch._foreach_mul_(list(gradients), inv_scale)
        before = self._finite.get(name)
        self._finite[name] = checked.finite if before is None else checked.finite & before

    def inv_scale(self, present: Sequence[int]) -> Tensor | None:
        """Return the factor that unscales, one for all or one for each of the given parameters."""
        if not self._losses or self.per_loss:
            return None
        inv_scale = next(iter(self._losses.values())).value.reciprocal()
        if not self.parts:
            return inv_scale
        return (inv_scale * self._part_factors())[self._group_indices(present)]

    def update(self, checked: Checked, present: Sequence[int]) -> Tensor:
        """Move every scale after a step; return whether none can give way to an overflow."""
        at_floor = self._nothing_gives_way
        if self.per_loss:
            for name, finite in self._finite.items():
                at_floor = at_floor & (finite | ~self._losses[name].can_give_way)
                self._losses[name].update(finite)
            self._finite.clear()
            return at_floor
        if not self._losses:
            return at_floor
        whole = next(iter(self._losses.values()))
        at_floor = ~whole.can_give_way
        if not self.parts:
            whole.update(checked.finite)
            return at_floor
        bad = torch.zeros(len(self.parts) + 1, device=checked.norms.device)
        bad.index_add_(0, self._group_indices(present), (~checked.norms.isfinite()).float())
        can_give_way = torch.zeros_like(checked.finite)
        for i, part in enumerate(self.parts.values(), start=1):
            blamed = bad[i] > 0
            can_give_way = can_give_way | (blamed & part.can_give_way)
            part.update(~blamed)
        whole.update(checked.finite | can_give_way)
        return at_floor & ~can_give_way

    def state_dict(self) -> dict[str, Any]:
        """Return every scale and its memory."""
        return {
            "losses": {name: scale.state_dict() for name, scale in self._losses.items()},
            "parts": {glob: scale.state_dict() for glob, scale in self.parts.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where saved scales stood."""
        for name, scale in self._losses.items():
            scale.load_state_dict(state["losses"][name])
        for glob, scale in self.parts.items():
            scale.load_state_dict(state["parts"][glob])

    def _part_settings(self) -> LossScale:
        whole = next(iter(self._losses.values())).settings
        return replace(whole, init_scale=1.0, min_scale=1 / PART_SPREAD, max_scale=PART_SPREAD)

    def _part_factors(self) -> Tensor:
        one = torch.ones((), device=self._group_of_weight.device)
        return torch.stack([one, *(part.value.reciprocal() for part in self.parts.values())])

    def _group_indices(self, present: Sequence[int]) -> Tensor:
        if len(present) == len(self._group_of_weight):
            return self._group_of_weight
        return self._group_of_weight[
            torch.tensor(list(present), device=self._group_of_weight.device)
        ]
