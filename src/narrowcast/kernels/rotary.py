"""Turn query and key heads by their positions.

One read of what a projection gave, and one write: 4 bytes an element each way. A compiler's own
kernel reads the table of angles once for every element, 8 bytes from the cache, and as the values
stay a view of the projection, all of it is kept for the backward pass beside the turned heads. What
is turned comes back by turning the other way, so nothing else is kept. Inside `torch.compile` this
is the operator `narrowcast::turn_heads`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_TILE = 4096  # elements of a program


def turn_heads(heads: Tensor, table: Tensor, *, queries: int) -> tuple[Tensor, Tensor, Tensor]:
    """Split heads into queries, keys and values, with pairs of the first two turned.

    `heads` is (batch, length, queries + 2 · keys, head width), `table` holds the cosine and sine of
    each position and pair in fp32: (length, 1, head width / 2, 2). Computed in fp32, rounded once.
    """
    keys = (heads.shape[2] - queries) // 2
    result: tuple[Tensor, Tensor, Tensor] = _apply(heads, table, queries, keys)
    return result


class _TurnHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, heads: Tensor, table: Tensor, queries: int, keys: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(table)
        turned = torch.ops.narrowcast.turn_heads(
            *heads.split([queries, keys, keys], dim=2), table, False
        )
        query, key, value = turned.split([queries, keys, keys], dim=2)
        return query, key, value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor | None, ...]:
        (table,) = ctx.saved_tensors
        return torch.ops.narrowcast.turn_heads(query, key, value, table, True), None, None, None


_apply: Any = _TurnHeads.apply


def _turn_heads(query: Tensor, key: Tensor, value: Tensor, table: Tensor, back: bool) -> Tensor:
    result = _empty(query, key, value, table, back)
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    batch, length, queries, width = query.shape
    keys = key.shape[2]
    wide = triton.next_power_of_2(width)
    together = min(triton.next_power_of_2(min(queries, keys)), max(_TILE // wide, 1))
    tokens = max(_TILE // wide // together, 1)
    chunks = triton.cdiv(queries, together) + 2 * triton.cdiv(keys, together)
    _turn[(triton.cdiv(batch * length, tokens), chunks)](
        query,
        key,
        value,
        result,
        table,
        batch * length,
        length,
        width,
        queries,
        keys,
        *query.stride()[:3],
        *key.stride()[:3],
        *value.stride()[:3],
        SIGN=-1.0 if back else 1.0,
        TOKENS=tokens,
        HEADS=together,
        WIDTH=wide,
        num_warps=4,
    )
    return result


def _empty(query: Tensor, key: Tensor, value: Tensor, table: Tensor, back: bool) -> Tensor:
    batch, length, queries, width = query.shape
    return query.new_empty((batch, length, queries + 2 * key.shape[2], width))


@triton.jit
def _turn(
    query,
    key,
    value,
    target,
    table,
    tokens,
    length,
    width,
    queries,
    keys,
    query_batch,
    query_position,
    query_head,
    key_batch,
    key_position,
    key_head,
    value_batch,
    value_position,
    value_head,
    SIGN: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    batch, position = token // length, token % length
    chunk = tl.program_id(1)
    of_queries, of_keys = tl.cdiv(queries, HEADS), tl.cdiv(keys, HEADS)
    place = tl.arange(0, WIDTH)
    here = (token < tokens)[:, None] & (place < width)[None, :]
    angles = tl.load(table + position[:, None] * width + place[None, :], mask=here, other=0.0)
    row = token * (queries + 2 * keys)
    if chunk < of_queries:
        head = chunk * HEADS + tl.arange(0, HEADS)
        start = batch * query_batch + position * query_position
        x = _heads(query, start, head, queries, query_head, place, here)
        x = _turned(x, angles, SIGN, TOKENS, HEADS, WIDTH)
        _store(target, x, row, head, queries, width, place, here)
    elif chunk < of_queries + of_keys:
        head = (chunk - of_queries) * HEADS + tl.arange(0, HEADS)
        start = batch * key_batch + position * key_position
        x = _heads(key, start, head, keys, key_head, place, here)
        x = _turned(x, angles, SIGN, TOKENS, HEADS, WIDTH)
        _store(target, x, row + queries, head, keys, width, place, here)
    else:
        head = (chunk - of_queries - of_keys) * HEADS + tl.arange(0, HEADS)
        start = batch * value_batch + position * value_position
        x = _heads(value, start, head, keys, value_head, place, here)
        _store(target, x, row + queries + keys, head, keys, width, place, here)


@triton.jit
def _heads(source, start, head, heads, stride, place, here):
    """Some heads of some tokens: (token, head, place)"""
    at = start[:, None, None] + head[None, :, None] * stride + place[None, None, :]
    return tl.load(source + at, mask=here[:, None, :] & (head < heads)[None, :, None], other=0.0)


@triton.jit
def _turned(
    x,
    angles,
    SIGN: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Neighbours as complex numbers, times those of the table"""
    wide = x.to(tl.float32)
    real, imaginary = tl.split(tl.reshape(wide, [TOKENS, HEADS, WIDTH // 2, 2]))
    cosine, sine = tl.split(tl.reshape(angles, [TOKENS, 1, WIDTH // 2, 2]))
    sine = sine * SIGN
    turned = tl.join(real * cosine - imaginary * sine, real * sine + imaginary * cosine)
    return tl.reshape(turned, [TOKENS, HEADS, WIDTH]).to(x.dtype)


@triton.jit
def _store(target, x, row, head, heads, width, place, here):
    at = (row[:, None, None] + head[None, :, None]) * width + place[None, None, :]
    tl.store(target + at, x, mask=here[:, None, :] & (head < heads)[None, :, None])


_library = torch.library.Library("narrowcast", "FRAGMENT")
_library.define(
    "turn_heads(Tensor query, Tensor key, Tensor value, Tensor table, bool back) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.impl("turn_heads", _turn_heads, "CompositeExplicitAutograd")
torch.library.register_fake("narrowcast::turn_heads", _empty)
