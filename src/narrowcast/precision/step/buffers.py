"""Buffers that a step's passes write, restored if the step is skipped.

Writes between passes stay (loading a checkpoint, recalibrating a batch norm): a buffer's version is
compared where a pass begins and where it ends.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter, eq, is_
from typing import final

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.modules.batchnorm import _NormBase

from narrowcast.kernels.launch import is_capturing
from narrowcast.precision.dtensor import local_shards

_VERSION, _SHAPE = attrgetter("_version"), attrgetter("shape")
_DTYPE, _DEVICE = attrgetter("dtype"), attrgetter("device")


@final
class _Marks:
    """Which tensor each buffer is, and its version; read without a Python loop, which is slower."""

    def __init__(self, buffers: list[Tensor | None]) -> None:
        self.buffers = buffers
        try:
            self.versions: list[int] = list(map(_VERSION, buffers))
        except (AttributeError, RuntimeError):  # there is none, or one made in inference mode
            self.versions = [0 if b is None or b.is_inference() else b._version for b in buffers]

    def differing(self, other: "_Marks") -> set[int]:
        """Return the places of those that are not what they were."""
        same = map(eq, self.versions, other.versions)
        matches = {i for i, each in enumerate(same) if not each}
        same = map(is_, self.buffers, other.buffers)
        return matches | {i for i, each in enumerate(same) if not each}

    def take(self, other: "_Marks", places: Iterable[int]) -> None:
        """Restore the marked state."""
        for i in places:
            self.buffers[i], self.versions[i] = other.buffers[i], other.versions[i]


@final
class BufferFormats:
    """The original dtypes of a model's buffers, which passes under autocast may replace."""

    def __init__(self, model: nn.Module) -> None:
        self._came = [
            (module._buffers, name, buffer.dtype)
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
            if buffer.dtype == torch.float32
        ]

    def give_back(self) -> None:
        """Widen those that have 16 bits now; one that modules share stays one."""
        wide: dict[Tensor, Tensor] = {}
        for holder, name, dtype in self._came:
            now = holder.get(name)
            if now is not None and now.dtype in (torch.bfloat16, torch.float16):
                holder[name] = wide.setdefault(now, now.to(dtype))


@final
class BufferGuard:
    """Restores buffers that passes write (running means) when a step is skipped.

    A NaN in a batch would otherwise stay in the running statistics of a BatchNorm for ever.
    """

    def __init__(self, model: nn.Module) -> None:
        homes = [
            (module, name)
            for module in model.modules()
            for name, _ in module.named_buffers(recurse=False)
        ]
        # By where they live: a module may put a new tensor in a buffer's place.
        self._holders, self._names = [module._buffers for module, _ in homes], [n for _, n in homes]
        self._norms = [(i, m) for i, (m, _) in enumerate(homes) if isinstance(m, _NormBase)]
        # A captured step knows where these lie, so they are written over rather than replaced.
        self._before = [torch.empty(0)] * len(homes)
        """What each held at the time of its mark in `_seen`."""
        self._alike: dict[tuple[int, ...], list[list[int]]] = {}
        """Places of some buffers, by dtype and device: one operation can be on all of those."""
        self._outlined: tuple[tuple[int, ...], list[tuple[object, ...]]] = (), []
        """Places of some buffers, and the outlines of what they held."""
        self._seen = self._marks()
        self._left: _Marks | None = None
        """Marks at the end of the last pass of this step; none before a pass has ended."""
        self._silent: set[int] = set()
        """Buffers of batch norms in training in this step: torch does not count their writes."""
        self._moving: set[int] = set()
        """All that passes have ever written: a captured step copies them whatever marks say."""
        self._depth = self._began_at = 0
        self._inside: set[bool] = set()
        """Whether passes inside the one that has begun are with gradients, or without, or both."""
        self._is_current = True
        """Whether `_before` is what buffers held when the last step ended."""
        self._was_requested = False
        """Whether this step is launched by the host; one that is replayed looks after itself."""
        self.reset()

    def begin_pass(self) -> None:
        """Save the buffers before a pass. A pass without gradients does not belong to a step."""
        with_gradients = torch.is_grad_enabled()
        if self._began_at > 0:
            self._inside.add(with_gradients)
        elif self._began_at == 0 and self._names and with_gradients:
            self._look_before_pass()
            self._began_at = self._depth + 1
        self._depth += 1

    def end_pass(self) -> None:
        """Note how a pass left the buffers: what is written from here on is the user's."""
        if self._depth == self._began_at:
            self._began_at = 0
            # A region is entered before `no_grad()` as well as after it.
            if self._inside != {False}:
                self._left = self._marks()
                self._moving |= self._left.differing(self._seen)
            elif self._left is None:
                self._silent = set()
            self._inside.clear()
        self._depth -= 1

    @torch.no_grad()
    def after_passes(self, finite: Tensor) -> None:
        """Take back what the passes of a step wrote: everything, or the nonfinite if `finite`."""
        self._was_requested = True
        now = self._marks()
        written = self._written_by_passes(now)
        places = self._fitting(written, now)
        for some in self._groups(places):
            self._give_back(self._shards(some, now), some, finite)
        if len(places) < len(written) and not is_capturing(finite.device):
            self._put_back(sorted(set(written).difference(places)), finite)
            places = written
        if self._left is not None:
            self._left.take(self._marks(), places)

    def end_step(self) -> None:
        """Forget the passes of a step that has ended."""
        if not self._names:
            return
        untold = self._left is None and not self._began_at and self._was_requested
        self._left, self._silent, self._was_requested = None, set(), False
        self._is_current = untold
        if untold:
            # The last chance to check if the model is called outside of `autocast()`.
            now = self._marks()
            self._look_at(now.differing(self._seen) | self._in_training(), now)
        elif self._began_at:  # steps inside one long region
            self._look_before_pass()

    def restore(self) -> None:
        """Take back what the passes since the last step wrote."""
        if self._names:
            device = self._before[0].device
            self.after_passes(torch.zeros((), dtype=torch.bool, device=device))
            self.end_step()

    def reset(self) -> None:
        """Trust the buffers as they are now (after loading a checkpoint)."""
        self._left, self._silent, self._is_current = None, set(), True
        self._look_at(range(len(self._names)), self._marks())

    @contextlib.contextmanager
    def passes_again(self) -> Iterator[None]:
        """Allow parts of the passes to run again, as activation checkpointing does."""
        before = self._marks() if self._left is not None else None
        began_at, self._began_at = self._began_at, -1
        try:
            yield
        finally:
            self._began_at = began_at
            if before is not None and self._left is not None:
                self._move_on(self._left, before)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Take no note of the passes in the block, whose writes are undone before it ends."""
        before, began_at = self._marks(), self._began_at
        self._began_at = -1  # no pass begins here
        try:
            yield
        finally:
            self._began_at = began_at
            self._move_on(self._seen, before)
            if self._left is not None:
                self._move_on(self._left, before)

    def _move_on(self, marks: _Marks, before: _Marks) -> None:
        """Update earlier version counters, so that writes in between are not reported."""
        now = self._marks()
        marks.take(now, now.differing(before) - before.differing(marks))

    def _look_before_pass(self) -> None:
        now, silent = self._marks(), self._in_training()
        if self._left is None:
            written = now.differing(self._seen) | silent | self._moving
        else:
            # Not by a pass of this step, then: by the user, and so to stay.
            written = now.differing(self._left) | (silent - self._silent)
        self._silent |= silent
        self._look_at(written, now)

    @torch.no_grad()
    def _look_at(self, places: Iterable[int], now: _Marks) -> None:
        """Keep what buffers hold."""
        self._seen.take(now, places)
        result = [i for i in sorted(places) if now.buffers[i] is not None]
        fitting = self._fitting(result, now)
        for i in set(result).difference(fitting):
            self._before[i] = self._shards([i], now)[0].detach().clone()
            self._alike.clear()
            self._outlined = (), []
        for some in self._groups(fitting):
            torch._foreach_copy_([self._before[i] for i in some], self._shards(some, now))

    def _written_by_passes(self, now: _Marks) -> list[int]:
        """Return the indices of buffers that only the passes of this step wrote."""
        if self._left is None and not self._began_at:
            # No pass was reported, so the counted writes may be the user's.
            written = self._in_training() if self._is_current else set()
            return sorted(written - now.differing(self._seen))
        left = now if self._left is None or self._began_at else self._left
        written = self._silent | left.differing(self._seen)
        return sorted(written - now.differing(left))

    def _give_back(self, buffers: list[Tensor], places: Sequence[int], finite: Tensor) -> None:
        now = _flatten_dense_tensors(buffers)
        before = _flatten_dense_tensors([self._before[i] for i in places])
        good = finite.to(now.device)
        if now.is_floating_point() or now.is_complex():
            # A bad value may be in a branch without gradients; a mask may hold -inf.
            # A number less itself is zero if it is finite; torch asks in twice as many operations.
            good = good & ((now - now == 0) | (before - before != 0))
        stored = _unflatten_dense_tensors(torch.where(good, now, before), buffers)
        torch._foreach_copy_(buffers, stored)

    def _put_back(self, places: Sequence[int], finite: Tensor) -> None:
        """Restore buffers that changed shape or dtype; synchronises with the device."""
        if not bool(finite):
            for i in places:
                self._holders[i][self._names[i]] = self._before[i].clone()

    def _marks(self) -> _Marks:
        return _Marks(list(map(dict.get, self._holders, self._names)))

    def _in_training(self) -> set[int]:
        return {i for i, norm in self._norms if norm.training}

    def _shards(self, places: Iterable[int], now: _Marks) -> list[Tensor]:
        """Return what of buffers lies on this device."""
        return local_shards(b for i in places if (b := now.buffers[i]) is not None)

    def _fitting(self, places: list[int], now: _Marks) -> list[int]:
        """Return where a buffer can hold what it held: one of another shape or dtype is trusted."""
        key = tuple(places)
        if self._outlined[0] != key:
            self._outlined = key, _outlines([self._before[i] for i in places])
        outlines = self._outlined[1]
        if _outlines(self._shards(places, now)) == outlines:
            return places
        pairs = zip(places, outlines, strict=True)
        return [i for i, each in pairs if _outlines(self._shards([i], now)) == [each]]

    def _groups(self, places: list[int]) -> list[list[int]]:
        key = tuple(places)
        if key not in self._alike:
            results: dict[object, list[int]] = {}
            for i in places:
                results.setdefault((self._before[i].dtype, self._before[i].device), []).append(i)
            self._alike = {key: list(results.values())}
        return self._alike[key]


def _outlines(tensors: Sequence[Tensor]) -> list[tuple[object, ...]]:
    """Return what must agree for one tensor to be given the values of another."""
    # One made in inference mode cannot be written to outside it.
    frozen = map(Tensor.is_inference, tensors)
    parts = map(_SHAPE, tensors), map(_DTYPE, tensors), map(_DEVICE, tensors)
    return list(zip(*parts, frozen, strict=True))


@contextlib.contextmanager
def preserve_grads_and_buffers(
    model: nn.Module, weights: Iterable[nn.Parameter] = ()
) -> Iterator[None]:
    """Begin the block without gradients; restore gradients and buffers afterwards, bit for bit."""
    gradients = [(p, p.grad) for p in {*model.parameters(), *weights}]
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    for p, _ in gradients:
        p.grad = None
    try:
        yield
    finally:
        for p, gradient in gradients:
            p.grad = gradient
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                module._buffers[name] = buffer  # a module may have put another in its place
                # Through `.data`, so that version counters do not change.
                buffer.data.copy_(value)
