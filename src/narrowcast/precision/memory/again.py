"""What a block that is computed again must not do a second time.

Its buffers are those it began with the first time, so that it computes the same, and what it writes
to them is dropped: a running mean moves once, a counter counts once. What casts to fp8 note is
noted once.
"""

from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from narrowcast.precision.fp8.delayed import AmaxHistories, AmaxHistory

_Place = tuple[dict[str, Tensor | None], str]
"""Where a buffer lives: a module may put a new tensor in its place."""


@final
class Once:
    """Knows which buffers a block's passes write, and keeps what they held before one."""

    def __init__(self, block: nn.Module) -> None:
        modules = list(block.modules())
        self._places: list[_Place] = [(m._buffers, name) for m in modules for name in m._buffers]
        self._norms = [
            (i, module)
            for module in modules
            if isinstance(module, _NormBase)
            for i, (holder, _) in enumerate(self._places)
            if holder is module._buffers
        ]
        self._written: set[int] | None = None
        """Those that any pass has written; None before the first."""
        result = (module.__dict__.get("nc_history") for module in modules)
        self._histories = next((h.whole for h in result if isinstance(h, AmaxHistory)), None)

    def before(self) -> "Again":
        """Keep what buffers hold before a pass: all of them the first time, then what is written.

        A pass is followed by `after`.
        """
        places = range(len(self._places)) if self._written is None else sorted(self._written)
        held = {i: b.detach().clone() for i in places if (b := self._held(i)) is not None}
        return Again(self._places, held, self._marks(), self._histories)

    def after(self, again: "Again") -> None:
        """Take note of what a pass has written."""
        # torch does not count what a batch norm writes.
        written = {i for i, norm in self._norms if norm.training}
        marks = zip(self._marks(), again.marks, strict=True)
        written |= {i for i, (now, then) in enumerate(marks) if now != then}
        self._written = (self._written or set()) | written
        again.keep_only(self._written)

    def _held(self, i: int) -> Tensor | None:
        holder, name = self._places[i]
        return holder.get(name)

    def _marks(self) -> list[tuple[int, int]]:
        held = [self._held(i) for i in range(len(self._places))]
        return [(id(b), 0 if b is None or b.is_inference() else b._version) for b in held]


@final
class Again:
    """Holds over a pass that is made again: buffers as before the first, and nothing noted."""

    def __init__(
        self,
        places: list[_Place],
        held: dict[int, Tensor],
        marks: list[tuple[int, int]],
        histories: AmaxHistories | None,
    ) -> None:
        self._places, self._before, self.marks = places, held, marks
        self._histories = histories
        self._now: list[tuple[_Place, Tensor | None]] = []
        self._noted: Tensor | None = None

    def keep_only(self, written: set[int]) -> None:
        """Let go of what buffers held that no pass writes."""
        self._before = {i: value for i, value in self._before.items() if i in written}

    def __enter__(self) -> None:
        """Put copies of what buffers held in their place."""
        for i, value in self._before.items():
            holder, name = self._places[i]
            self._now.append((self._places[i], holder.get(name)))
            holder[name] = value.clone()
        if self._histories is not None:
            # As `.data`: autograd may be keeping it for a backward pass.
            self._noted = self._histories.cast_stats.data.clone()

    def __exit__(self, *_: Any) -> None:
        """Put the buffers themselves back, untouched."""
        while self._now:
            (holder, name), buffer = self._now.pop()
            holder[name] = buffer
        if self._histories is not None and self._noted is not None:
            with torch.no_grad():
                self._histories.cast_stats.data.copy_(self._noted)
            self._noted = None
