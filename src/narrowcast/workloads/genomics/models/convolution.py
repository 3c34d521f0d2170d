"""Gated long convolutions by FFT.

A causal convolution of length L is usually a real FFT padded to 2 L. Here it is one complex FFT of
M >= L numbers, without padding (right-angle convolution, Crandall and Fagin 1994): letter t is
multiplied by a^t with a^M = i, so what wraps around ends up in the imaginary part. Transforms run
in fp32 (fp64 for fp64) in every policy.
"""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from narrowcast.errors import ConfigError
from narrowcast.kernels.launch import unsupported_reason
from narrowcast.workloads.genomics.models import transforms

Method = Literal["torch", "fused"]
"""Plain torch, or kernels that fuse the gates with the copies around the FFT."""


def gated_convolution(
    value: Tensor,
    filters: Tensor,
    *,
    bias: Tensor | None = None,
    before: Tensor | None = None,
    after: Tensor | None = None,
    causal: bool = True,
    chunk: int | None = None,
    method: Method | None = None,
) -> Tensor:
    """Return after ⊙ (filters * z + bias ⊙ z) with z = before ⊙ value; None is left out.

    Sequences are (rows, channels, length), filters (channels, taps). Two-sided filters have an odd
    number of taps, lag 0 in the middle.
    """
    filters = _within(filters, value.shape[-1], causal=causal)
    result: Tensor = _apply(value, filters, bias, before, after, causal, chunk or 0, method or "")
    return result


def _within(filters: Tensor, length: int, *, causal: bool) -> Tensor:
    """Cut lags beyond the sequence."""
    taps = filters.shape[-1]
    if causal:
        return filters[..., :length]
    if taps % 2 == 0:
        raise ConfigError(f"A two-sided filter must have an odd number of taps, got {taps}.")
    middle = taps // 2
    reach = min(middle, length - 1)
    return filters[..., middle - reach : middle + reach + 1]


class _GatedConvolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        value: Tensor,
        filters: Tensor,
        bias: Tensor | None,
        before: Tensor | None,
        after: Tensor | None,
        causal: bool,
        chunk: int,
        method: str,
    ) -> Tensor:
        ctx.save_for_backward(value, filters, bias, before, after)
        ctx.how = causal, chunk, method
        result: Tensor = torch.ops.narrowcast.gated_convolution(
            value, filters, bias, before, after, causal, chunk, method
        )
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        value, filters, bias, before, after = ctx.saved_tensors
        grads = torch.ops.narrowcast.gated_convolution_backward(
            grad, value, filters, bias, before, after, *ctx.how
        )
        inputs = (value, filters, bias, before, after)
        wanted = (g if t is not None else None for g, t in zip(grads, inputs, strict=True))
        return *wanted, None, None, None


_apply: Any = _GatedConvolution.apply


# What operators are given is said once, by `_GIVEN`: the value first, the method last.
def _forward(value: Tensor, *settings: Any) -> Tensor:
    *others, method = settings
    result: Tensor = _way(method, value).forward(value, *others)
    return result


def _backward(grad: Tensor, value: Tensor, *inputs: Any) -> list[Tensor]:
    *others, method = inputs
    grads: list[Tensor] = _way(method, value).backward(grad, value, *others)
    return grads


def _way(method: str, value: Tensor) -> Any:
    plain = value.dtype == torch.float64 or unsupported_reason(value.device)
    if method == "torch" or (not method and plain):
        return transforms
    from narrowcast.workloads.genomics.models.kernels import fused  # Triton is not everywhere

    return fused


def _empty(value: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(value, memory_format=torch.contiguous_format)


def _empty_grads(grad: Tensor, *inputs: Any) -> list[Tensor]:
    *tensors, _causal, _chunk, _method = inputs
    return transforms.empty_grads(*tensors)


_library = torch.library.Library("narrowcast", "FRAGMENT")
_GIVEN = "Tensor value, Tensor filters, Tensor? bias, Tensor? before, Tensor? after"
_library.define(
    f"gated_convolution({_GIVEN}, bool causal, int chunk, str method) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.define(
    f"gated_convolution_backward(Tensor grad, {_GIVEN}, bool causal, int chunk, str method)"
    " -> Tensor[]",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.impl("gated_convolution", _forward, "CompositeExplicitAutograd")
_library.impl("gated_convolution_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("narrowcast::gated_convolution", _empty)
torch.library.register_fake("narrowcast::gated_convolution_backward", _empty_grads)
