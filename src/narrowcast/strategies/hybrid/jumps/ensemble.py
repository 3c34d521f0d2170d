"""Several predictors as one: each counts as much as it has been right of late."""

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from narrowcast.errors import CheckpointError, RecipeError
from narrowcast.strategies.hybrid.jumps.history import WeightHistory
from narrowcast.strategies.hybrid.jumps.predictor import Predictor, require

MEMORY = 0.7
"""The part of an error that the next snapshot leaves of it: three or four count."""
SMALLEST_ERROR = 1e-6
"""Relative; below it members are equally right, and none alone decides."""


@final
class Ensemble:
    """The mean of its members, weighted by the inverse of their recent squared errors.

    An error is of the last movement as it would have been predicted without it, relative to that
    movement: 1 is the error of who predicts nothing, and what a member begins with. Waits for the
    device where a member does.
    """

    learns = True
    name = "ensemble"

    def __init__(self, members: Sequence[Predictor], *, device: torch.device) -> None:
        if not members:
            raise RecipeError("an ensemble of no predictors was asked for; name one or more")
        self.members = tuple(members)
        self.needs = max(member.needs for member in members)
        self.cost = sum(member.cost for member in members)
        self._errors = torch.ones(len(members), device=device)
        self._seen_step = -1

    def weights(self) -> Tensor:
        """Return what each member counts; they sum to one. On the device."""
        inverse = 1 / self._errors.clamp(min=SMALLEST_ERROR)
        return inverse / inverse.sum()

    @torch.no_grad()
    def predict(self, history: WeightHistory, *, ahead_steps: int) -> list[Tensor]:
        """Return the weighted mean of what the members predict."""
        require(self, history, ahead_steps=ahead_steps)
        total = [torch.zeros(shape, device=history.device) for shape in history.shapes]
        for member, weight in zip(self.members, self.weights().unbind(), strict=True):
            deltas = member.predict(history, ahead_steps=ahead_steps)
            torch._foreach_mul_(deltas, weight)
            torch._foreach_add_(total, deltas)
        return total

    def observe(self, history: WeightHistory) -> None:
        """Judge each member by the last movement, then let it learn from that."""
        if not len(history) or history.steps[-1] == self._seen_step:
            return
        self._seen_step = history.steps[-1]
        before = history.without_last()
        for number, member in enumerate(self.members):
            if len(before) >= member.needs:
                predicted = member.predict(before, ahead_steps=history.settings.every)
                error = relative_error(predicted, history.move(len(history) - 2))
                self._errors[number] = MEMORY * self._errors[number] + (1 - MEMORY) * error
            member.observe(history)

    def state_dict(self) -> dict[str, Any]:
        """Return the errors, and what members have learnt, by place."""
        return {
            "names": [member.name for member in self.members],
            "errors": self._errors.clone(),
            "seen_step": self._seen_step,
            "members": [member.state_dict() for member in self.members],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where a saved ensemble of the same members stood."""
        mine = [member.name for member in self.members]
        if list(state["names"]) != mine:
            raise CheckpointError(
                f"the checkpoint's ensemble has {', '.join(state['names'])}, this one "
                f"{', '.join(mine)}; write the predictors of the checkpoint in their order"
            )
        self._errors.copy_(state["errors"])
        self._seen_step = int(state["seen_step"])
        for member, saved in zip(self.members, state["members"], strict=True):
            member.load_state_dict(saved)


@torch.no_grad()
def relative_error(predicted: Sequence[Tensor], actual: Sequence[Tensor]) -> Tensor:
    """Return the squared error over the squared movement, on the device; never a NaN.

    Where nothing moved it is 0 for who predicted so. At most 100: no miss is to count for ever.
    """
    wrong = torch._foreach_sub(list(predicted), list(actual))
    off = torch.stack([w.square().sum() for w in wrong]).sum()
    way = torch.stack([a.square().sum() for a in actual]).sum()
    ratio = torch.where(off > 0, off / way, torch.zeros_like(off))
    return torch.nan_to_num(ratio, nan=100.0).clamp(max=100.0)
