"""Attention that keeps the conversations of a packed row apart, for models of transformers.

transformers makes a mask of `position_ids` by itself, and not where a cache of keys is about, which
a model that is not told `use_cache=False` makes at every call: conversations then see one another,
without a word. So a model is told by what it takes for a mask, which it hands to its layers as it
is: `conversation_bounds(position_ids)`, two numbers a token. What is no such thing (padding,
generation, no mask at all) is computed as transformers computes it with torch's own attention.
"""

from typing import Any

import torch
import torch.nn.functional as F
from peft import PeftModel
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from narrowcast.errors import UnsupportedError
from narrowcast.kernels.launch import unsupported_reason

# Known before a compiler traces a layer, which would look for Triton again in its midst.
_HAS_TRITON = not unsupported_reason(torch.device("cuda"))
if _HAS_TRITON:
    from narrowcast.kernels.attention.packed import packed_attention

NAME = "narrowcast_packed"
"""What it is called among the attentions of transformers."""
LAYERS = ("full_attention", "sliding_attention")
"""Kinds of layers whose border between conversations is all that packing changes."""

WIDEST = 256
"""Elements of a head that the kernel's tiles have room for."""


def conversation_bounds(position_ids: Tensor) -> Tensor:
    """Return where the conversation of each token begins in its row, and where it ends.

    Given to a model as `attention_mask`, it keeps them apart: (rows, 1, 2, width), int32. Waits for
    nothing, and has one shape whatever the conversations.
    """
    places = torch.arange(position_ids.shape[-1], device=position_ids.device)
    starts = places - position_ids  # (rows, width)
    last = torch.ones_like(starts, dtype=torch.bool)
    last[:, :-1] = starts.diff() != 0
    behind = torch.where(last, places + 1, position_ids.shape[-1])
    ends = behind.flip(-1).cummin(-1).values.flip(-1)
    return torch.stack([starts, ends], 1)[:, None].to(torch.int32)


def separate_conversations(model: nn.Module) -> None:
    """Let a model understand `conversation_bounds`; what it computes else stays the same."""
    inner: Any = model
    if isinstance(model, PeftModel):
        inner = model.get_base_model()
    if not isinstance(inner, PreTrainedModel):
        raise UnsupportedError(
            f"data.packing=true needs a transformers model, got {type(inner).__name__}. Write "
            "data.packing=false."
        )
    _check_attention(inner)
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    inner.set_attn_implementation(NAME)


def _check_attention(model: Any) -> None:
    """Refuse a model that carries more from token to token than attention with borders does."""
    name, config = type(model).__name__, model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or LAYERS)
    why = ""
    if not kinds.issubset(LAYERS):
        why = f"{name} has layers ({', '.join(sorted(kinds))}) that carry state between tokens"
    elif not model._can_set_attn_implementation():
        why = f"{name} has a custom attention, which does not take conversation bounds"
    elif getattr(config, "attn_logit_softcapping", None) is not None:
        why = f"{name} uses attention logit softcapping, which packed rows do not support"
    elif any(key.endswith(".sinks") for key, _ in model.named_parameters()):
        why = f"{name} uses attention sinks, which packed rows do not support"
    if why:
        raise UnsupportedError(
            f"data.packing=true is not supported: {why}. Write data.packing=false, or try "
            "model.attn_implementation=eager, which separates conversations for some models."
        )


def attention(
    module: nn.Module,
    query: Tensor,  # (rows, heads, width, head width)
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers asks its attentions to: (rows, width, heads, head width)."""
    if attention_mask is None or attention_mask.dtype != torch.int32:
        attended: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **more
        )
        return attended
    unknown = [name for name in ("softcap", "s_aux") if more.get(name) is not None]
    if unknown:
        raise UnsupportedError(
            f"data.packing=true is not supported for {type(module).__name__}: its attention needs "
            f"{unknown[0]}, which packed rows do not provide. Write data.packing=false."
        )
    bounds = attention_mask[:, 0]
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (heads.to(dtype) for heads in (query, key, value))
    fused = _HAS_TRITON and query.is_cuda and query.shape[-1] <= WIDEST
    if fused and dropout == 0.0:
        output = packed_attention(query, key, value, bounds, scale=scaling, window=sliding_window)
        return output, None
    group = query.shape[1] // key.shape[1]
    attended_here = F.scaled_dot_product_attention(
        query,
        repeat_kv(key, group),
        repeat_kv(value, group),
        attn_mask=_seen(bounds, sliding_window),
        dropout_p=dropout,
        scale=scaling,
    )
    return attended_here.transpose(1, 2).contiguous(), None


def _seen(bounds: Tensor, window: int | None) -> Tensor:
    """Return who sees whom, (rows, 1, width, width)."""
    places = torch.arange(bounds.shape[-1], device=bounds.device)
    since = places[:, None] - places
    near = since >= 0 if window is None else (since >= 0) & (since < window)
    return ((places >= bounds[:, 0, :, None]) & near)[:, None]
