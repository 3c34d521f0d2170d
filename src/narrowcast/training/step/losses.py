"""A task's loss: its parts checked, its gradients under their own loss scales."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from narrowcast.errors import ConfigError, blamed_on
from narrowcast.precision.step.prepared import Prepared
from narrowcast.training.step.shares import Share
from narrowcast.training.task import Batch, LossParts, Task

CLOSE = 2.0**-6
"""Largest relative difference of a total from the sum of its parts: a few bf16 roundings."""


@final
class Losses:
    """Computes and backpropagates the loss of batches."""

    def __init__(self, prepared: Prepared, task: Task) -> None:
        self._prepared, self._task = prepared, task
        self._checked = not task.scaled_losses

    def of(self, model: nn.Module, batch: Batch) -> LossParts:
        """Return the loss of a batch; raise if its parts are not those declared."""
        share = batch if isinstance(batch, Share) else Share(batch, 1.0)
        with blamed_on("the task's loss"):
            loss: object = self._task.loss(model, share.batch)
        if isinstance(loss, Tensor):
            loss = LossParts(total=loss)
        if not isinstance(loss, LossParts):
            raise ConfigError(
                f"The task's loss must return a scalar tensor or LossParts(total=…, parts={{…}}), "
                f"got a {type(loss).__name__}."
            )
        for name, value in {"loss": loss.total, **loss.parts}.items():
            is_tensor = isinstance(value, Tensor)
            if not is_tensor or value.dim():
                what = f"shape {tuple(value.shape)}" if is_tensor else f"{value!r}"
                raise ConfigError(
                    f"{name} of the task must be a scalar tensor, got {what}. Return e.g. its "
                    ".mean()."
                )
        declared = self._task.info.loss_parts
        if set(loss.parts) != set(declared):
            raise ConfigError(
                "The task's loss must have the parts in info.loss_parts "
                f"({', '.join(declared) or 'none'}), got {', '.join(loss.parts) or 'none'}. Use "
                "the same names in both."
            )
        return share.weighted(loss)

    def backward(self, loss: LossParts, *, micro_batches: int) -> None:
        """Add the gradients of one micro-batch. Synchronises once if several losses are scaled."""
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
        """Return the mean total loss and the mean of each part, on the device."""
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
                f"The parts in scaled_losses ({', '.join(named)}) must sum to the total loss, got "
                f"{parts.item():g} and a total of {total.item():g}. Name all parts of the total, "
                "each multiplied by its weight."
            )


def _share(loss: Tensor, micro_batches: int) -> Tensor:
    return loss if micro_batches == 1 else loss / micro_batches


def _named_losses(loss: LossParts, names: Sequence[str]) -> list[Tensor]:
    return [loss.parts[name] for name in names]
