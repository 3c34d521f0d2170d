"""The formats of a module's products, and how an operand is rounded to one of them.

Rounding is straight-through: a value is rounded forwards, its gradient backwards. `torch.func`
transforms need another kind of autograd function, which costs more per call.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from narrowcast.numerics import (
    BF16,
    FP16,
    FP32,
    TF32,
    BlockFormat,
    Format,
    format_named,
    plain_format,
    quantize,
    round_blocks,
    round_to,
)
from narrowcast.precision.plan.module_plan import FP8_BLOCK
from narrowcast.precision.plan.policy import Policy
from narrowcast.precision.products.autocast import check_native_backward

Along = Literal["row", "column"]
"""Which way an operand is summed in a product, and so which way its scales run."""


@dataclass(frozen=True)
class ProductFormats:
    """The formats of one module's three products and of what they return."""

    forward: Format | BlockFormat
    grad_input: Format | BlockFormat
    grad_weight: Format | BlockFormat
    output: Format
    scaling: str
    fast: bool = False
    """Whether 8-bit outputs are summed as the tensor cores sum by themselves."""
    one_rounding: bool = field(init=False, repr=False, compare=False)
    """Whether each tensor is rounded once for all products it takes part in."""

    @classmethod
    def of(cls, policy: Policy) -> "ProductFormats":
        """Return the formats a policy without exceptions asks for."""
        return cls(
            forward=format_named(policy.forward),
            grad_input=format_named(policy.grad_input),
            grad_weight=format_named(policy.grad_weight),
            output=plain_format(policy.output_format),
            scaling=policy.scaling,
            fast=policy.accumulator == "fast",
        )

    def __str__(self) -> str:
        return (
            f"forward={self.forward.name}, grad_input={self.grad_input.name}, "
            f"grad_weight={self.grad_weight.name}, scaling={self.scaling}"
        )

    def __post_init__(self) -> None:
        # Asked in every backward pass.
        object.__setattr__(self, "one_rounding", self._rounds_once())

    def _rounds_once(self) -> bool:
        backward = {self.grad_input.name, self.grad_weight.name}
        scaled = {name for name in backward if needs_scale(name)}
        # Beside an 8-bit gradient the other operand keeps its rounding only if that has 8 bits too.
        extra = needs_scale(self.forward.name) and len(backward) == 1 and scaled == backward
        same = backward == {self.forward.name} or extra
        blocks = any(isinstance(f, BlockFormat) for f in (self.forward, self.grad_input))
        return same and not blocks and self.scaling not in ("row", "block")

    @property
    def rounds_before_bias(self) -> bool:
        """Whether a product returns 16 bits that a bias is added to, and does not add it itself."""
        if not needs_scale(self.forward.name):
            return False
        blocks = isinstance(self.forward, BlockFormat)
        return blocks or self.scaling not in ("tensor", "delayed")

    def other_operand(self, product: Format | BlockFormat) -> Format | BlockFormat:
        """Return the format of the operand beside the gradient in a backward product.

        Beside an 8-bit gradient it keeps its own 8-bit format (e5m2 · e4m3).
        """
        both_scaled = needs_scale(product.name) and needs_scale(self.forward.name)
        return self.forward if both_scaled else product


def operand(
    x: Tensor,
    target: Format | BlockFormat,
    along: Along,
    scaling: str,
    scale: Tensor | None,
    *,
    weight: bool = False,
) -> Tensor:
    """Round a matrix to a format, scaled as that needs; a `scale` from the past goes before."""
    if isinstance(target, BlockFormat):
        # Blocks run along the dimension that is summed.
        return round_blocks(x, target) if along == "row" else round_blocks(x.t(), target).t()
    if not needs_scale(target.name):
        return rounded(x, target)
    if scale is not None:
        # Beyond what the past foretold a value saturates; what is not finite stays so (· 0 is NaN).
        scaled = x * scale
        return round_to(scaled, target, saturate=True).add_(scaled, alpha=0.0).div_(scale)
    if scaling == "block":
        if weight:
            return _in_squares(x, target)
        blocked = quantize(x if along == "row" else x.t(), target, per="block", block=FP8_BLOCK)
        return blocked if along == "row" else blocked.t()
    per: Literal["row", "column", "tensor"] = along if scaling == "row" else "tensor"
    return quantize(x, target, per=per)


def _in_squares(x: Tensor, target: Format) -> Tensor:
    """Round a matrix with one scale for each 128 × 128 of it; its sides are multiples of that."""
    down, across = x.shape[0] // FP8_BLOCK, x.shape[1] // FP8_BLOCK
    tiles = x.reshape(down, FP8_BLOCK, across, FP8_BLOCK).transpose(1, 2).flatten(2)
    back = quantize(tiles, target, per="row").view(down, across, FP8_BLOCK, FP8_BLOCK)
    return back.transpose(1, 2).reshape(x.shape)


def rounded(x: Tensor, target: Format) -> Tensor:
    """Round to a format that needs no scale; fp32 is left alone."""
    return x if target is FP32 else round_to(x, target)


def is_delayed(target: Format | BlockFormat) -> bool:
    """Return whether a scale from the past is of use: a block has its own, 16 bits need none."""
    return isinstance(target, Format) and needs_scale(target.name)


def needs_scale(name: str) -> bool:
    """Return whether operands of this format need scales."""
    return name not in (FP32.name, TF32.name, BF16.name, FP16.name)


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
    """Return whether a transform of `torch.func`, or forward differentiation, is at work here."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def unseen(method: _Method) -> _Method:
    """Run a method without torch function modes, which would intercept every call."""

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
