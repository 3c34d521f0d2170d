"""Models of transformers that attend without a mask where none is needed, traced or not.

While such a model is passed, three questions that transformers asks as it makes masks have another
answer: it need not look for several sequences in positions that it has counted itself, and what it
may leave out when it is launched it may leave out under a compiler and in a CUDA graph. Everybody
else gets the answers of transformers.
"""

import functools
import inspect
import sys
import threading
from collections.abc import Callable
from typing import Any

from torch import nn

from narrowcast.precision.plan.known_models import MASKING, PACKED
from narrowcast.precision.swap import Mixin, plain_class, swap

_here = threading.local()
"""Whether the model that is being passed in this thread needs no mask of its own."""
_TRACED = ("is_tracing", "is_torchdynamo_exporting")
_CONTENT = frozenset({
    "input_ids", "inputs_embeds", "pixel_values", "labels", "num_items_in_batch",
})  # fmt: skip
"""What a model is given to see: none of it says who sees whom."""
_WORDS = (bool, int, float, str)


def attend_without_mask(module: nn.Module) -> None:
    """Let a model make no mask while it trains, wherever its caller gives none."""
    library: Any = sys.modules[MASKING]
    _answer(library, PACKED, None, whatever=True)
    for name in _TRACED:
        if hasattr(library, name):
            _answer(library, name, False, whatever=False)
    names = tuple(inspect.signature(plain_class(module).forward).parameters)[1:]
    swap(module, Unmasked, nc_arguments=names, nc_may=True)


def attend_as_ever(module: nn.Module) -> None:
    """Let a model that is not known make its masks, also inside one that need not."""
    swap(module, Unmasked, nc_arguments=(), nc_may=False)


class Unmasked(Mixin):
    """A model that makes no mask where nothing but content is given."""

    nc_arguments: tuple[str, ...]
    """What positional arguments are called."""
    nc_may: bool
    """Whether it is known to need none; one that is not may be inside another."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model as it is."""
        around = getattr(_here, "needs_none", False)
        _here.needs_none = self.nc_may and self.training and self._nc_is_content(args, kwargs)
        try:
            return super().forward(*args, **kwargs)
        finally:
            _here.needs_none = around

    def _nc_is_content(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Say whether no mask, no positions, no cache, and nothing that may be such are given."""
        inputs = (*zip(self.nc_arguments, args, strict=False), *kwargs.items())
        return all(
            value is None or name in _CONTENT or isinstance(value, _WORDS) for name, value in inputs
        )


def _answer(library: Any, question: str, answer: Any, *, whatever: bool) -> None:
    """Give a function of transformers another answer for models that need no mask.

    Unless `whatever` it is asked about has it, only of nothing at all: a mask of ones that a model
    makes for itself would have to be looked at.
    """
    theirs: Callable[..., Any] = getattr(library, question)
    if hasattr(theirs, "nc_theirs"):
        return

    @functools.wraps(theirs)
    def answered(*args: Any, **kwargs: Any) -> Any:
        nothing = all(each is None for each in (*args, *kwargs.values()))
        if getattr(_here, "needs_none", False) and (whatever or nothing):
            return answer
        return theirs(*args, **kwargs)

    answered.nc_theirs = theirs  # type: ignore[attr-defined]
    setattr(library, question, answered)
