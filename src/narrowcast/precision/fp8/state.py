"""The fp8 side of a whole model: weights kept in fp8, and the histories their scales come from."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

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
        """Make the fp8 weights anew that have changed. A compiled model does not look by itself."""
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
        """Let the next matrices decide the scales that no step has, but those at `keep`."""
        if self._histories is not None:
            self._histories.forget(keep)

    def take_over(self, before: "Fp8Model") -> None:
        """Let modules that had a history before go on from it. Waits for the device."""
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
                    # A weight that was made anew here is made again, and noted, by the next step.
                    layer.nc_weight, layer.nc_weight_key = weight, key

    def bytes(self) -> dict[str, int]:
        """Return what the fp8 weights take, by role; nothing where there are none."""
        made = [layer.nc_weight for layer in self._layers if layer.nc_weight is not None]
        return {"fp8": sum(q.rowwise.nbytes + q.columnwise.nbytes for q in made)} if made else {}

    def state_dict(self) -> dict[str, Any] | None:
        """Return the histories; the weights are made from their originals."""
        return None if self._histories is None else self._histories.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Take up where saved histories stood. Waits for the device."""
        if self._histories is not None:
            assert state is not None
            self._histories.load_state_dict(state)
