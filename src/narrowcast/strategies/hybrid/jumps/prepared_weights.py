"""The weights of a prepared model, as jumps need them: full values, and bits for the way back."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from narrowcast.errors import RecipeError, UnsupportedError
from narrowcast.numerics.parts import nearest
from narrowcast.precision.dtensor import as_sharded
from narrowcast.precision.step.prepared import Prepared
from narrowcast.precision.weights.master import SCALE
from narrowcast.precision.weights.trained import TrainedWeights
from narrowcast.strategies.hybrid.jumps.access import ExactWeights

MOMENTS = ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
"""What of an optimizer's state is zero when it begins; a name that is none of these may hold
weights (schedule-free optimizers keep a point `z`)."""


@final
class PreparedWeights:
    """A `WeightAccess` to what `prepare` returned, between two of its steps.

    Every write is in place, so captured steps and weights kept in fp8 see it. The average of the
    weights stays what it is and follows with the steps to come.
    """

    def __init__(self, prepared: Prepared) -> None:
        self._engine = prepared.engine
        if any(as_sharded(p) is not None for p in self._weights.all):
            raise UnsupportedError(
                "jumps were asked for, and the weights are sharded over devices, whose movements "
                "nobody sees as a whole; train on one device, or without jumps"
            )

    @property
    def names(self) -> Sequence[str]:
        """The name of each weight, in the model's order."""
        return self._weights.names

    def read(self) -> list[Tensor]:
        """Return every weight in fp32 with every digit kept of it."""
        self._refuse_average()
        return [self._weights.full(p).float() for p in self._weights.all]

    @torch.no_grad()
    def write(self, values: Sequence[Tensor]) -> None:
        """Give every weight a value: in its format, the digits beyond in its master weight.

        Rounded to the nearest, also where steps round by chance: nothing is drawn.
        """
        self._refuse_average()
        masters, places = self._weights.masters, self._places()
        for p, value in zip(self._weights.all, values, strict=True):
            p.copy_(nearest(value, p.dtype))
            if p in places:
                masters.take(places[p], value)

    @torch.no_grad()
    def snapshot(self, *, with_moments: bool = False) -> ExactWeights:
        """Return copies of working weights and of what is kept beside them, on the device."""
        self._refuse_average()
        moments = self._moments() if with_moments else []
        return ExactWeights(
            tuple(t.clone() for t in self._held()), tuple(t.clone() for t in moments)
        )

    @torch.no_grad()
    def restore(self, exact: ExactWeights) -> None:
        """Put back what `snapshot` copied, bit for bit and in place.

        Moments come back where they were copied.
        """
        for mine, saved in zip(self._held(), exact.tensors, strict=True):
            mine.copy_(saved)
        if exact.moments:
            for mine, saved in zip(self._moments(), exact.moments, strict=True):
                mine.copy_(saved)

    def refuse_reset(self) -> None:
        """Refuse an optimizer whose state is unknown here, and may be no moments."""
        for state in self._engine.optimizer.state.values():
            for key, value in state.items():
                if key.removesuffix(SCALE) not in MOMENTS or not _is_resettable(value):
                    raise RecipeError(
                        f"moments were to be reset after a jump, and the optimizer keeps `{key}`, "
                        f"which may be something else (known are {', '.join(MOMENTS)}); write "
                        "moments=keep"
                    )

    @torch.no_grad()
    def reset_moments(self) -> None:
        """Let the optimizer begin anew, in place; one whose state is unknown here is refused."""
        self.refuse_reset()
        for tensor in self._moments():
            tensor.zero_()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Leave no trace of passes: gradients, buffers, fp8 scales and random numbers stay."""
        device = self._weights.device
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), self._engine.isolated():
            yield

    @property
    def _weights(self) -> TrainedWeights:
        return self._engine.weights

    def _places(self) -> dict[nn.Parameter, int]:
        return {p: i for i, p in enumerate(self._weights.masters.parameters)}

    def _held(self) -> list[Tensor]:
        """Return all tensors that hold weights: the working ones, and those beside them."""
        masters = self._weights.masters
        beside = [masters.beside(i) for i in range(len(masters.parameters))]
        return [*(p.detach() for p in self._weights.all), *(b for b in beside if b is not None)]

    def _moments(self) -> list[Tensor]:
        states = self._engine.optimizer.state.values()
        return [value for state in states for value in state.values() if isinstance(value, Tensor)]

    def _refuse_average(self) -> None:
        self._weights.ownership.refuse_swapped_in(doing="a jump")


def _is_resettable(value: Any) -> bool:
    """Say whether a state is a tensor, or None as SGD without momentum has it."""
    return value is None or isinstance(value, Tensor)
