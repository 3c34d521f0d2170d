"""Weights that are kept in 16 bits, as others see them who copy or load them: whole, in fp32.

A copy of a model has no master weights and nobody who rounds for it, so it must hold every digit by
itself: a target network, an average kept by hand, the best model so far. And a state that is loaded
into the model has digits for the master weights, too.
"""

import copy
import io
import weakref
from collections.abc import Callable, Set
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import reduce_tensor

from narrowcast.precision.swap import Transparent, swap
from narrowcast.precision.weights.ema import Full

Take = Callable[[nn.Parameter, Tensor], None]
"""Keeps digits of a value that a weight was given."""

_OURS = ("__deepcopy__", "__reduce_ex__", "nc_take")


class LoadsInFull(Transparent):
    """A module with such weights, whoever loads it, and by way of whom."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        for name, weight in self._parameters.items():
            # By now hooks have made of the state what is loaded.
            take, value = getattr(weight, "nc_take", None), state_dict.get(prefix + name)
            if take is not None and isinstance(value, Tensor):
                take(value)


def show_in_full(model: nn.Module, weights: Set[nn.Parameter], shown: Full, take: Take) -> None:
    """Let weights be copied as `shown`, a method, says of them, and loaded by `take`, another."""
    if weights:
        # What is sent to another process goes by the type, past the weight's own `__reduce_ex__`.
        ForkingPickler.register(nn.Parameter, _sent)
    for weight in weights:
        _show_one(weight, shown, take)
    for module in model.modules():
        if any(weight in weights for weight in module._parameters.values()):
            swap(module, LoadsInFull)


def show_as_it_is(weight: nn.Parameter) -> None:
    """Undo `show_in_full` for a weight; its module is restored with all others."""
    for name in _OURS:
        vars(weight).pop(name, None)


def _show_one(weight: nn.Parameter, shown: Full, take: Take) -> None:
    # The weight holds these, which therefore hold neither it nor those who keep it.
    stored, showing, taking = (
        weakref.ref(weight),
        weakref.WeakMethod(shown),
        weakref.WeakMethod(take),
    )

    def made() -> nn.Parameter:
        source, of = stored(), showing()
        assert source is not None
        value = source.detach().float() if of is None else of(source)
        whole = nn.Parameter(value.detach().clone(), requires_grad=source.requires_grad)
        vars(whole).update({k: v for k, v in vars(source).items() if k not in _OURS})
        return whole

    def load(value: Tensor) -> None:
        source, into = stored(), taking()
        if source is not None and into is not None:
            into(source, value)

    def deepcopy(_: dict[int, Any]) -> nn.Parameter:
        return made()

    def reduce_ex(protocol: Any) -> Any:
        return made().__reduce_ex__(protocol)

    vars(weight).update(dict(zip(_OURS, (deepcopy, reduce_ex, load), strict=True)))


def _sent(weight: nn.Parameter) -> Any:
    """Reduce a weight for another process: in full and by value, or as torch does where it is."""
    if "nc_take" not in vars(weight):
        return reduce_tensor(weight)
    # By value: memory that is shared must outlive the copy, which nobody here holds.
    content = io.BytesIO()
    torch.save(copy.deepcopy(weight), content)
    return _received, (content.getvalue(),)


def _received(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), weights_only=False)
