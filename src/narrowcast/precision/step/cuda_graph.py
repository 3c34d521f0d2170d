"""What a CUDA graph of a step needs to know of the model, and to tell it."""

from collections.abc import Sequence
from typing import final

from torch import Tensor

from narrowcast.precision.weights.trained import TrainedWeights


@final
class CapturedStep:
    """The side of a prepared model that is for those who record its step and replay it."""

    def __init__(self, weights: TrainedWeights, *, update_path: str) -> None:
        self._weights, self._update_path = weights, update_path

    @property
    def unsupported_reason(self) -> str:
        """Why no CUDA graph can hold this model's update; nothing where one can."""
        if self._weights.device.type != "cuda":
            return f"CUDA graphs are not for {self._weights.device.type}"
        if self._weights.one_pass is None:
            return f"the update is not the one-pass kernel ({self._update_path})"
        return ""

    def present(self) -> list[int]:
        """Return the places of the weights that have a gradient now."""
        return self._weights.with_gradients()

    def gradients(self) -> list[Tensor | None]:
        """Return every weight's gradient as it is now."""
        return [p.grad for p in self._weights.all]

    def set_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Give every weight the gradient it had."""
        for p, gradient in zip(self._weights.all, gradients, strict=True):
            p.grad = gradient

    def write_settings(self) -> None:
        """Let the next replay of a captured update use the optimizer's settings of now."""
        assert self._weights.one_pass is not None
        self._weights.one_pass.write_hyper()

    def has_replayed(self, present: Sequence[int]) -> None:
        """Take note that a captured update was replayed: weights kept in fp8 are older than it."""
        assert self._weights.one_pass is not None
        self._weights.one_pass.has_written(present)
