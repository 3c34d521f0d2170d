"""The fp8 side of a whole model: fp8 weights, and the histories their scales come from.

The first matrix of a layer decides its delayed scale. If that step is skipped, the matrix may have
been the reason: the scale is undone, and the next matrix decides.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from narrowcast.kernels.launch import is_capturing
from narrowcast.precision.fp8.delayed import AmaxHistory
from narrowcast.precision.fp8.linear import Fp8Linear


class Fp8Model:
    """Every module of a model with fp8 weights or delayed scaling; often none."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = [m for m in model.modules() if isinstance(m, Fp8Linear)]
        results = {name: m.__dict__.get("nc_history") for name, m in model.named_modules()}
        self._by_name = {name: h for name, h in results.items() if isinstance(h, AmaxHistory)}
        self._histories = next((h.whole for h in self._by_name.values()), None)

    def refresh(self) -> None:
        """Update the fp8 copies of changed weights. A compiled model does not check by itself."""
        if not torch.compiler.is_compiling():
            for layer in self._layers:
                layer.nc_refresh()

    def advance(self, finite: Tensor, *, loss_growth: Tensor | None) -> None:
        """Take into the histories what a step has seen, if it was applied."""
        if self._histories is not None:
            self._histories.advance(finite, loss_growth=loss_growth)

    @property
    def has_histories(self) -> bool:
        """Whether any scale comes from past steps."""
        return self._histories is not None

    @property
    def decided_scales(self) -> frozenset[int]:
        """Where the scales from past steps are that are in use."""
        return frozenset() if self._histories is None else self._histories.decided

    def forget(self, keep: frozenset[int] = frozenset()) -> None:
        """Let the next matrices initialise unset scales, except those at `keep`."""
        if self._histories is not None:
            self._histories.forget(keep)

    def take_over(self, before: "Fp8Model") -> None:
        """Continue the histories of modules that had one. Synchronises with the device."""
        shared = [(h, before._by_name[n]) for n, h in self._by_name.items() if n in before._by_name]
        if self._histories is not None and shared:
            self._histories.take_over(shared)

    @contextlib.contextmanager
    def amax_frozen(self) -> Iterator[None]:
        """Leave the magnitudes of weights that are only lent to the model out of its histories."""
        if self._histories is None:
            yield
            return
        # As `.data`: autograd may be keeping it for a backward pass.
        noted = self._histories.cast_stats.data
        before = noted.clone()
        try:
            yield
        finally:
            noted.copy_(before)

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Take back afterwards what passes inside the block did to scales and fp8 weights."""
        made = [(layer, layer.nc_weight, layer.nc_weight_key) for layer in self._layers]
        histories = self._histories
        with contextlib.nullcontext() if histories is None else histories.unchanged():
            try:
                yield
            finally:
                for layer, weight, key in made:
                    # The next step updates a weight that was updated here again, and records it.
                    layer.nc_weight, layer.nc_weight_key = weight, key

    def bytes(self) -> dict[str, int]:
        """Return the bytes of fp8 weights by role; empty if there are none."""
        made = [layer.nc_weight for layer in self._layers if layer.nc_weight is not None]
        return {"fp8": sum(q.rowwise.nbytes + q.columnwise.nbytes for q in made)} if made else {}

    def state_dict(self) -> dict[str, Any] | None:
        """Return the histories; the weights are made from their originals."""
        return None if self._histories is None else self._histories.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Restore saved histories. Waits for the device."""
        if self._histories is not None:
            assert state is not None
            self._histories.load_state_dict(state)


class StepCounts(NamedTuple):
    """How many steps there were so far."""

    applied: int
    skipped: int


@final
class FirstScales:
    """Takes back scales that no step but skipped ones has made."""

    def __init__(self, counts: Callable[[], StepCounts], *, device: torch.device) -> None:
        self._counts, self._device = counts, device
        """To ask for the counts is to wait for the device."""
        self.applied_before = 0
        """Steps that were applied before the model had these scales."""
        self._fp8: Fp8Model | None = None
        self._emulated = False
        self._known: tuple[frozenset[int], int] | None = None
        self._checked_at = math.inf

    def begin(self, fp8: Fp8Model, *, emulated: bool, step: int, applied_before: int) -> None:
        """Track the scales of this model, starting at this step count."""
        self._fp8, self._emulated = fp8, emulated
        self.applied_before, self._known = applied_before, None
        self._checked_at = step if fp8.has_histories else math.inf

    def take_back(self, *, step: int) -> None:
        """Forget what skipped steps have left, once for each number of steps.

        Waits until a step was applied, and later where a scale is new: of a layer not used before.
        """
        if self._fp8 is None or step <= self._checked_at:
            return
        if is_capturing(self._device):
            return  # a capture cannot wait
        self._checked_at = step
        before, fp8 = self._known, self._fp8
        if before is None or before != self._now(fp8):
            applied = self._counts().applied > self.applied_before
            if before is not None or not applied:
                # Keep the previous values: a captured step uses them.
                fp8.forget(frozenset() if before is None else before[0])
            self._known = self._now(fp8) if applied else None

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Restore the state from before the block afterwards."""
        stored = self._checked_at, self._known
        try:
            yield
        finally:
            self._checked_at, self._known = stored

    def _now(self, fp8: Fp8Model) -> tuple[frozenset[int], int]:
        """Return what changes where a skipped step may have left a scale.

        Emulated products do not record which scales they use, so every skipped step counts.
        On a GPU that synchronises with the device.
        """
        return fp8.decided_scales, self._counts().skipped if self._emulated else 0
