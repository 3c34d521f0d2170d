"""A module given another class in place: what `prepare` does to modules, and how it is undone.

Changing a module's class in place keeps its name, parameters, hooks and every reference to it, so
tied weights, shared submodules and `state_dict` keys stay as they are, and `isinstance` holds.
"""

import functools
from abc import abstractmethod
from typing import Any, cast

from torch import Tensor, nn


def swap(module: nn.Module, mixin: type[nn.Module], **attributes: Any) -> None:
    """Give a module the behaviour of `mixin` in front of its own."""
    module.__dict__.setdefault("nc_plain_class", type(module))
    module.__class__ = _joined(cast(Any, mixin), cast(Any, type(module)))
    module.__dict__.update(attributes)


def restore(model: nn.Module) -> None:
    """Undo every `swap` in a model, and leave its kernels to what they would be without."""
    for module in model.modules():
        module.__dict__.pop("nc_kernels", None)
        plain = module.__dict__.pop("nc_plain_class", None)
        if plain is not None:
            module.__class__ = plain
            for name in [key for key in module.__dict__ if key.startswith("nc_")]:
                del module.__dict__[name]


def plain_class(module: nn.Module) -> type[nn.Module]:
    """Return the class a module has without what `swap` put in front of it."""
    plain: type[nn.Module] = module.__dict__.get("nc_plain_class", type(module))
    return plain


class Onlooker(nn.Module):
    """Base of mixins that only look at what passes: the module computes as if they were not there.

    They will put back the class they found. Who computes in a module's place, without calling it,
    goes by `working_class` and says so here.
    """

    @abstractmethod
    def nc_sees(self, x: Tensor) -> None:
        """Be shown the input of the module."""


def working_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that decides what a module computes, which those that look do not."""
    kind = type(module)
    while issubclass(kind, Onlooker):
        kind = kind.__bases__[1]
    return kind


def is_swapped(model: nn.Module) -> bool:
    """Return whether any module of the model has been given another class."""
    return any("nc_plain_class" in module.__dict__ for module in model.modules())


@functools.cache
def _joined(mixin: Any, plain: Any) -> type[nn.Module]:
    if issubclass(mixin, plain):
        return cast("type[nn.Module]", mixin)
    return type(plain.__name__, (mixin, plain), {"__module__": mixin.__module__})
