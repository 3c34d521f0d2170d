"""Causal attention over rows that hold several sequences.

Each token has the bounds of its sequence. A mask over all pairs would rule out torch's fast
kernels, and lengths would need a synchronisation. Bounds have one shape for all sequences.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from narrowcast.kernels.attention.programs import (
    backward_keys,
    backward_queries,
    forward,
    row_sums,
)
from narrowcast.kernels.launch import launch_kernel


class AttentionTiling(NamedTuple):
    """How a program is cut and run."""

    rows: int
    columns: int
    warps: int
    stages: int


def tilings(width: int, itemsize: int) -> tuple[AttentionTiling, AttentionTiling, AttentionTiling]:
    """Return those of the forward pass, of queries' gradients and of keys' and values'."""
    if itemsize > 2 or width > 128:  # four bytes: tiles of products that are exact are small
        small = AttentionTiling(32, 32, 4, 2)
        return small, small, small
    # Of those that spill few or no registers when compiled for Hopper.
    if width > 64:
        return (
            AttentionTiling(128, 64, 8, 3),
            AttentionTiling(128, 64, 8, 2),
            AttentionTiling(32, 128, 8, 3),
        )
    return (
        AttentionTiling(128, 64, 8, 3),
        AttentionTiling(64, 64, 4, 3),
        AttentionTiling(64, 128, 8, 3),
    )


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Attend within each sequence of each row; return (batch, length, heads, width).

    `query` is (batch, heads, length, width); the heads of `key` and `value` may be a divisor.
    `bounds` is int32, (batch, 2, length): first place and end of each token's sequence. `window`
    includes the token itself.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    window = query.shape[2] if window is None else window
    output: Tensor = _apply(query, key, value, bounds, scale, window)
    return output


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bounds: Tensor,
        scale: float,
        window: int,
    ) -> Tensor:
        output, log_sums = torch.ops.narrowcast.packed_attention(
            query, key, value, bounds, scale, window
        )
        ctx.save_for_backward(query, key, value, bounds, output, log_sums)
        ctx.scale, ctx.window = scale, window
        result: Tensor = output
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        grads = torch.ops.narrowcast.packed_attention_backward(
            grad_output, *ctx.saved_tensors, ctx.scale, ctx.window
        )
        # As queries, keys and values came: heads before tokens.
        return *(grad.transpose(1, 2) for grad in grads), None, None, None


_apply: Any = _PackedAttention.apply


def _forward(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    output, log_sums = _empty(query, key, value, bounds, scale, window)
    query, key, value = (_dense_last(t) for t in (query, key, value))
    batch, heads, length, width = query.shape
    tiling = tilings(width, query.element_size())[0]
    launch_kernel(
        forward,
        (triton.cdiv(length, tiling.rows), batch * heads),
        query,
        key,
        value,
        bounds.contiguous(),
        output,
        log_sums,
        scale * math.log2(math.e),
        window,
        length,
        heads,
        heads // key.shape[1],
        *query.stride()[:3],
        *key.stride()[:3],
        *value.stride()[:3],
        **_constants(width, tiling),
    )
    return output, log_sums


def _empty(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    batch, heads, length, width = query.shape
    log_sums = query.new_empty((batch, heads, length), dtype=torch.float32)
    return query.new_empty((batch, length, heads, width)), log_sums


def _backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    output: Tensor,
    log_sums: Tensor,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = _empty_grads(grad_output, query, key, value, bounds, output, log_sums, scale, window)
    grad_output, query, key, value = (_dense_last(t) for t in (grad_output, query, key, value))
    batch, heads, length, width = query.shape
    _, by_rows, by_columns = tilings(width, query.element_size())
    sums = torch.empty_like(log_sums)
    constants = _constants(width, by_rows)
    columns = constants.pop("COLUMNS")
    launch_kernel(
        row_sums,
        (triton.cdiv(length, by_rows.rows), batch * heads),
        output,
        grad_output,
        sums,
        length,
        heads,
        *grad_output.stride()[:3],
        **constants,
    )
    inputs = (query, key, value, bounds.contiguous(), grad_output, log_sums, sums)
    sizes = (scale * math.log2(math.e), window, length, heads, heads // key.shape[1])
    strides = (
        *query.stride()[:3],
        *key.stride()[:3],
        *value.stride()[:3],
        *grad_output.stride()[:3],
    )
    of_query, of_key, of_value = grads
    launch_kernel(
        backward_queries,
        (triton.cdiv(length, by_rows.rows), batch * heads),
        *inputs,
        of_query,
        *sizes,
        *strides,
        COLUMNS=columns,
        **constants,
    )
    launch_kernel(
        backward_keys,
        (triton.cdiv(length, by_columns.columns), batch * key.shape[1]),
        *inputs,
        of_key,
        of_value,
        *sizes,
        *strides,
        **_constants(width, by_columns),
    )
    return grads


def _empty_grads(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    output: Tensor,
    log_sums: Tensor,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, length, width = query.shape
    shape = (batch, length, key.shape[1], width)
    return (
        query.new_empty((batch, length, heads, width)),
        key.new_empty(shape),
        value.new_empty(shape),
    )


def _dense_last(heads: Tensor) -> Tensor:
    return heads if heads.stride(-1) == 1 else heads.contiguous()


def _constants(width: int, tiling: AttentionTiling) -> dict[str, int]:
    wide = max(triton.next_power_of_2(width), 16)  # the least that a product of tiles takes
    return {
        "WIDTH": width,
        "WIDE": wide,
        "ROWS": tiling.rows,
        "COLUMNS": tiling.columns,
        "num_warps": tiling.warps,
        "num_stages": tiling.stages,
    }


_library = torch.library.Library("narrowcast", "FRAGMENT")
_library.define(
    "packed_attention(Tensor query, Tensor key, Tensor value, Tensor bounds, float scale, "
    "SymInt window) -> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.define(
    "packed_attention_backward(Tensor grad_output, Tensor query, Tensor key, Tensor value, "
    "Tensor bounds, Tensor output, Tensor log_sums, float scale, SymInt window) "
    "-> (Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.impl("packed_attention", _forward, "CompositeExplicitAutograd")
_library.impl("packed_attention_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("narrowcast::packed_attention", _empty)
torch.library.register_fake("narrowcast::packed_attention_backward", _empty_grads)
