"""A masked site with its elementwise work in two kernels and nothing kept but x, h and importance.

The products are torch's. Widths are rounded up to 8 numbers, so that 16-bit lines begin at
multiples of 16 bytes, as tensor cores want them. V and [U ; W^T] are written anew in each pass, in
the format of their product and in one launch: (C + d_in) d_out numbers of the latter, beside rows
times (C + d_in) of the operand. That is 2 % at 32,768 rows and a d_out of 768, and U and V have to
be narrowed anyhow.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from narrowcast.kernels.launch import unsupported_reason
from narrowcast.workloads.decompose.components.mask import Draw, SiteMask, Source
from narrowcast.workloads.decompose.components.products import added_product, product

FORMATS = (torch.float32, torch.bfloat16, torch.float16)
"""What kernels read and write; others are left to torch."""


def is_fused(x: Tensor, mask: SiteMask) -> bool:
    """Say whether the kernels compute a site of this input and mask."""
    tensors = [x, mask.importance]
    tensors += [each for each in (mask.source, mask.delta) if isinstance(each, Tensor)]
    known = all(each.dtype in FORMATS for each in tensors)
    return known and x.shape[1] > 0 and has_kernels(x.device.type)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def has_kernels(device: str) -> bool:
    """Say whether Triton computes on devices of this type; a compiled pass asks once."""
    return not unsupported_reason(torch.device(device))


def new_seed(device: torch.device) -> Tensor:
    """Draw a seed on the device, where a CUDA graph draws another whenever it is replayed."""
    return torch.randint(2**62, (1,), device=device)


def fused_output(
    x: Tensor,
    V: Tensor,
    U: Tensor,
    weight_t: Tensor,
    bias: Tensor | None,
    mask: SiteMask,
    *,
    seed: Tensor | None,
    stream: int,
) -> Tensor:
    """Return what `masked_output` does, in the format of `x`."""
    sources, source = _split_source(mask.source)
    deltas, delta = _split_source(mask.delta)
    if seed is None and (sources[0] > 2 or deltas[0] > 2):
        seed = new_seed(x.device)
    if source is not None:
        seeds, rows, count = mask.importance.shape
        # One for all rows stays one, and so does its gradient.
        alike = source.dim() < 2 or source.shape[-2] == 1
        source = source.expand(seeds, 1 if alike else rows, count)
    if delta is not None:
        delta = delta.expand(x.shape[:2])
    result: Tensor = _apply(
        x, V, U, mask.importance, source, delta,
        weight_t, bias, mask.routed, seed, *sources, *deltas, stream,
    )  # fmt: skip
    return result


def _split_source(source: Source | None) -> tuple[tuple[int, float], Tensor | None]:
    """Return kind and value of a source, and its tensor: the kinds of `kernels.operand`."""
    if source is None:
        return (0, 0.0), None
    if isinstance(source, Tensor):
        return (2, 0.0), source
    if isinstance(source, Draw):
        return (3 if source.kind == "continuous" else 4, 0.0), None
    return (1 if source else 0, float(source)), None


class _Masked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        V: Tensor,
        U: Tensor,
        importance: Tensor,
        source: Tensor | None,
        delta: Tensor | None,
        weight_t: Tensor,
        bias: Tensor | None,
        routed: Tensor | None,
        seed: Tensor | None,
        *how: Any,
    ) -> Tensor:
        x = x.contiguous()
        with_x = how[2] != 0 or routed is not None
        narrow, stack = _weights(V, U, weight_t if with_x else None, x.dtype)
        h = product(x, narrow)
        if routed is not None:
            routed = routed.expand(x.shape[:2]).contiguous()
        mask = (importance, source, delta, routed, seed)
        operand = torch.ops.narrowcast.masked_operand(h, x if with_x else None, *mask, *how)
        ctx.save_for_backward(x, h, narrow, stack, *mask)
        ctx.how, ctx.with_x, ctx.formats = how, with_x, (V.dtype, U.dtype)
        return added_product(None if bias is None else bias.unsqueeze(1), operand, stack)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, h, narrow, stack, importance, source, delta, routed, seed = ctx.saved_tensors
        to_x, to_V, to_U, to_importance, to_source, to_delta = ctx.needs_input_grad[:6]
        grad, (count, padded) = grad.contiguous(), (importance.shape[-1], h.shape[-1])
        with_x = ctx.with_x and (to_x or to_delta)
        down = product(grad, (stack if with_x else stack[:, :padded]).mT)
        dh, dg, ds, dd = torch.ops.narrowcast.masked_operand_back(
            down, h, x if with_x else None, importance, source, delta, routed, seed,
            *ctx.how, to_importance, to_source, to_delta, to_U,
        )  # fmt: skip
        dU = product(down[..., :count].mT, grad, ctx.formats[1]) if to_U else None
        dV = product(x.mT, dh, ctx.formats[0])[..., :count] if to_V else None
        dx = None
        if to_x and with_x:
            dx = added_product(down[..., padded : padded + x.shape[-1]], dh, narrow.mT)
        elif to_x:
            dx = product(dh, narrow.mT)
        wanted = (dg if to_importance else None, ds if to_source else None)
        return dx, dV, dU, *wanted, dd if to_delta else None, *[None] * 9


_apply: Any = _Masked.apply
_Four = tuple[Tensor, Tensor, Tensor, Tensor]


def _weights(
    V: Tensor, U: Tensor, weight_t: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return V and [U ; W^T] in `dtype`, with C and d_in rounded up to 8 by zeros."""
    both = torch.ops.narrowcast.masked_weights(V, U, weight_t, dtype)
    first = V.shape[1] * _rounded_up(V.shape[2])
    narrow = both[:, :first].unflatten(1, (V.shape[1], -1))
    return narrow, both[:, first:].unflatten(1, (-1, U.shape[2]))


def _rounded_up(width: int) -> int:
    return -(-width // 8) * 8


def _write_weights(V: Tensor, U: Tensor, weight_t: Tensor | None, dtype: torch.dtype) -> Tensor:
    from narrowcast.workloads.decompose.components.kernels import weights  # Triton: not everywhere

    out = _empty_weights(V, U, weight_t, dtype)
    weights.write_weights(out, V, U, weight_t, _rounded_up(V.shape[2]))
    return out


def _empty_weights(V: Tensor, U: Tensor, weight_t: Tensor | None, dtype: torch.dtype) -> Tensor:
    seeds, d_in, count = V.shape
    lines = _rounded_up(count) + (0 if weight_t is None else _rounded_up(d_in))
    size = d_in * _rounded_up(count) + lines * U.shape[2]
    return V.new_empty((seeds, size), dtype=dtype)


# What operators are given is said once, by `_GIVEN`.
def _operand(h: Tensor, x: Tensor | None, *inputs: Any) -> Tensor:
    from narrowcast.workloads.decompose.components.kernels import (
        operand,  # Triton is not everywhere
    )

    *mask, source_kind, source, delta_kind, delta, stream = inputs
    out = _empty_operand(h, x)
    how = {"sources": (source_kind, source), "deltas": (delta_kind, delta), "stream": stream}
    operand.write_operand(out, h, x, *mask, **how)
    return out


def _operand_back(down: Tensor, h: Tensor, x: Tensor | None, *settings: Any) -> _Four:
    from narrowcast.workloads.decompose.components.kernels import operand

    *mask, source_kind, source, delta_kind, delta, stream = settings[:-4]
    to_importance, to_source, to_delta, to_operand = settings[-4:]
    dh, dg, ds, dd = _empty_gradients(down, h, x, *settings)
    matched = operand.write_gradients(
        down,
        h,
        x,
        *mask,
        sources=(source_kind, source),
        deltas=(delta_kind, delta),
        stream=stream,
        grad_h=dh,
        grad_importance=dg if to_importance else None,
        grad_source=ds if to_source else None,
        needs_delta=to_delta,
        needs_operand=to_operand,
    )
    return dh, dg, ds, dd if matched is None else matched.to(dd.dtype)


def _empty_operand(h: Tensor, x: Tensor | None, *_: Any) -> Tensor:
    seeds, rows, first = h.shape
    second = 0 if x is None else _rounded_up(x.shape[-1])
    return h.new_empty((seeds, rows, first + second))


def _empty_gradients(_: Tensor, h: Tensor, _x: Tensor | None, *inputs: Any) -> _Four:
    importance, source, delta = inputs[:3]
    to_importance, to_source, to_delta, _ = inputs[-4:]
    return (
        torch.empty_like(h),
        importance.new_empty(importance.shape if to_importance else (0,)),
        source.new_empty(source.shape) if to_source else h.new_empty(0),
        delta.new_empty(h.shape[:2]) if to_delta else h.new_empty(0),
    )


_library = torch.library.Library("narrowcast", "FRAGMENT")
_GIVEN = (
    "Tensor h, Tensor? x, Tensor importance, Tensor? source, Tensor? delta, Tensor? routed,"
    " Tensor? seed, int source_kind, float source_value, int delta_kind, float delta_value,"
    " int stream"
)
_library.define(
    "masked_weights(Tensor V, Tensor U, Tensor? weight_t, ScalarType dtype) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.define(f"masked_operand({_GIVEN}) -> Tensor", tags=torch.Tag.pt2_compliant_tag)
_library.define(
    f"masked_operand_back(Tensor(a!) down, {_GIVEN}, bool to_importance, bool to_source,"
    " bool to_delta, bool to_operand) -> (Tensor, Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.impl("masked_weights", _write_weights, "CompositeExplicitAutograd")
_library.impl("masked_operand", _operand, "CompositeExplicitAutograd")
_library.impl("masked_operand_back", _operand_back, "CompositeExplicitAutograd")
torch.library.register_fake("narrowcast::masked_weights", _empty_weights)
torch.library.register_fake("narrowcast::masked_operand", _empty_operand)
torch.library.register_fake("narrowcast::masked_operand_back", _empty_gradients)
