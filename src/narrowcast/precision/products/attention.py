"""Multi-head attention as `nn.MultiheadAttention` computes it, for emulated regions.

torch hides the products of this one function from function modes.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def multi_head_attention(
    query: Tensor,  # (target, batch, width), or (target, width)
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return what `F.multi_head_attention_forward` returns for the same arguments."""
    batched = query.dim() == 3
    if not batched:
        query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
        if key_padding_mask is not None:
            key_padding_mask = key_padding_mask.unsqueeze(0)
    weights = (
        (q_proj_weight, k_proj_weight, v_proj_weight)
        if use_separate_proj_weight
        else _not_none(in_proj_weight).chunk(3)
    )
    biases = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
    q, k, v = (
        F.linear(x, _not_none(w), b)
        for x, w, b in zip((query, key, value), weights, biases, strict=True)
    )
    added = 0
    if bias_k is not None and bias_v is not None:
        k = torch.cat([k, bias_k.expand(1, k.shape[1], -1).to(k.dtype)])
        v = torch.cat([v, bias_v.expand(1, v.shape[1], -1).to(v.dtype)])
        added += 1
    q, k, v = (_split_heads(x, num_heads) for x in (q, k, v))  # (batch, heads, length, width/heads)
    k = k if static_k is None else static_k.unflatten(0, (-1, num_heads))
    v = v if static_v is None else static_v.unflatten(0, (-1, num_heads))
    if add_zero_attn:
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        added += 1
    # Masks count the keys that were given; those added above are always seen.
    needs_causal = is_causal and attn_mask is None
    if needs_causal:
        attn_mask = torch.ones(q.shape[2], k.shape[2] - added, dtype=torch.bool, device=q.device)
        attn_mask = attn_mask.triu(1)
    mask = _merged_mask(attn_mask, key_padding_mask, num_heads, added, q)
    dropout = dropout_p if training else 0.0
    if need_weights:
        attended, attention = _attention_with_weights(q, k, v, mask, dropout)
        if average_attn_weights:
            attention = attention.mean(1)
    else:
        attended, attention = (
            F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout),
            None,
        )
    joined = attended.permute(2, 0, 1, 3).flatten(2)  # (target, batch, width)
    output = F.linear(joined, out_proj_weight, out_proj_bias)
    if not batched:
        output = output.squeeze(1)
        attention = None if attention is None else attention.squeeze(0)
    return output, attention


def _attention_with_weights(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float
) -> tuple[Tensor, Tensor]:
    scores = torch.matmul(q * math.sqrt(1 / q.shape[-1]), k.transpose(-2, -1))
    if mask is not None:
        scores = scores + mask
    attention = F.softmax(scores, dim=-1)
    if dropout > 0:
        attention = F.dropout(attention, p=dropout)
    return torch.matmul(attention, v), attention


def _split_heads(x: Tensor, heads: int) -> Tensor:
    length, batch, width = x.shape
    return x.view(length, batch, heads, width // heads).permute(1, 2, 0, 3)


def _merged_mask(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, heads: int, added: int, like: Tensor
) -> Tensor | None:
    """Return one additive mask that broadcasts to (batch, heads, target, source)."""
    merged: Tensor | None = None
    if attn_mask is not None:
        merged = _additive(attn_mask, like)
        if merged.dim() == 3:  # (batch · heads, target, source)
            merged = merged.view(-1, heads, *merged.shape[1:])
    if key_padding_mask is not None:
        padding = _additive(key_padding_mask, like)[:, None, None, :]
        merged = padding if merged is None else merged + padding
    return merged if merged is None or not added else F.pad(merged, (0, added))


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -math.inf)


def _not_none(value: Any) -> Tensor:
    assert isinstance(value, Tensor)
    return value
