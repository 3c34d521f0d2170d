"""A masked site as one product, without forming the weight residual.

A component of importance g has the mask m = g + (1 - g) s with a source s. With a mask d for the
residual, the output is ((x V) m) U + d x (W - (V U)^T)^T + b. Since x (V U) is (x V) U, that is

    y = [ (x V) (m - d) | d x ] [ U ; W^T ] + b

summed in fp32 inside one product, not as the difference of two rounded results. A row that is not
routed has 0 for the first part and d = 1. Widths are rounded up to 8 numbers, so that 16-bit lines
begin at multiples of 16 bytes, as tensor cores need.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from narrowcast.kernels.launch import unsupported_reason

FORMATS = (torch.float32, torch.bfloat16, torch.float16)
"""Formats of the kernels; others are computed by torch."""


@dataclass(frozen=True)
class Draw:
    """Numbers drawn anew in every pass: evenly from [0, 1], or 0 and 1 with even chances."""

    kind: Literal["continuous", "binomial"] = "continuous"


Source = Tensor | float | Draw
"""Given numbers in [0, 1], one number for all, or new ones."""


@dataclass(frozen=True, eq=False)
class SiteMask:
    """What one site does in a pass."""

    importance: Tensor
    """Between 0 and 1: (seeds, rows, components)."""
    source: Source
    """What is not important takes part by this share; a tensor broadcasts to `importance`."""
    delta: Source | None = None
    """By which share what components leave of the weight takes part, (seeds, rows); None: not."""
    routed: Tensor | None = None
    """Rows that the components compute, bool of (seeds, rows). None: all."""


def masked_output(
    x: Tensor,
    V: Tensor,
    U: Tensor,
    weight_t: Tensor,
    bias: Tensor | None,
    mask: SiteMask,
    *,
    seed: Tensor | None = None,
    stream: int = 0,
) -> Tensor:
    """Return the masked output (seeds, rows, d_out) of `x`, (seeds, rows, d_in).

    `V` is (seeds, d_in, C), `U` (seeds, C, d_out), `weight_t` (seeds or 1, d_in, d_out), `bias`
    (seeds or 1, d_out). Sites that share a `seed` for their draws need different `stream`s.
    """
    dtype = computed_in(V)
    # Under autocast an output is of its format, as of any product; else as the target's was.
    result_dtype = dtype if torch.is_autocast_enabled(x.device.type) else x.dtype
    x = x.to(dtype)
    if is_fused(x, mask):
        out = fused_output(x, V, U, weight_t, bias, mask, seed=seed, stream=stream)
        return out.to(result_dtype)
    stored, left = shares(mask)
    operand = (product(x, V.to(dtype)) * stored).to(dtype)
    stack = U.to(dtype)
    if left is not None:
        operand = torch.cat([operand, (left.unsqueeze(-1) * x).to(dtype)], -1)
        stack = torch.cat([stack, weight_t.expand(U.shape[0], -1, -1).to(dtype)], 1)
    lines = None if bias is None else bias.unsqueeze(1)
    return added_product(lines, operand, stack).to(result_dtype)


def masked_embedding(
    tokens: Tensor,
    V: Tensor,
    U: Tensor,
    weight: Tensor,
    mask: SiteMask,
) -> Tensor:
    """Return the output for tokens (seeds, rows), which index the rows of `V` and `weight`."""
    saved, left = shares(mask)
    result = product(looked_up(V, tokens) * saved, U)
    if left is not None:
        result = result + left.unsqueeze(-1) * looked_up(weight[None], tokens)
    return result.to(weight.dtype)


def activations(x: Tensor, V: Tensor) -> Tensor:
    """Return x V: (seeds, rows, C)."""
    dtype = computed_in(V)
    return product(x.to(dtype), V.to(dtype))


def computed_in(V: Tensor) -> torch.dtype:
    """Return the dtype of products with `V`: that of autocast, or its own."""
    kind = V.device.type
    if V.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return V.dtype
    return torch.get_autocast_dtype(kind)


def looked_up(table: Tensor, tokens: Tensor) -> Tensor:
    """Return the rows of a table, (seeds or 1, tokens, width), for tokens of (seeds, rows)."""
    if table.shape[0] == 1:
        return table[0][tokens]
    seeds = torch.arange(table.shape[0], device=table.device)[:, None]
    return table[seeds, tokens]


def shares(mask: SiteMask) -> tuple[Tensor, Tensor | None]:
    """Return m - d, (seeds, rows, C), and d, (seeds, rows), or None if it is 0 everywhere."""
    importance = mask.importance
    source = _numbers(mask.source, importance)
    stored = importance + (1 - importance) * source
    rows = importance[..., 0]
    left = None if mask.delta is None or _is_zero(mask.delta) else _numbers(mask.delta, rows)
    if isinstance(left, float):
        left = torch.full_like(rows, left)
    if left is not None:
        stored = stored - left.unsqueeze(-1)
    if mask.routed is not None:
        stored = stored.masked_fill(~mask.routed.unsqueeze(-1), 0.0)
        none = torch.zeros_like(rows) if left is None else left
        left = none.masked_fill(~mask.routed, 1.0)
    return stored, left


def _is_zero(delta: Source) -> bool:
    return isinstance(delta, float) and delta == 0.0


def _numbers(source: Source, like: Tensor) -> Tensor | float:
    if not isinstance(source, Draw):
        return source
    drawn = torch.rand_like(like)
    return drawn if source.kind == "continuous" else drawn.round()


def product(a: Tensor, b: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a b per seed, (seeds, ...), in `dtype`, else in that of the operands."""
    one = a.shape[0] == 1
    wide = dtype is not None and dtype != a.dtype
    if wide and a.is_cuda and dtype == torch.float32:
        # The sum as it is, in fp32: cuBLAS need not round it for torch to widen it again.
        if one:
            return torch.mm(a[0], b[0], out_dtype=dtype).unsqueeze(0)
        return torch.bmm(a, b, out_dtype=dtype)
    result = torch.mm(a[0], b[0]).unsqueeze(0) if one else torch.bmm(a, b)
    return result.to(dtype) if wide else result


def added_product(to: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Return to + a b; `to` broadcasts, (seeds or 1, rows or 1, columns)."""
    if to is None:
        return product(a, b)
    to = to.to(a.dtype)
    if a.shape[0] > 1:
        return torch.baddbmm(to, a, b)
    # A bias of one dimension is added within the product, one of two is copied out first.
    line = to[0, 0] if to.shape[1] == 1 else to[0]
    return torch.addmm(line, a[0], b[0]).unsqueeze(0)


def is_fused(x: Tensor, mask: SiteMask) -> bool:
    """Return whether kernels compute a site of this input and mask."""
    tensors = [x, mask.importance]
    tensors += [each for each in (mask.source, mask.delta) if isinstance(each, Tensor)]
    known = all(each.dtype in FORMATS for each in tensors)
    return known and x.shape[1] > 0 and has_kernels(x.device.type)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def has_kernels(device: str) -> bool:
    """Return whether Triton runs on devices of this type, as a constant for torch.compile."""
    return not unsupported_reason(torch.device(device))


def new_seed(device: torch.device) -> Tensor:
    """Draw a seed on the device; a CUDA graph draws another whenever it is replayed."""
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
    """Return `masked_output` in the dtype of `x`, computed by kernels."""
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
    """Return the kind of a source as in `kernels.site`, its value, and its tensor."""
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
    """Return V and [U ; W^T] in `dtype`, with C and d_in padded to multiples of 8."""
    both = torch.ops.narrowcast.masked_weights(V, U, weight_t, dtype)
    first = V.shape[1] * _rounded_up(V.shape[2])
    narrow = both[:, :first].unflatten(1, (V.shape[1], -1))
    return narrow, both[:, first:].unflatten(1, (-1, U.shape[2]))


def _rounded_up(width: int) -> int:
    return -(-width // 8) * 8


def _write_weights(V: Tensor, U: Tensor, weight_t: Tensor | None, dtype: torch.dtype) -> Tensor:
    from narrowcast.workloads.decompose.components.kernels import site  # Triton: not everywhere

    out = _empty_weights(V, U, weight_t, dtype)
    site.write_weights(out, V, U, weight_t, _rounded_up(V.shape[2]))
    return out


def _empty_weights(V: Tensor, U: Tensor, weight_t: Tensor | None, dtype: torch.dtype) -> Tensor:
    seeds, d_in, count = V.shape
    lines = _rounded_up(count) + (0 if weight_t is None else _rounded_up(d_in))
    size = d_in * _rounded_up(count) + lines * U.shape[2]
    return V.new_empty((seeds, size), dtype=dtype)


# What operators are given is said once, by `_GIVEN`.
def _operand(h: Tensor, x: Tensor | None, *inputs: Any) -> Tensor:
    from narrowcast.workloads.decompose.components.kernels import site

    *mask, source_kind, source, delta_kind, delta, stream = inputs
    out = _empty_operand(h, x)
    how = {"sources": (source_kind, source), "deltas": (delta_kind, delta), "stream": stream}
    site.write_operand(out, h, x, *mask, **how)
    return out


def _operand_back(down: Tensor, h: Tensor, x: Tensor | None, *settings: Any) -> _Four:
    from narrowcast.workloads.decompose.components.kernels import site

    *mask, source_kind, source, delta_kind, delta, stream = settings[:-4]
    to_importance, to_source, to_delta, to_operand = settings[-4:]
    dh, dg, ds, dd = _empty_gradients(down, h, x, *settings)
    matched = site.write_gradients(
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
