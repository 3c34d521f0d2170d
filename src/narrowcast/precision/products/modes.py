"""The function modes of emulated regions: what they do with a product that a model calls.

A mode is disabled during a backward pass that it sees start. A pass that starts from an edge of the
graph instead of a tensor is not seen.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._guards import TracingContext
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from narrowcast.numerics import FP32, Format, plain_format
from narrowcast.precision.plan.policy import Policy
from narrowcast.precision.products.attention import multi_head_attention
from narrowcast.precision.products.autocast import active_region, autocast_off
from narrowcast.precision.products.emulated import (
    is_cast,
    linear_product,
    rounded_call,
    widest_float,
)
from narrowcast.precision.products.operands import ProductFormats

# The functions torch's autocast runs in 16 bits, as a function mode sees them: each is a product
# of its floating-point arguments.
PRODUCTS: frozenset[Any] = frozenset(
    {
        torch.mm, torch.bmm, torch.mv, torch.matmul, torch.addmm, torch.addmv, torch.addbmm,
        torch.baddbmm, torch.einsum, torch.tensordot, torch.inner, torch.dot, torch.bilinear,
        torch.chain_matmul, torch.linalg.multi_dot, torch.linalg.matmul, torch.linalg.vecdot,
        torch.vdot, torch.Tensor.vdot,
        torch.Tensor.mm, torch.Tensor.bmm, torch.Tensor.mv, torch.Tensor.matmul,
        torch.Tensor.addmm, torch.Tensor.addmv, torch.Tensor.addbmm, torch.Tensor.baddbmm,
        torch.Tensor.inner, torch.Tensor.dot, torch.Tensor.__matmul__, torch.Tensor.__rmatmul__,
        torch._grouped_mm, F.grouped_mm, F.bilinear, F.scaled_dot_product_attention,
        F.conv1d, F.conv2d, F.conv3d,
        F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d,
        torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu,
        torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell, torch.conv_tbc,
    }
)  # fmt: skip

# Functions with internal products that cannot be intercepted; they stay in fp32.
HIDING: frozenset[Any] = frozenset(
    {
        torch.cov, torch.corrcoef, torch.matrix_power, torch.linalg.matrix_power, torch.matrix_exp,
        torch.linalg.matrix_exp, torch.Tensor.cov, torch.Tensor.corrcoef, torch.Tensor.matrix_power,
        torch.Tensor.matrix_exp,
    }
)  # fmt: skip

IN_PLACE: dict[Any, Any] = {
    torch.Tensor.addmm_: torch.Tensor.addmm,
    torch.Tensor.addmv_: torch.Tensor.addmv,
    torch.Tensor.addbmm_: torch.Tensor.addbmm,
    torch.Tensor.baddbmm_: torch.Tensor.baddbmm,
}

# Where a 16-bit stream must be widened first: sums, exponentials, normalisations, losses.
REDUCTIONS: frozenset[Any] = frozenset(
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
        torch.Tensor.pow, torch.Tensor.rsqrt,
        F.softmax, F.log_softmax, F.softmin, F.layer_norm, F.group_norm, F.rms_norm,
        F.cross_entropy, F.nll_loss, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss,
        F.kl_div, F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.poisson_nll_loss,
        F.gaussian_nll_loss, F.cosine_similarity, F.cosine_embedding_loss, F.normalize,
        F.margin_ranking_loss, F.hinge_embedding_loss, F.triplet_margin_loss, F.ctc_loss,
    }
)  # fmt: skip


BACKWARD: frozenset[Any] = frozenset(
    {torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad}
)

_Ends = Tensor | GradientEdge | Sequence[Tensor | GradientEdge]


def backward_under(
    mode: TorchFunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Do what one of the functions of `BACKWARD` does, with a mode in force inside."""
    if func is torch.autograd.grad:
        return _grad(mode, *args, **kwargs)
    names = ("gradient", "retain_graph", "create_graph", "inputs")
    settings = dict(zip(names, args[1:], strict=False)) | kwargs  # by name, of a function
    loss = args[0] if args else settings.pop("tensors")
    edges = _from_edges(loss, settings.pop("grad_tensors", settings.pop("gradient", None)))
    inputs = settings.pop("inputs", None)
    inputs = () if inputs is None else _several(inputs)
    ends = _edges(inputs)
    # What no graph ends in has its `grad` set by torch itself, and only where a tensor was given.
    leaves = all(isinstance(end, GradientEdge) or end.is_leaf for end in inputs)
    if edges is None or ends is None or not leaves:
        return func(*args, **kwargs)
    with mode:
        return torch.autograd.backward(*edges, inputs=ends or None, **settings)


def _grad(
    mode: TorchFunctionMode,
    outputs: _Ends,
    inputs: _Ends,
    grad_outputs: Any = None,
    **settings: Any,
) -> Any:
    edges, ends = _from_edges(outputs, grad_outputs), _edges(_several(inputs))
    by_tensor = settings.get("materialize_grads") or settings.get("is_grads_batched")
    if edges is None or ends is None or by_tensor:
        return torch.autograd.grad(outputs, inputs, grad_outputs, **settings)  # type: ignore[arg-type]
    with mode:
        return torch.autograd.grad(edges[0], ends, edges[1], **settings)


def _from_edges(
    outputs: _Ends, gradients: Any
) -> tuple[tuple[GradientEdge, ...], tuple[Any, ...]] | None:
    """Return the start of a pass and its inputs; None if torch would raise."""
    several = _several(outputs)
    edges = _edges(several)
    inputs = (None,) * len(several) if gradients is None else _several(gradients)
    if edges is None or len(inputs) != len(several):
        return None
    filled = []
    for end, gradient in zip(several, inputs, strict=True):
        if gradient is None:
            if not isinstance(end, Tensor) or end.numel() != 1:
                return None
            gradient = torch.ones_like(end, memory_format=torch.preserve_format)
        filled.append(gradient)
    return edges, tuple(filled)


def _edges(ends: tuple[Any, ...]) -> tuple[GradientEdge, ...] | None:
    if not all(isinstance(end, GradientEdge) or _has_edge(end) for end in ends):
        return None
    return tuple(e if isinstance(e, GradientEdge) else get_gradient_edge(e) for e in ends)


def _has_edge(tensor: Tensor) -> bool:
    """Return whether it requires grad and is not inside `torch.func`."""
    return tensor.requires_grad and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def _several(value: Any) -> tuple[Any, ...]:
    if isinstance(value, Tensor | GradientEdge):
        return (value,)
    return tuple(value)


# By name, for modes to look up: a number that `torch.compile` reads from an object of a run, and
# that is another one when the policy is, it takes for a variable, and then cannot decide by it.
_UNIFORM = {
    name: ProductFormats.of(Policy(forward=name, grad_input=name, grad_weight=name))
    for name in ("fp32", "tf32", "bf16", "fp16")
}


_BY_DTYPE = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class RoundedReductions(TorchFunctionMode):
    """Round what goes into and comes out of reductions, which still add in fp32."""

    def __init__(self, target: Format, *, autocast: str | None = None) -> None:
        super().__init__()
        self._name, self._autocast, self._around = target.name, autocast, active_region()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Round around reductions, pass on everything else."""
        func = _as_known(func)
        elsewhere = _is_elsewhere(self._around)
        if (
            func not in REDUCTIONS
            or elsewhere
            or _requested_format(self._autocast, self._name) is None
        ):
            return func(*args, **(kwargs or {}))
        if self._autocast is None:
            return rounded_call(func, args, kwargs or {}, plain_format(self._name))
        with autocast_off(self._autocast):
            return rounded_call(func, args, kwargs or {}, plain_format(self._name))


class EmulatedProducts(TorchFunctionMode):
    """Round the operands and results of every functional product to one format.

    With `widen=False` reductions stay unchanged, as optimizers expect. With a device type as
    `autocast`, torch's autocast of that device decides on the 16-bit format.
    """

    emulates = True

    def __init__(self, target: Format, *, widen: bool = True, autocast: str | None = None) -> None:
        super().__init__()
        self._name, self._widen, self._autocast = target.name, widen, autocast
        self._around = active_region()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Emulate products, widen the arguments of reductions, pass on everything else."""
        func, kwargs = _as_known(func), kwargs or {}
        # Inside a region of another model, or an exception's, this one is not in force.
        if _is_compiled(args, kwargs) or _is_elsewhere(self._around):
            return func(*args, **kwargs)
        name = _requested_format(self._autocast, self._name)
        if name is None:
            return _without_autocast(func, args, kwargs)
        if self._autocast is None:
            return self._emulated(func, args, kwargs, name)
        if torch.compiler.is_compiling() and not _is_handled(func):
            return func(*args, **kwargs)
        # All of it, since torch has products in functions that are in none of our tables, backward
        # passes among them: those are fp32 in an emulated region.
        with autocast_off(self._autocast):
            return self._emulated(func, args, kwargs, name)

    def _emulated(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
        if func in BACKWARD:
            return backward_under(self, func, args, kwargs)
        if func is F.linear:
            return _linear(*args, formats=_UNIFORM[name], **kwargs)
        if func in PRODUCTS and not is_cast(args, kwargs):
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            with EmulatedProducts(plain_format(name), widen=self._widen):
                return multi_head_attention(*args, **kwargs)
        if func in IN_PLACE:
            return args[0].copy_(self._emulated(IN_PLACE[func], args, kwargs, name))
        if func is torch.prelu:
            return _prelu(*args, **kwargs)
        product = func in PRODUCTS or (func in HIDING and not self._widen)
        if product and name != FP32.name:
            return rounded_call(func, args, kwargs, plain_format(name))
        if product or func in HIDING or (self._widen and func in REDUCTIONS):
            args = tuple(_widened(a) for a in args)
            kwargs = {k: _widened(a) for k, a in kwargs.items()}
            with torch._C.DisableTorchFunction():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def sees_reductions() -> bool:
    """Return whether one of these modes is in force."""
    modes = torch.overrides._get_current_function_mode_stack()
    return any(isinstance(mode, EmulatedProducts | RoundedReductions) for mode in modes)


def _as_known(func: Any) -> Any:
    """Return a function as the tables have it: the compiler misjudges the wrapper of `**`."""
    return torch.Tensor.pow if func is torch.Tensor.__pow__ else func


def _is_elsewhere(around: str | None) -> bool:
    """Return whether another region is active; none is in a thread of autograd."""
    here = active_region()
    return here is not None and here != around


def _requested_format(autocast: str | None, name: str) -> str | None:
    """Return the format that products have here, None on an island."""
    if autocast is None:
        return name
    if not torch.is_autocast_enabled(autocast):
        return None
    return _BY_DTYPE[torch.get_autocast_dtype(autocast)]


def _without_autocast(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do what torch does without autocast, but for products of 16-bit operands: never natively."""
    if not _is_handled(func):
        return func(*args, **kwargs)
    dtype = widest_float(args, kwargs)
    if dtype not in _BY_DTYPE or func in REDUCTIONS:
        return func(*args, **kwargs)
    with EmulatedProducts(plain_format(_BY_DTYPE[dtype]), widen=False):
        return func(*args, **kwargs)


def _is_handled(func: Any) -> bool:
    """Return whether a region does more to a call than to pass it on."""
    special = (F.linear, F.multi_head_attention_forward, torch.prelu)
    tables = (PRODUCTS, REDUCTIONS, IN_PLACE, HIDING, special)
    return any(func in table for table in tables)


def _is_compiled(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether compiled code makes this call: its products were rounded when it was traced.

    Compiled code multiplies into `out`. As under torch's autocast, so may a user, unrounded.
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
