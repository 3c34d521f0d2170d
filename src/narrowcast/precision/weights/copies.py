"""Copies of weights that are kept in 16 bits: copied and pickled, they are whole fp32 weights.

A copy of a model has no master weights and nobody who rounds for it, so it must hold every digit by
itself: a target network, an average kept by hand, the best model so far.
"""

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

Full = Callable[[nn.Parameter], Tensor]
"""Returns a weight with every digit that is kept of it."""


def copy_in_full(weight: nn.Parameter, full: Full) -> None:
    """Let copies of a weight be made from what `full`, a method, says of it."""
    # The weight holds this, which therefore holds neither it nor those who keep it.
    kept, method = weakref.ref(weight), weakref.WeakMethod(full)

    def made() -> nn.Parameter:
        source, of = kept(), method()
        assert source is not None
        value = source.detach().float() if of is None else of(source)
        return nn.Parameter(value.detach().clone(), requires_grad=source.requires_grad)

    def deepcopy(_: dict[int, Any]) -> nn.Parameter:
        return made()

    def reduce_ex(protocol: Any) -> Any:
        return made().__reduce_ex__(protocol)

    vars(weight).update(__deepcopy__=deepcopy, __reduce_ex__=reduce_ex)


def copy_as_it_is(weight: nn.Parameter) -> None:
    """Undo `copy_in_full`."""
    for name in ("__deepcopy__", "__reduce_ex__"):
        vars(weight).pop(name, None)
