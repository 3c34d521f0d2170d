"""Rotary position embedding of query and key heads, in one read and one write.

Nothing is kept for the backward pass, which rotates the other way. A pair is two neighbours, or two
numbers half a head apart as in transformers.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from narrowcast.kernels.launch import Launcher, is_traced

_TILE = 4096  # elements of a program


def turn_heads(heads: Tensor, table: Tensor, *, queries: int) -> tuple[Tensor, Tensor, Tensor]:
    """Split heads into queries, keys and values, and rotate neighbouring pairs of the first two.

    `heads` is (batch, length, queries + 2 · keys, head width), `table` the cosines and sines in
    fp32, (length, 1, head width / 2, 2).
    """
    keys = (heads.shape[2] - queries) // 2
    result: tuple[Tensor, Tensor, Tensor] = _apply(heads, table, queries, keys)
    return result


def turn_halves(query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate pairs that are half a head apart, of (batch, heads, length, head width).

    `cosine` and `sine` are (batch or 1, length, head width).
    """
    result: tuple[Tensor, Tensor] = _apply_halves(query, key, cosine, sine)
    return result


class _TurnHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, heads: Tensor, table: Tensor, queries: int, keys: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(table)
        call = torch.ops.narrowcast.turn_heads if is_traced(heads, table) else _turn_heads
        query, key, value = heads.split([queries, keys, keys], dim=2)
        turned: Tensor = call(query, key, value, table, False)
        query, key, value = turned.split([queries, keys, keys], dim=2)
        return query, key, value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor | None, ...]:
        (table,) = ctx.saved_tensors
        call = torch.ops.narrowcast.turn_heads if is_traced(query, key) else _turn_heads
        return call(query, key, value, table, True), None, None, None


class _TurnHalves(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cosine, sine)
        return _turned_halves(query, key, cosine, sine, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, query: Tensor, key: Tensor) -> tuple[Tensor | None, ...]:
        return *_turned_halves(query, key, *ctx.saved_tensors, back=True), None, None


def _turned_halves(
    query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor, *, back: bool
) -> tuple[Tensor, Tensor]:
    call = torch.ops.narrowcast.turn_halves if is_traced(query, key, cosine) else _turn_halves
    result: tuple[Tensor, Tensor] = call(query, key, cosine, sine, back)
    return result


_apply: Any = _TurnHeads.apply
_apply_halves: Any = _TurnHalves.apply


def _turn_heads(query: Tensor, key: Tensor, value: Tensor, table: Tensor, back: bool) -> Tensor:
    result = _empty(query, key, value, table, back)
    queries, keys = query.shape[2], key.shape[2]
    targets = result.split([queries, keys, keys], dim=2)
    _launch((query, key, value), targets, (table, table), (0, query.shape[3]), back, halves=False)
    return result


def _turn_halves(
    query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor, back: bool
) -> tuple[Tensor, Tensor]:
    results = _empty_halves(query, key, cosine, sine, back)
    cosine, sine = cosine.contiguous(), sine.contiguous()
    steps = (0 if len(cosine) == 1 else cosine.stride(0), cosine.stride(1))
    by_position = [each.transpose(1, 2) for each in (query, key, *results)]
    heads, targets = tuple(by_position[:2]), tuple(by_position[2:])
    _launch(heads, targets, (cosine, sine), steps, back, halves=True)
    return results


def _launch(
    heads: tuple[Tensor, ...],
    targets: tuple[Tensor, ...],
    angles: tuple[Tensor, Tensor],
    angle_steps: tuple[int, int],
    back: bool,
    *,
    halves: bool,
) -> None:
    """Turn queries and keys, and copy values where there are any, in one launch."""
    heads = tuple([t if t.stride(-1) == 1 else t.contiguous() for t in heads])
    batch, length, queries, width = heads[0].shape
    keys, values = heads[1].shape[2], heads[2].shape[2] if len(heads) > 2 else 0
    wide, together, tokens, chunks = _cut(width, queries, keys, values)
    source, target = (*heads, heads[1])[:3], (*targets, targets[1])[:3]
    _launch_turn(
        (-(-batch * length // tokens), chunks, 1),
        (*source, *target, *angles),
        (
            batch * length,
            length,
            width,
            queries,
            keys,
            values,
            *source[0].stride()[:3],
            *source[1].stride()[:3],
            *source[2].stride()[:3],
            target[0].stride(1),
            target[1].stride(1),
            target[2].stride(1),
            *angle_steps,
        ),
        (-1.0 if back else 1.0, halves, tokens, together, wide),
        num_warps=4,
    )


@functools.cache
def _cut(width: int, queries: int, keys: int, values: int) -> tuple[int, int, int, int]:
    """Return the power of two above a width, heads and tokens of a program, and chunks of heads."""
    wide = triton.next_power_of_2(width)
    together = min(triton.next_power_of_2(min(queries, keys)), max(_TILE // wide, 1))
    tokens = max(_TILE // wide // together, 1)
    return wide, together, tokens, sum(-(-count // together) for count in (queries, keys, values))


def _empty(query: Tensor, key: Tensor, value: Tensor, table: Tensor, back: bool) -> Tensor:
    batch, length, queries, width = query.shape
    return query.new_empty((batch, length, queries + 2 * key.shape[2], width))


def _empty_halves(
    query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor, back: bool
) -> tuple[Tensor, Tensor]:
    return _by_position(query), _by_position(key)


def _by_position(x: Tensor) -> Tensor:
    """Return memory (batch, heads, length, width) with the heads of a position together."""
    batch, heads, length, width = x.shape
    strides = (length * heads * width, width, heads * width, 1)
    return x.new_empty_strided((batch, heads, length, width), strides)


@triton.jit
def _turn(
    query,
    key,
    value,
    to_query,
    to_key,
    to_value,
    cosine,
    sine,
    tokens,
    length,
    width,
    queries,
    keys,
    values,
    query_batch,
    query_position,
    query_head,
    key_batch,
    key_position,
    key_head,
    value_batch,
    value_position,
    value_head,
    to_query_token,
    to_key_token,
    to_value_token,
    angle_batch,
    angle_position,
    SIGN: tl.constexpr,
    HALVES: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    batch, position = token // length, token % length
    chunk = tl.program_id(1)
    of_queries, of_keys = tl.cdiv(queries, HEADS), tl.cdiv(keys, HEADS)
    angle = batch * angle_batch + position * angle_position
    known = token < tokens
    if chunk < of_queries:
        head = chunk * HEADS + tl.arange(0, HEADS)
        start = batch * query_batch + position * query_position
        at, to = _at(start, head, query_head), _at(token * to_query_token, head, width)
        here = known[:, None, None] & (head < queries)[None, :, None]
        _turn_some(
            query, to_query, cosine, sine, at, to, angle, known, here, width,
            SIGN, HALVES, TOKENS, HEADS, WIDTH,
        )  # fmt: skip
    elif chunk < of_queries + of_keys:
        head = (chunk - of_queries) * HEADS + tl.arange(0, HEADS)
        start = batch * key_batch + position * key_position
        at, to = _at(start, head, key_head), _at(token * to_key_token, head, width)
        here = known[:, None, None] & (head < keys)[None, :, None]
        _turn_some(
            key, to_key, cosine, sine, at, to, angle, known, here, width,
            SIGN, HALVES, TOKENS, HEADS, WIDTH,
        )  # fmt: skip
    else:
        head = (chunk - of_queries - of_keys) * HEADS + tl.arange(0, HEADS)
        start = batch * value_batch + position * value_position
        at, to = _at(start, head, value_head), _at(token * to_value_token, head, width)
        location = tl.arange(0, WIDTH)[None, None, :]
        inside = known[:, None, None] & (head < values)[None, :, None] & (location < width)
        tl.store(to_value + to + location, tl.load(value + at + location, mask=inside), mask=inside)


@triton.jit
def _at(start, head, stride):
    """Where some heads of some tokens begin: (token, head, 1)"""
    return start[:, None, None] + head[None, :, None] * stride


@triton.jit
def _turn_some(
    source,
    target,
    cosine,
    sine,
    at,
    to,
    angle,
    known,
    here,
    width,
    SIGN: tl.constexpr,
    HALVES: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    if HALVES:
        half, location = width // 2, tl.arange(0, WIDTH // 2)[None, None, :]
        here = here & (location < half)
        angle = angle[:, None, None] + location
        seen = known[:, None, None] & (location < half)
        first = tl.load(source + at + location, mask=here, other=0.0)
        second = tl.load(source + at + half + location, mask=here, other=0.0)
        cosines = tl.load(cosine + angle, mask=seen, other=0.0).to(tl.float32)
        further = tl.load(cosine + angle + half, mask=seen, other=0.0).to(tl.float32)
        sines = tl.load(sine + angle, mask=seen, other=0.0).to(tl.float32)
        beyond = tl.load(sine + angle + half, mask=seen, other=0.0).to(tl.float32)
        x, y = first.to(tl.float32), second.to(tl.float32)
        if SIGN > 0:
            a, b = x * cosines - y * sines, y * further + x * beyond
        else:
            a, b = x * cosines + y * beyond, y * further - x * sines
        tl.store(target + to + location, a.to(first.dtype), mask=here)
        tl.store(target + to + half + location, b.to(first.dtype), mask=here)
    else:
        location = tl.arange(0, WIDTH)
        here = here & (location < width)[None, None, :]
        seen = known[:, None] & (location < width)[None, :]
        angles = tl.load(cosine + angle[:, None] + location[None, :], mask=seen, other=0.0)
        x = tl.load(source + at + location[None, None, :], mask=here, other=0.0)
        turned = _turned(x, angles, SIGN, TOKENS, HEADS, WIDTH)
        tl.store(target + to + location[None, None, :], turned, mask=here)


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


_launch_turn = Launcher(_turn)
_library = torch.library.Library("narrowcast", "FRAGMENT")
_library.define(
    "turn_heads(Tensor query, Tensor key, Tensor value, Tensor table, bool back) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.define(
    "turn_halves(Tensor query, Tensor key, Tensor cosine, Tensor sine, bool back)"
    " -> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.impl("turn_heads", _turn_heads, "CompositeExplicitAutograd")
_library.impl("turn_halves", _turn_halves, "CompositeExplicitAutograd")
torch.library.register_fake("narrowcast::turn_heads", _empty)
torch.library.register_fake("narrowcast::turn_halves", _empty_halves)
