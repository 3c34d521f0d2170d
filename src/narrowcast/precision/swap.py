"""A module given another class in place: what `prepare` does to modules, and how it is undone.

This keeps its name, parameters, hooks, references and `state_dict` keys, and `isinstance` holds. A
copy or a pickle is of the plain class.

A module may declare what it does: `fused_mlp = ("up", "gelu", "down")` promises that its forward is
`down(gelu(up(x)))` with the exact GELU. A module whose class has `nc_kernels = False` has kernels
of its own for 16-bit tensors on a GPU, and uses them where this is set to true.
"""

import copyreg
import functools
from abc import ABCMeta, abstractmethod
from types import FunctionType
from typing import Any, SupportsIndex, cast

from torch import Tensor, nn

_KEPT = "nc_kept_forward"
"""Marks a module whose `forward` on the instance stays before any class's."""


class Mixin(nn.Module):
    """Base of what `swap` puts in front of a module's own class."""

    def __init_subclass__(cls, **_: Any) -> None:
        """Skip the hook of the plain class, which may keep a registry or need keywords."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Be copied and pickled as the plain module."""
        plain = plain_class(self)
        twin = object.__new__(plain)
        twin.__dict__.update(_plain_attributes(self))
        how, args, *rest = cast("tuple[Any, ...]", twin.__reduce_ex__(protocol))
        if args == (plain,):
            # The usual way of making it is refused for an object that is of another class by now.
            how, args = copyreg._reconstructor, (plain, object, None)  # type: ignore[attr-defined]
        return how, args, *rest

    def __copy__(self) -> nn.Module:
        """Be what this is in a shallow copy, which has the same weights."""
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def _replicate_for_data_parallel(self) -> Any:
        replica = super()._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        set_class(replica, type(self))
        return replica

    @classmethod
    def nc_namespace(cls, plain: type[nn.Module]) -> dict[str, Any]:
        """Return what else a class that is made of this and `plain` has."""
        return {}


class OwnForward(Mixin):
    """A module whose `forward` was put on the instance, which would hide any class's."""

    nc_forward: Any

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Do what was put there."""
        return self.nc_forward(*args, **kwargs)


def swap(module: nn.Module, mixin: type[Mixin], **attributes: Any) -> None:
    """Give a module the behaviour of `mixin` in front of its own."""
    if not isinstance(module, Mixin):
        _forget_copied(module)
    module.__dict__.setdefault("nc_plain_class", type(module))
    if "forward" in module.__dict__ and _KEPT not in module.__dict__:
        swap(module, OwnForward, nc_forward=module.__dict__.pop("forward"))
    set_class(module, _joined(cast(Any, mixin), cast(Any, type(module))))
    module.__dict__.update(attributes)
    added = module.__dict__.setdefault("nc_added", set())
    added.update(attributes, _declared(mixin))


def set_class(module: nn.Module, kind: type[nn.Module]) -> None:
    """Give one module another class."""
    # A wrapper may hand on what is set on it to the module that it wraps: Lightning Fabric's does.
    object.__setattr__(module, "__class__", kind)


def restore(model: nn.Module) -> None:
    """Undo every `swap` in a model, and leave its kernels to what they would be without."""
    for module in model.modules():
        restore_module(module)


def restore_module(module: nn.Module) -> None:
    """Undo every `swap` of one module."""
    module.__dict__.pop("nc_kernels", None)
    if "nc_plain_class" in module.__dict__:
        plain, attributes = plain_class(module), _plain_attributes(module)
        if "forward" in module.__dict__:
            # Put there since: it calls ours, which must not call it.
            attributes[_KEPT] = True
        set_class(module, plain)
        # The same dict, since other code may hold a reference to it.
        for name in module.__dict__.keys() - attributes.keys():
            del module.__dict__[name]
        module.__dict__.update(attributes)


def plain_class(module: nn.Module) -> type[nn.Module]:
    """Return the class a module has without what `swap` put in front of it."""
    plain: type[nn.Module] = module.__dict__.get("nc_plain_class", type(module))
    return plain


def has_own_forward(module: nn.Module) -> bool:
    """Return whether this module has a `forward` of its own instead of its class's."""
    return "forward" in module.__dict__ or "nc_forward" in module.__dict__


class Transparent(Mixin):
    """Base of mixins that do not change what a module computes; see `working_class`."""


class Probe(Transparent):
    """Base of mixins that only observe, and restore the class they found."""

    @abstractmethod
    def nc_sees(self, x: Tensor) -> None:
        """Be shown the input of the module."""


def working_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that decides what a module computes, which transparent ones do not."""
    kind = type(module)
    while issubclass(kind, Transparent):
        kind = kind.__bases__[0]
    return kind


def is_swapped(model: nn.Module) -> bool:
    """Return whether any module of the model has been given another class."""
    return any(isinstance(module, Mixin) for module in model.modules())


def _forget_copied(module: nn.Module) -> None:
    """Drop what was copied here from a prepared module, by a class that copies what it holds."""
    if "nc_plain_class" in module.__dict__:
        attributes = _plain_attributes(module)
        module.__dict__.clear()
        module.__dict__.update(attributes)


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Return what a module holds that `swap` and its mixins did not put there."""
    ours = module.__dict__.get("nc_added", set()) | {"nc_added", "nc_plain_class", "nc_kernels"}
    plain = {name: value for name, value in module.__dict__.items() if name not in ours}
    if "nc_forward" in module.__dict__:
        plain.setdefault("forward", module.__dict__["nc_forward"])
    return plain


def _declared(mixin: type[Mixin]) -> set[str]:
    """Return the names of what a mixin keeps in a module, by its annotations."""
    declared = (vars(each).get("__annotations__", {}) for each in mixin.__mro__)
    return {name for names in declared for name in names if name.startswith("nc_")}


@functools.cache
def _joined(mixin: Any, plain: Any) -> type[nn.Module]:
    most_plain = _most_plain(plain)

    def new(_: Any, *args: Any, **kwargs: Any) -> nn.Module:
        # A custom `__copy__` calls `cls.__new__(cls)`.
        return most_plain.__new__(most_plain, *args, **kwargs)

    namespace = {
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "__doc__": plain.__doc__,
        "__new__": new,
        "nc_most_plain": most_plain,
        **mixin.nc_namespace(plain),
    }
    if mixin.forward is not nn.Module.forward:
        namespace["forward"] = _own_forward(mixin.forward, plain)
    meta = _joined_meta(cast(Any, type(plain)))
    # Not by calling it: a metaclass may keep a registry too.
    maker: Any = ABCMeta if issubclass(meta, ABCMeta) else type
    # The plain class is the first base, so that its instances have the same layout, also where it
    # derives from `ABC` or `Generic` before `nn.Module`. `mro` puts the mixin in front.
    made = maker.__new__(meta, plain.__name__, (plain, mixin), namespace)
    return cast("type[nn.Module]", made)


def _most_plain(kind: type[nn.Module]) -> type[nn.Module]:
    return cast("type[nn.Module]", getattr(kind, "nc_most_plain", kind))


@functools.cache
def _joined_meta(meta: Any) -> Any:
    """Return a metaclass with which calling a class makes an instance of the plain one."""
    if "nc_makes_plain" in vars(meta):
        return meta

    def call(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return cls.nc_most_plain(*args, **kwargs)

    def mro(cls: Any) -> list[type]:
        if "nc_most_plain" not in vars(cls):
            return cast("list[type]", meta.mro(cls))
        plain, mixin = cls.__bases__
        added = [each for each in mixin.__mro__ if each not in plain.__mro__]
        return [cls, *added, *plain.__mro__]

    namespace = {"__call__": call, "mro": mro, "nc_makes_plain": True}
    return type(meta.__name__, (meta,), namespace)


def _own_forward(forward: Any, plain: Any) -> Any:
    """Return a function of its own that does what `forward` does, with `plain`'s signature.

    A compiler caches by the code of a function: models of two classes would share it.
    """
    code = forward.__code__.replace(co_name=f"{plain.__module__}.{plain.__qualname__}.forward")
    inputs = (forward.__globals__, forward.__name__, forward.__defaults__, forward.__closure__)
    made: Any = FunctionType(code, *inputs)
    vars(made).update(vars(forward))  # what others have marked it with
    made.__kwdefaults__, made.__doc__ = forward.__kwdefaults__, plain.forward.__doc__
    made.__wrapped__ = plain.forward
    return made


def fused_mlp_layers(module: nn.Module) -> tuple[str, str] | None:
    """Return the names of the two linear layers of a declared chain; empty without one."""
    chain: tuple[str, str, str] | None = getattr(type(module), "fused_mlp", None)
    if chain is None or chain[1] != "gelu" or not _keeps_its_promise(module):
        return None
    return chain[0], chain[2]


def is_watched(*layers: nn.Module) -> bool:
    """Return whether one of these layers has hooks."""
    return any(
        layer._forward_hooks
        or layer._forward_pre_hooks
        or layer._backward_hooks
        or layer._backward_pre_hooks
        for layer in layers
    )


def _keeps_its_promise(module: nn.Module) -> bool:
    """Return whether the forward is the one the promise was made for, and not a subclass's own."""
    plain: type[nn.Module] = module.__dict__.get("nc_plain_class", type(module))
    message, done = (
        next(each for each in plain.__mro__ if name in vars(each))
        for name in ("fused_mlp", "forward")
    )
    return issubclass(message, done)
