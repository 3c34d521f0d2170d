"""Weights that are kept in 16 bits, as others see them who copy or load them: whole, in fp32.

A copy of a model has no master weights and nobody who rounds for it, so it must hold every digit by
itself: a target network, an average kept by hand, the best model so far. And a state that is loaded
into the model has digits for the master weights, too.
"""

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from narrowcast.precision.products.entry import LOAD

Full = Callable[[nn.Parameter], Tensor]
"""Returns a weight with every digit that is kept of it."""


Take = Callable[[nn.Parameter, Tensor], None]
"""Gives a weight a value, with every digit that can be kept of it."""


def show_in_full(weight: nn.Parameter, full: Full, take: Take) -> None:
    """Let a weight be copied as `full`, a method, says of it, and loaded by `take`, another."""
    # The weight holds this, which therefore holds neither it nor those who keep it.
    kept, method = weakref.ref(weight), weakref.WeakMethod(full)
    taking = weakref.WeakMethod(take)

    def made() -> nn.Parameter:
        source, of = kept(), method()
        assert source is not None
        value = source.detach().float() if of is None else of(source)
        return nn.Parameter(value.detach().clone(), requires_grad=source.requires_grad)

    def deepcopy(_: dict[int, Any]) -> nn.Parameter:
        return made()

    def reduce_ex(protocol: Any) -> Any:
        return made().__reduce_ex__(protocol)

    def load(value: Tensor) -> None:
        source, into = kept(), taking()
        if source is not None and into is not None:
            into(source, value)

    vars(weight).update({"__deepcopy__": deepcopy, "__reduce_ex__": reduce_ex, LOAD: load})


def show_as_it_is(weight: nn.Parameter) -> None:
    """Undo `show_in_full`."""
    for name in ("__deepcopy__", "__reduce_ex__", LOAD):
        vars(weight).pop(name, None)
