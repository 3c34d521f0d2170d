"""Buffers that a step's passes write, given back what they held if the step is skipped.

Only what passes wrote is taken back. Whoever loads a checkpoint, moves a queue or recalibrates a
batch norm between them, without gradients, has written what is to stay. Who wrote is told by when:
a buffer is looked at where a pass begins and where it ends, and torch counts what is written.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from narrowcast.precision.dtensor import shards_of


class _Mark(NamedTuple):
    """Which tensor a buffer is, and how often torch has counted a write to it."""

    buffer: Tensor | None
    version: int

    def is_of(self, other: "_Mark") -> bool:
        return self.buffer is other.buffer and self.version == other.version


@final
class BufferGuard:
    """Gives buffers that passes write (running means) back what a bad batch took.

    A batch with a NaN in it leaves NaN in the running statistics of a BatchNorm for ever, though
    the step was skipped. However many buffers there are, a step costs a few operations for each
    dtype among those that are written, and nothing for the others.
    """

    def __init__(self, model: nn.Module) -> None:
        # By where they live: a module may put a new tensor in a buffer's place.
        self._homes = [
            (module, name)
            for module in model.modules()
            for name, _ in module.named_buffers(recurse=False)
        ]
        norms = [isinstance(module, _NormBase) for module, _ in self._homes]
        self._norms = [i for i, is_norm in enumerate(norms) if is_norm]
        # A captured step knows where these lie, so they are written over rather than replaced.
        self._before = [torch.empty(0)] * len(self._homes)
        """What each held at the time of its mark in `_seen`."""
        self._seen = self._marks()
        self._left: list[_Mark] | None = None
        """Marks at the end of the last pass of this step; none before a pass has ended."""
        self._silent: set[int] = set()
        """Those of batch norms in training in this step: torch does not count what these write."""
        self._moving: set[int] = set()
        """All that passes have ever written: a captured step copies them whatever marks say."""
        self._depth = self._began_at = 0
        self._is_current = True
        """Whether `_before` is what buffers held when the last step ended."""
        self._was_asked = False
        """Whether this step is launched by the host; one that is replayed looks after itself."""
        self.reset()

    def begin_pass(self) -> None:
        """Keep what buffers hold before a pass. One without gradients is no part of a step."""
        self._depth += 1
        if not self._began_at and self._homes and torch.is_grad_enabled():
            self._began_at = self._depth
            self._look_before_pass()

    def end_pass(self) -> None:
        """Note how a pass left the buffers: what is written from here on is the user's."""
        if self._depth == self._began_at:
            self._began_at = 0
            self._left = self._marks()
            self._moving |= _differing(self._left, self._seen)
        self._depth -= 1

    @torch.no_grad()
    def after_passes(self, finite: Tensor) -> None:
        """Take back what the passes of a step wrote: all of it, or if `finite` what is not finite.

        Asked twice, as a capture does, it queues the same twice.
        """
        self._was_asked = True
        places = self._written_by_passes()
        for some in self._alike(places):
            self._give_back(some, finite)
        if self._left is not None and places:
            now = self._marks()
            for i in places:
                self._left[i] = now[i]

    def end_step(self) -> None:
        """Forget the passes of a step that has ended."""
        if not self._homes:
            return
        untold = self._left is None and not self._began_at and self._was_asked
        self._left, self._silent, self._was_asked = None, set(), False
        self._is_current = untold
        if untold:
            # There is no other time to look where the model is called without telling.
            now = self._marks()
            self._look_at(_differing(now, self._seen) | self._in_training(), now)
        elif self._began_at:  # steps inside one long region
            self._look_before_pass()

    def restore(self) -> None:
        """Take back what the passes since the last step wrote."""
        if self._homes:
            device = self._before[0].device
            self.after_passes(torch.zeros((), dtype=torch.bool, device=device))
            self.end_step()

    def reset(self) -> None:
        """Trust the buffers as they are now (after loading a checkpoint)."""
        self._left, self._silent, self._is_current = None, set(), True
        self._look_at(range(len(self._homes)), self._marks())

    @contextlib.contextmanager
    def passes_again(self) -> Iterator[None]:
        """Let the block run parts of the step's passes again, as checkpointed ones do backwards."""
        before = self._marks() if self._left is not None else []
        began_at, self._began_at = self._began_at, -1
        try:
            yield
        finally:
            self._began_at = began_at
            if before and self._left is not None:
                self._left = _moved_on(self._left, before, self._marks())

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Take no note of the passes in the block, whose writes are undone before it ends."""
        before, began_at, self._began_at = self._marks(), self._began_at, -1
        try:
            yield
        finally:
            now, self._began_at = self._marks(), began_at
            self._seen = _moved_on(self._seen, before, now)
            if self._left is not None:
                self._left = _moved_on(self._left, before, now)

    def _look_before_pass(self) -> None:
        now, silent = self._marks(), self._in_training()
        if self._left is None:
            written = _differing(now, self._seen) | silent | self._moving
        else:
            # Not by a pass of this step, then: by the user, and so to stay.
            written = _differing(now, self._left) | (silent - self._silent)
        self._silent |= silent
        self._look_at(written, now)

    @torch.no_grad()
    def _look_at(self, places: Iterable[int], now: Sequence[_Mark]) -> None:
        """Keep what buffers hold."""
        fitting = []
        for i in places:
            self._seen[i] = now[i]
            buffer = now[i].buffer
            if buffer is None:
                continue
            if self._fits(i):
                fitting.append(i)
            else:
                self._before[i] = shards_of([buffer])[0].detach().clone()
        for some in self._alike(fitting):
            torch._foreach_copy_([self._before[i] for i in some], self._buffers(some))

    def _written_by_passes(self) -> list[int]:
        """Return the places of what the passes of this step wrote, and nobody after them."""
        now = self._marks()
        if self._left is None and not self._began_at:
            # Nobody told of a pass. What torch has counted may be the user's.
            norms = self._in_training() if self._is_current else set()
            return [i for i in sorted(norms) if now[i].is_of(self._seen[i]) and self._fits(i)]
        left = now if self._left is None or self._began_at else self._left
        written = self._silent | _differing(left, self._seen)
        return [i for i in sorted(written) if now[i].is_of(left[i]) and self._fits(i)]

    def _give_back(self, places: Sequence[int], finite: Tensor) -> None:
        buffers = self._buffers(places)
        now = torch.cat([buffer.reshape(-1) for buffer in buffers])
        before = torch.cat([self._before[i].reshape(-1) for i in places])
        good = finite.to(now.device)
        if now.is_floating_point() or now.is_complex():
            # A bad value may stand in a branch that no gradient comes from; a mask may hold -inf.
            # A number less itself is zero if it is finite; torch asks in twice as many operations.
            good = good & ((now - now == 0) | (before - before != 0))
        kept = torch.where(good, now, before).split([buffer.numel() for buffer in buffers])
        torch._foreach_copy_(buffers, [k.view(b.shape) for k, b in zip(kept, buffers, strict=True)])

    def _in_training(self) -> set[int]:
        return {i for i in self._norms if self._homes[i][0].training}

    def _buffer(self, i: int) -> Tensor | None:
        module, name = self._homes[i]
        return module._buffers.get(name)

    def _buffers(self, places: Iterable[int]) -> list[Tensor]:
        """Return what of buffers lies on this device."""
        return shards_of(b for i in places if (b := self._buffer(i)) is not None)

    def _marks(self) -> list[_Mark]:
        buffers = [module._buffers.get(name) for module, name in self._homes]
        return [_Mark(b, 0 if b is None or b.is_inference() else b._version) for b in buffers]

    def _fits(self, i: int) -> bool:
        """Whether a buffer can be given what it held: one of another shape or dtype is trusted."""
        before, now = self._before[i], self._buffers([i])
        return bool(now) and not now[0].is_inference() and _outline(now[0]) == _outline(before)

    def _alike(self, places: Iterable[int]) -> list[list[int]]:
        """Return places by dtype and device: one operation can be on all of those."""
        found: dict[object, list[int]] = {}
        for i in places:
            found.setdefault((self._before[i].dtype, self._before[i].device), []).append(i)
        return list(found.values())


def _differing(some: Sequence[_Mark], others: Sequence[_Mark]) -> set[int]:
    pairs = enumerate(zip(some, others, strict=True))
    return {i for i, (one, other) in pairs if not one.is_of(other)}


def _moved_on(marks: Sequence[_Mark], before: Sequence[_Mark], now: Sequence[_Mark]) -> list[_Mark]:
    """Return marks as of now where they stood before: what was written between was not news."""
    triples = zip(marks, before, now, strict=True)
    return [new if mark.is_of(old) else mark for mark, old, new in triples]


def _outline(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.device
