"""Buffers that a forward pass writes, given back what they held if the step is skipped."""

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase


class BufferGuard:
    """Gives buffers that a forward pass writes (running means) back what a bad batch took.

    A batch with a NaN in it leaves NaN in the running statistics of a BatchNorm for ever, though
    the step was skipped. Buffers that are never written cost one integer comparison a step.
    """

    def __init__(self, model: nn.Module) -> None:
        # By where they live: a module may put a new tensor in a buffer's place.
        self._homes = [
            (module, name)
            for module in model.modules()
            for name, _ in module.named_buffers(recurse=False)
        ]
        # A first copy of each: a buffer may turn bad on the very first step.
        self._good: list[Tensor] = [self._buffer(i).detach().clone() for i in self._indices]
        self._seen = [(self._buffer(i), self._buffer(i)._version) for i in self._indices]

    def after_step(self, finite: Tensor) -> None:
        """Keep what the step left if it was good, restore what was there if it was not."""
        for i in self._indices:
            buffer, (seen, version) = self._buffer(i), self._seen[i]
            # torch does not count what a batch norm in training writes.
            silent = isinstance(self._homes[i][0], _NormBase) and self._homes[i][0].training
            if buffer is seen and buffer._version == version and not silent:
                continue
            good = self._good[i]
            if good.shape != buffer.shape or good.dtype != buffer.dtype:
                self._trust(i)
                continue
            # A bad value may stand in a branch that no gradient comes from; a mask may hold -inf.
            kept = torch.where(finite & (buffer.isfinite() | ~good.isfinite()), buffer, good)
            good.copy_(kept)
            buffer.copy_(kept)
            self._seen[i] = buffer, buffer._version

    def restore(self) -> None:
        """Give back what the forward passes since the last step took."""
        if self._homes:
            self.after_step(torch.zeros((), dtype=torch.bool, device=self._good[0].device))

    def reset(self) -> None:
        """Trust the buffers as they are now (after loading a checkpoint)."""
        for i in self._indices:
            self._trust(i)

    @property
    def _indices(self) -> range:
        return range(len(self._homes))

    def _buffer(self, i: int) -> Tensor:
        module, name = self._homes[i]
        buffer = module._buffers[name]
        assert buffer is not None
        return buffer

    def _trust(self, i: int) -> None:
        buffer = self._buffer(i)
        self._good[i] = buffer.detach().clone()
        self._seen[i] = buffer, buffer._version
