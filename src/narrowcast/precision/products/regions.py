"""Regions: the format in which products run that no module of ours makes.

Attention, `@`, einsum, convolutions and recurrent layers are reached through a region around the
forward pass, entered for the whole model and again, with another format, by modules that are an
exception. A native region is torch's autocast; an emulated one a function mode, which
`torch.compile` traces through like the code it covers.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._guards import TracingContext
from torch.overrides import TorchFunctionMode

from narrowcast.numerics import FP32, Format, plain_format
from narrowcast.precision.plan.plan import Plan
from narrowcast.precision.plan.policy import Policy
from narrowcast.precision.products.attention import multi_head_attention
from narrowcast.precision.products.emulated import linear_product, rounded_call
from narrowcast.precision.products.in_force import in_force
from narrowcast.precision.products.operands import ProductFormats

# The functions torch's autocast runs in 16 bits, as a function mode sees them: each is a product
# of its floating-point arguments.
_PRODUCTS: frozenset[Any] = frozenset(
    {
        torch.mm, torch.bmm, torch.mv, torch.matmul, torch.addmm, torch.addmv, torch.addbmm,
        torch.baddbmm, torch.einsum, torch.tensordot, torch.inner, torch.dot, torch.bilinear,
        torch.chain_matmul, torch.linalg.multi_dot, torch.linalg.matmul, torch.linalg.vecdot,
        torch.vdot, torch.Tensor.vdot,
        torch.Tensor.mm, torch.Tensor.bmm, torch.Tensor.mv, torch.Tensor.matmul,
        torch.Tensor.addmm, torch.Tensor.addmv, torch.Tensor.addbmm, torch.Tensor.baddbmm,
        torch.Tensor.inner, torch.Tensor.dot, torch.Tensor.__matmul__, torch.Tensor.__rmatmul__,
        F.bilinear, F.scaled_dot_product_attention,
        F.conv1d, F.conv2d, F.conv3d,
        F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d,
        torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu,
        torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell,
    }
)  # fmt: skip

_IN_PLACE: dict[Any, Any] = {
    torch.Tensor.addmm_: torch.Tensor.addmm,
    torch.Tensor.addmv_: torch.Tensor.addmv,
    torch.Tensor.addbmm_: torch.Tensor.addbmm,
    torch.Tensor.baddbmm_: torch.Tensor.baddbmm,
}

# Where a 16-bit stream must be widened first: sums, exponentials, normalisations, losses.
_REDUCTIONS: frozenset[Any] = frozenset(
    {
        torch.softmax, torch.log_softmax, torch.logsumexp, torch.sum, torch.mean, torch.prod,
        torch.cumsum, torch.cumprod, torch.var, torch.std, torch.norm, torch.exp, torch.log,
        torch.pow, torch.rsqrt, torch.linalg.vector_norm, torch.linalg.norm, torch.cdist,
        torch.dist, torch.log1p, torch.log2, torch.log10, torch.expm1, torch.reciprocal,
        torch.Tensor.log1p, torch.Tensor.log2, torch.Tensor.log10, torch.Tensor.expm1,
        torch.Tensor.reciprocal, torch.Tensor.dist, F.softplus, F.multi_margin_loss,
        F.multilabel_margin_loss, F.soft_margin_loss, F.pairwise_distance,
        torch.Tensor.softmax, torch.Tensor.log_softmax, torch.Tensor.logsumexp, torch.Tensor.sum,
        torch.Tensor.mean, torch.Tensor.prod, torch.Tensor.cumsum, torch.Tensor.cumprod,
        torch.Tensor.var, torch.Tensor.std, torch.Tensor.norm, torch.Tensor.exp, torch.Tensor.log,
        torch.Tensor.pow, torch.Tensor.rsqrt, torch.Tensor.__pow__,
        F.softmax, F.log_softmax, F.softmin, F.layer_norm, F.group_norm, F.rms_norm,
        F.cross_entropy, F.nll_loss, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss,
        F.kl_div, F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.poisson_nll_loss,
        F.gaussian_nll_loss, F.cosine_similarity, F.cosine_embedding_loss, F.normalize,
        F.margin_ranking_loss, F.hinge_embedding_loss, F.triplet_margin_loss, F.ctc_loss,
    }
)  # fmt: skip


# By name, for modes to look up: a number that `torch.compile` reads from an object of a run, and
# that is another one when the policy is, it takes for a variable, and then cannot decide by it.
_UNIFORM = {
    name: ProductFormats.of(Policy(forward=name, grad_input=name, grad_weight=name))
    for name in ("fp32", "tf32", "bf16", "fp16")
}


@dataclass(frozen=True)
class Region:
    """A format for functional products, and whether the device multiplies it or we emulate it."""

    format_name: str
    emulated: bool
    device_type: str
    reduce: str = "fp32"
    """The format of sums, softmax and losses."""

    @classmethod
    def of(cls, plan: Plan) -> "Region":
        """Return the region of a whole planned model."""
        device_type = torch.device(plan.hardware.device).type
        return cls(plan.policy.functional, plan.emulated, device_type, plan.policy.reduce)

    def __call__(self) -> contextlib.AbstractContextManager[Any]:
        """Enter the region: hold it over a forward pass and its loss."""
        if self.reduce == "fp32":
            return self._products()
        stack = contextlib.ExitStack()
        stack.enter_context(self._products())
        stack.enter_context(RoundedReductions(plain_format(self.reduce)))
        return stack

    @property
    def is_plain(self) -> bool:
        """True where nothing is done to products: those of fp32, by the device."""
        return self.format_name == "fp32" and not self.emulated

    def _products(self) -> contextlib.AbstractContextManager[Any]:
        target = plain_format(self.format_name)
        if self.emulated:
            return EmulatedProducts(target)
        if target.dtype in (torch.bfloat16, torch.float16):
            return torch.autocast(self.device_type, dtype=target.dtype)
        if self.format_name == "tf32":
            return tf32_products()
        return contextlib.nullcontext()


class RoundedReductions(TorchFunctionMode):
    """Round what goes into and comes out of reductions, which still add in fp32."""

    def __init__(self, target: Format) -> None:
        super().__init__()
        self._name, self._around = target.name, in_force()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Round around reductions, pass on everything else."""
        if func in _REDUCTIONS and in_force() == self._around:
            return rounded_call(func, args, kwargs or {}, plain_format(self._name))
        return func(*args, **(kwargs or {}))


class EmulatedProducts(TorchFunctionMode):
    """Round the operands and results of every functional product to one format.

    With `widen=False` reductions stay as they are: what an optimizer expects of its own.
    """

    def __init__(self, target: Format, *, widen: bool = True) -> None:
        super().__init__()
        self._name, self._widen, self._around = target.name, widen, in_force()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Emulate products, widen the arguments of reductions, pass on everything else."""
        kwargs = kwargs or {}
        # Inside a region of another model, or an exception's, this one is not in force.
        if _is_compiled(args, kwargs) or in_force() != self._around:
            return func(*args, **kwargs)
        if func is F.linear:
            return _linear(*args, formats=_UNIFORM[self._name], **kwargs)
        if func is F.multi_head_attention_forward:
            with EmulatedProducts(plain_format(self._name)):
                return multi_head_attention(*args, **kwargs)
        if func in _IN_PLACE:
            return args[0].copy_(self.__torch_function__(_IN_PLACE[func], types, args, kwargs))
        if func is torch.prelu:
            return _prelu(*args, **kwargs)
        if func in _PRODUCTS and self._name != FP32.name:
            return rounded_call(func, args, kwargs, plain_format(self._name))
        if func in _PRODUCTS or (self._widen and func in _REDUCTIONS):
            args = tuple(_widened(a) for a in args)
            kwargs = {k: _widened(a) for k, a in kwargs.items()}
            with torch._C.DisableTorchFunction():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _is_compiled(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Say whether compiled code makes this call: its products were rounded when it was traced.

    The compiler runs torch's own Python, and so does what it writes, with products into `out`.
    As under torch's autocast, what a user multiplies into `out` keeps its format as well.
    """
    if torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting():
        return False
    if kwargs.get("out") is not None:
        of_16_bits = (torch.bfloat16, torch.float16)
        return not any(isinstance(a, Tensor) and a.dtype in of_16_bits for a in args)
    return TracingContext.try_get() is not None


def _linear(
    input: Tensor,  # noqa: A002  # torch's own name, which callers may use as a keyword
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    formats: ProductFormats,
) -> Tensor:
    return linear_product(input, weight, bias, formats=formats)


def _prelu(input: Tensor, weight: Tensor) -> Tensor:  # noqa: A002  # torch's own name
    return torch.prelu(input, weight.to(input.dtype))  # torch takes no operands of two dtypes


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16):
        return value.float()
    if isinstance(value, tuple | list):
        return type(value)(_widened(v) for v in value)
    return value


@contextlib.contextmanager
def tf32_products() -> Iterator[None]:
    """Let fp32 products on NVIDIA GPUs run in tf32 inside the block."""
    switches: list[Any] = [
        torch.backends.cuda.matmul,
        torch.backends.cudnn.conv,  # type: ignore[attr-defined]
    ]
    before = [switch.fp32_precision for switch in switches]
    for switch in switches:
        switch.fp32_precision = "tf32"
    try:
        yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.fp32_precision = value
