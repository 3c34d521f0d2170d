"""Attention that separates packed conversations, and how a model is called with a batch.

transformers builds a mask from `position_ids` only with `use_cache=False`; otherwise conversations
silently attend to each other. Here the attention mask is `conversation_bounds(position_ids)`.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch
import torch.nn.functional as F
from peft import PeftModel
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from narrowcast.errors import UnsupportedError
from narrowcast.kernels.launch import unsupported_reason
from narrowcast.training.evaluation import in_eval_mode

# Known before torch.compile traces a layer, which would import Triton again.
_HAS_TRITON = not unsupported_reason(torch.device("cuda"))
if _HAS_TRITON:
    from narrowcast.kernels.attention.packed import packed_attention

NAME = "narrowcast_packed"
LAYERS = ("full_attention", "sliding_attention")
"""Layer types that support packing."""

WIDEST = 256
"""Largest head width of the kernel."""
Batch: TypeAlias = dict[str, Tensor]
_HALF = 8
"""Tokens in each of the two trial conversations."""
_TOLERANCE = 4.0
"""In spacings of the dtype at the largest logit (fp32: of TF32), for another summation order."""
_STEPS = {torch.float32: 2.0**-10, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def conversation_bounds(position_ids: Tensor) -> Tensor:
    """Return start and end of each token's conversation, (rows, 1, 2, width), int32; no sync."""
    places = torch.arange(position_ids.shape[-1], device=position_ids.device)
    starts = places - position_ids  # (rows, width)
    last = torch.ones_like(starts, dtype=torch.bool)
    last[:, :-1] = starts.diff() != 0
    behind = torch.where(last, places + 1, position_ids.shape[-1])
    ends = behind.flip(-1).cummin(-1).values.flip(-1)
    return torch.stack([starts, ends], 1)[:, None].to(torch.int32)


def separate_conversations(model: nn.Module) -> None:
    """Make a model accept `conversation_bounds` as its attention mask."""
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
    """Raise if packing is not supported by the model's layers or attention."""
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
    """Attention function in the signature of transformers."""
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
    """Return the boolean attention mask, (rows, 1, width, width)."""
    places = torch.arange(bounds.shape[-1], device=bounds.device)
    since = places[:, None] - places
    near = since >= 0 if window is None else (since >= 0) & (since < window)
    return ((places >= bounds[:, 0, :, None]) & near)[:, None]


@final
@dataclass(frozen=True, kw_only=True)
class Calling:
    """How a model is called with a batch."""

    packing: bool
    bounded: bool
    """Whether its attention mask is `conversation_bounds`."""
    context: int | None
    """Context length of the model, if known."""

    def arguments(self, batch: Batch) -> dict[str, Any]:
        """Return the arguments; without positions, a row is one conversation and padding."""
        settings: dict[str, Any] = {"input_ids": batch["input_ids"], "use_cache": False}
        if "labels" in batch:
            settings["labels"] = batch["labels"]
        longer = self.context is not None and batch["input_ids"].shape[1] > self.context
        if self.packing or self.bounded or longer:
            settings["position_ids"] = batch["position_ids"]
        if self.bounded:
            settings["attention_mask"] = conversation_bounds(batch["position_ids"])
        return settings

    @torch.no_grad()
    def check_causal(self, model: Any, *, vocabulary: int) -> None:
        """Run the model and raise if tokens attend to later tokens or other conversations."""
        first = next(p for p in model.parameters() if p.dtype in _STEPS)
        device, tolerance = first.device, _TOLERANCE * _STEPS[first.dtype]
        ids = torch.arange(2 * _HALF, device=device)[None] % max(vocabulary - 1, 1)
        places = torch.arange(_HALF, device=device).repeat(2)[None]
        with in_eval_mode(model):
            before = self._logits(model, ids, places)
            after = ids.clone()
            after[:, -1] = (after[:, -1] + 1) % vocabulary
            if _differ(before[:, :-1], self._logits(model, after, places)[:, :-1], tolerance):
                raise UnsupportedError(
                    f"{type(model).__name__} is not causal: a token attends to later tokens. Give "
                    "a causal language model (for BERT-like models, set is_decoder=true)."
                )
            if not self.packing:
                return
            other = ids.clone()
            other[:, :_HALF] = (other[:, :_HALF] + 1) % vocabulary
            if _differ(before[:, _HALF:], self._logits(model, other, places)[:, _HALF:], tolerance):
                raise UnsupportedError(
                    f"data.packing=true is not supported for {type(model).__name__}: conversations "
                    "in one row attend to each other. Write data.packing=false, or another "
                    "model.attn_implementation."
                )

    def _logits(self, model: Any, ids: Tensor, places: Tensor) -> Tensor:
        inputs = self.arguments({"input_ids": ids, "position_ids": places})
        logits: Tensor = model(**inputs).logits.float()
        return logits


def _differ(one: Tensor, other: Tensor, tolerance: float) -> bool:
    """Return whether logits differ by more than rounding; NaN differs from nothing."""
    return bool(((one - other).abs() > tolerance * one.abs().max()).any())
