"""Straight-through rounding: a value is rounded on its way, its gradient on the way back.

The derivative of a rounding is taken for one. What comes back is rounded by the same functions with
the two ways exchanged, so there are derivatives of every order, forwards, backwards and under the
transforms of `torch.func`. Those need another kind of autograd function, which costs more a call:
it stands in only where a transform is at work.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from narrowcast.numerics import BlockFormat, Format
from narrowcast.precision.products.autocast import check_native_backward
from narrowcast.precision.products.operands import Along, operand, rounded

_Method = TypeVar("_Method", bound=Callable[..., Any])


@dataclass(frozen=True)
class Scaled:
    """How a matrix is rounded to a format that may need scales: what `operand` takes beside it."""

    target: Format | BlockFormat
    along: Along
    scaling: str
    scale: Tensor | None = None
    weight: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """Return the rounded matrix, or each of several; they share no scale but a given one."""
        if x.dim() > 2:
            return torch.stack([self(each) for each in x])
        return operand(x, self.target, self.along, self.scaling, self.scale, weight=self.weight)


Rounding = Format | Scaled


def straight(x: Tensor, forth: Rounding, dtype: torch.dtype, back: Rounding) -> Tensor:
    """Return `x` rounded as `forth` says, as a `dtype`; its gradient is rounded as `back` says."""
    apply = _straight_transformed if is_transformed() else _straight
    result: Tensor = apply(x, forth, dtype, back)
    return result


def is_transformed() -> bool:
    """Say whether a transform of `torch.func`, or forward differentiation, is at work here."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def unseen(method: _Method) -> _Method:
    """Let what a method calls pass by function modes, each of which would look at every call."""

    @functools.wraps(method)
    def run(*args: Any) -> Any:
        if torch.compiler.is_compiling():
            return method(*args)
        with torch._C.DisableTorchFunction():
            return method(*args)

    return cast(_Method, run)


class _Straight(torch.autograd.Function):
    @staticmethod
    @unseen
    def forward(ctx: Any, x: Tensor, forth: Rounding, dtype: torch.dtype, back: Rounding) -> Tensor:
        ctx.ways, ctx.dtypes = (forth, back), (dtype, x.dtype)
        return _round(x, forth, dtype)

    @staticmethod
    @unseen
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _gradient(ctx, grad), None, None, None


class _StraightTransformed(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, forth: Rounding, dtype: torch.dtype, back: Rounding) -> Tensor:
        return _round(x, forth, dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, forth, dtype, back = inputs
        ctx.ways, ctx.dtypes = (forth, back), (dtype, x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _gradient(ctx, grad), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return straight(tangent, ctx.ways[0], ctx.dtypes[0], ctx.ways[1])

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        x: Tensor,
        forth: Rounding,
        dtype: torch.dtype,
        back: Rounding,
    ) -> tuple[Tensor, int | None]:
        if in_dims[0] is None:
            return straight(x, forth, dtype, back), None
        # To the front, so that a matrix with scales is one of several there.
        return straight(x.movedim(in_dims[0], 0), forth, dtype, back), 0


# `apply` has no types in torch.
_straight: Any = _Straight.apply
_straight_transformed: Any = _StraightTransformed.apply


def _gradient(ctx: Any, grad: Tensor) -> Tensor:
    (forth, back), (_, dtype) = ctx.ways, ctx.dtypes
    if not torch.compiler.is_compiling():
        check_native_backward(grad.device.type)
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return straight(grad, back, dtype, forth)
    return _round(grad, back, dtype)


def _round(x: Tensor, how: Rounding, dtype: torch.dtype) -> Tensor:
    if isinstance(how, Scaled):
        return how(x.float()).to(dtype)
    if dtype == how.dtype != torch.float32 and not torch.compiler.is_compiling():
        return x.float().to(dtype)  # one cast rounds
    # Compilers drop a cast whose result is widened again; what is rounded first stays rounded.
    return rounded(x.float(), how).to(dtype)
