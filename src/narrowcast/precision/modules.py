"""What `prepare` turns modules into: the same objects, with another class.

Changing a module's class in place keeps its name, parameters, hooks and every reference to it, so
tied weights, shared submodules and `state_dict` keys stay as they are, and `isinstance` holds.
"""

import copy
import functools
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from narrowcast.errors import UnsupportedError
from narrowcast.precision.amax import AmaxHistory
from narrowcast.precision.operands import ProductFormats
from narrowcast.precision.products import linear_product
from narrowcast.precision.regions import Region


class NarrowLinear(nn.Linear):
    """A linear layer whose three products have formats of their own."""

    nc_formats: ProductFormats
    nc_history: AmaxHistory | None

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's own name
        """Multiply in this layer's formats."""
        return linear_product(
            input, self.weight, self.bias, formats=self.nc_formats, history=self.nc_history
        )

    def extra_repr(self) -> str:
        """Say the formats where the model is printed."""
        f = self.nc_formats
        return (
            f"{super().extra_repr()}, forward={f.forward.name}, grad_input={f.grad_input.name}, "
            f"grad_weight={f.grad_weight.name}, scaling={f.scaling}"
        )


class InRegion(nn.Module):
    """A module whose products run in another format than those around it."""

    nc_region: Region

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module inside its own region."""
        if not torch.compiler.is_compiling() and self.nc_region.is_entered:
            return super().forward(*args, **kwargs)  # twice would only cost time
        if self.nc_region.format_name == "fp32" and not self.nc_region.emulated:
            args, kwargs = _cast_floats((args, kwargs), torch.float32)
        # The region replaces the one around it, which may be a native one.
        with torch.autocast(self.nc_region.device_type, enabled=False):
            return self._nc_inside(*args, **kwargs)

    def _nc_inside(self, *args: Any, **kwargs: Any) -> Any:
        # On its own, because torch.compile cannot trace one context inside another in one function.
        with self.nc_region():
            return super().forward(*args, **kwargs)

    def extra_repr(self) -> str:
        """Say the format where the model is printed."""
        return ", ".join(filter(None, [super().extra_repr(), f"in {self.nc_region.format_name}"]))


class WideNorm(nn.Module):
    """A normalisation in fp32 between 16-bit neighbours."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Widen, normalise, and return what came in."""
        x = _first_tensor(args, kwargs)
        with torch.autocast(x.device.type, enabled=False):
            args, kwargs = _cast_floats((args, kwargs), torch.float32)
            return super().forward(*args, **kwargs).to(x.dtype)


class NarrowNorm(nn.Module):
    """A normalisation whose input and result are rounded to a 16-bit format."""

    nc_dtype: torch.dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Round, normalise with fp32 sums, round."""
        x = _first_tensor(args, kwargs)
        with torch.autocast(x.device.type, enabled=False):
            rounded = _cast_floats((args, kwargs), self.nc_dtype)
            args, kwargs = _cast_floats(rounded, next(iter(self.parameters()), x).dtype)
            return super().forward(*args, **kwargs).to(self.nc_dtype).to(x.dtype)


class MatchingInput(nn.Module):
    """A recurrent layer that takes inputs in the format of its weights, whatever they come in."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Cast floating-point arguments to the dtype of the weights."""
        dtype = next(iter(self.parameters())).dtype
        args, kwargs = _cast_floats((args, kwargs), dtype)
        return super().forward(*args, **kwargs)


class OwnLossScale(nn.Module):
    """A part of the model inside which gradients are multiplied by a further scale.

    The factor goes on where the gradient enters (at the outputs) and comes off where it leaves (at
    the inputs), so that only what happens inside, and its weights' gradients, see it.
    """

    nc_scale: Any  # anything with a `.value` tensor; typed loosely to keep layers apart

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Scale gradients on their way in, and back on their way out."""
        factor = self.nc_scale.value
        (args, kwargs), _ = _scale_gradients((args, kwargs), 1 / factor)
        output = super().forward(*args, **kwargs)
        scaled, found = _scale_gradients(output, factor)
        trained = torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters())
        if trained and not found:
            raise UnsupportedError(
                f"a {type(self).__name__} with a loss scale of its own returned a "
                f"{type(output).__name__} in which no tensor with gradients was found; let it "
                "return a tensor, or a tuple, list or dict of tensors"
            )
        return scaled


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return (grad * ctx.factor).to(grad.dtype), None


_scale_gradient: Any = _ScaleGradient.apply


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


def _first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return next(v for v in (*args, *kwargs.values()) if isinstance(v, Tensor))


def _cast_floats(value: Any, dtype: torch.dtype) -> Any:
    return changed_tensors(value, lambda t: t.to(dtype) if t.is_floating_point() else t)


def changed_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a value with its tensors changed, those inside tuples, lists and dicts included."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and type(value) not in (tuple, torch.Size):
        return type(value)(*(changed_tensors(item, change) for item in value))  # a named one
    if isinstance(value, tuple | list):
        return type(value)([changed_tensors(item, change) for item in value])
    if isinstance(value, dict):
        fresh = {key: changed_tensors(item, change) for key, item in value.items()}
        if type(value) is dict:
            return fresh
        copied = copy.copy(value)  # a dict that is more than one stays so
        copied.update(fresh)
        return copied
    return value


def _scale_gradients(value: Any, factor: Tensor) -> tuple[Any, int]:
    """Return the value with its gradients scaled, and how many tensors in it have any."""
    scaled: list[Tensor] = []

    def change(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        scaled.append(tensor)
        return cast(Tensor, _scale_gradient(tensor, factor))

    return changed_tensors(value, change), len(scaled)
