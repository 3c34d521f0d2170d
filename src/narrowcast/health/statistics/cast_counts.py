"""What casts to fp8 have lost, counted by what makes them rather than seen in a sample.

With delayed scaling the kernels that quantise note the largest magnitude of all values, and of one
value in seven whether it was saturated or flushed to zero, by the scale that was in force. A sample
knows none of these: it would be scaled by itself, and so never saturates.
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from narrowcast.health.statistics.statistics import COLUMNS
from narrowcast.precision.fp8.delayed import AmaxHistory
from narrowcast.precision.plan.roles import OPERANDS
from narrowcast.precision.products.operands import ProductFormats

_AMAX, _OVERFLOW, _UNDERFLOW = map(COLUMNS.index, ("amax", "overflow", "underflow"))


@final
class CastCounts:
    """The rows of a table of statistics whose casts are counted, and where."""

    def __init__(self, model: nn.Module, tensors: Sequence[tuple[str, str, str]]) -> None:
        """Find the counts of tensors, each a module's name, a role and a format."""
        matches = [(i, _history(model, *tensor), tensor[1]) for i, tensor in enumerate(tensors)]
        counted = [(i, history, OPERANDS.index(role)) for i, history, role in matches if history]
        self._whole = next((history.whole for _, history, _ in counted), None)
        if self._whole is not None:
            device = self._whole.counts.device
            self._rows = torch.tensor([i for i, _, _ in counted], device=device)
            self._modules = torch.tensor([h.module for _, h, _ in counted], device=device)
            self._roles = torch.tensor([role for _, _, role in counted], device=device)

    @torch.no_grad()
    def take_into(self, table: Tensor) -> None:
        """Put what was counted since the last time in the place of what samples showed.

        Where nothing was looked at, the sample's numbers stay; and so does the magnitude of one
        that is not finite. Counts begin anew. Waits for nothing.
        """
        if self._whole is None:
            return
        counts, peak = self._whole.take_counts()
        looked, saturated, flushed = counts[self._modules, self._roles].float().unbind(1)
        for column, lost in ((_OVERFLOW, saturated), (_UNDERFLOW, flushed)):
            sampled = table[self._rows, column]
            table[self._rows, column] = torch.where(looked > 0, lost / looked, sampled)
        sampled = table[self._rows, _AMAX]
        table[self._rows, _AMAX] = torch.maximum(sampled, peak[self._modules, self._roles])


def _history(model: nn.Module, name: str, role: str, form: str) -> AmaxHistory | None:
    """Return what counts the casts of a tensor to this format; None where nobody does."""
    module = model.get_submodule(name)
    history, formats = module.__dict__.get("nc_history"), module.__dict__.get("nc_formats")
    if role not in OPERANDS or not isinstance(history, AmaxHistory):
        return None
    assert isinstance(formats, ProductFormats)
    cast_to = formats.grad_input if role == "grad_output" else formats.forward
    return history if cast_to.name == form else None
