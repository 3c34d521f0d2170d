"""A task's loss as the engine takes it: its parts checked, its gradients under their own scales."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from narrowcast.errors import ConfigError, blamed_on
from narrowcast.precision.step.prepared import Prepared
from narrowcast.training.task import Batch, LossParts, Task

CLOSE = 2.0**-6
"""How far, of itself, a total may be from the sum of its parts: a few roundings of bf16."""


@final
class Losses:
    """Computes the loss of batches, and backpropagates it."""

    def __init__(self, prepared: Prepared, task: Task) -> None:
        self._prepared, self._task = prepared, task
        self._checked = not task.scaled_losses

    def of(self, model: nn.Module, batch: Batch) -> LossParts:
        """Return the loss of a batch; refuse other parts than the task has declared."""
        with blamed_on("the task's loss"):
            loss: object = self._task.loss(model, batch)
        if isinstance(loss, Tensor):
            loss = LossParts(total=loss)
        if not isinstance(loss, LossParts):
            raise ConfigError(
                f"the task's loss returned a {type(loss).__name__}; return a tensor without "
                "dimensions, or LossParts(total=…, parts={…})"
            )
        for name, value in {"loss": loss.total, **loss.parts}.items():
            is_tensor = isinstance(value, Tensor)
            if not is_tensor or value.dim():
                what = f"has the shape {tuple(value.shape)}" if is_tensor else f"is {value!r}"
                raise ConfigError(
                    f"{name} of the task {what}; return a tensor without dimensions, e.g. its "
                    ".mean()"
                )
        declared = self._task.info.loss_parts
        if set(loss.parts) != set(declared):
            raise ConfigError(
                f"the task's loss has the parts {', '.join(loss.parts) or 'none'}, and "
                f"info.loss_parts declares {', '.join(declared) or 'none'}; give both the same "
                "names"
            )
        return loss

    def backward(self, loss: LossParts, *, micro_batches: int) -> None:
        """Add the gradients of one of so many micro-batches to those already there.

        Waits for the device once, where several losses are scaled, in the first step.
        """
        named = self._task.scaled_losses
        if not named:
            self._prepared.backward(_share(loss.total, micro_batches))
            return
        self._check_sum(loss)
        if self._prepared.loss_scale is None:  # one pass does for all of them
            self._prepared.backward(_share(loss.total, micro_batches))
            return
        for name in named:
            share = _share(loss.parts[name], micro_batches)
            self._prepared.backward(share, name=name, retain_graph=name != named[-1])

    def mean(self, losses: Sequence[LossParts]) -> Tensor:
        """Return the means of detached losses: of the whole, then of each part; on the device."""
        names = self._task.info.loss_parts
        rows = [
            torch.stack(
                [each.float().reshape(()) for each in (loss.total, *_named_losses(loss, names))]
            )
            for loss in losses
        ]
        # A mean of one is a launch for nothing.
        return rows[0] if len(rows) == 1 else torch.stack(rows).mean(0)

    def _check_sum(self, loss: LossParts) -> None:
        if self._checked:
            return
        self._checked = True
        named = self._task.scaled_losses
        total = loss.total.detach().float()
        parts = torch.stack([loss.parts[name].detach().float() for name in named]).sum()
        # One that is not finite is the guard's to deal with.
        if bool(((total - parts).abs() > CLOSE * total.abs()) & total.isfinite()):
            raise ConfigError(
                f"the parts {', '.join(named)}, which are scaled and trained by themselves, add up "
                f"to {parts.item():g}, and the total is {total.item():g}; name all parts of the "
                "total in scaled_losses, each with its weight in it"
            )


def _share(loss: Tensor, micro_batches: int) -> Tensor:
    return loss if micro_batches == 1 else loss / micro_batches


def _named_losses(loss: LossParts, names: Sequence[str]) -> list[Tensor]:
    return [loss.parts[name] for name in names]
