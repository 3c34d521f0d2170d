"""How a model is called with a batch of rows, and whether it then keeps apart what must be.

What a model computes is looked at, and not its name: one whose tokens see those that come after
them cannot learn to predict, and in one that does not know where conversations end, each would
learn from its neighbours.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch
from torch import Tensor

from narrowcast.errors import UnsupportedError
from narrowcast.training.evaluation import in_eval_mode
from narrowcast.workloads.sft.attention import conversation_bounds

Batch: TypeAlias = dict[str, Tensor]

_HALF = 8
"""Tokens of each of the two conversations that a model is tried with."""
_TOLERANCE = 4.0
"""Steps of the dtype at the largest logit (of fp32, of TF32): what another order of sums may do."""


_STEPS = {torch.float32: 2.0**-10, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


@final
@dataclass(frozen=True, kw_only=True)
class Calling:
    """What a model is told of a batch."""

    packing: bool
    bounded: bool
    """Whether its attention is told where the conversations of a row end."""
    context: int | None
    """Tokens the model was made for, where it says."""

    def arguments(self, batch: Batch) -> dict[str, Any]:
        """Return what the model is called with.

        Told no positions, it takes a row for one conversation, whose order is all it needs: what
        fills the row up comes after it, and nothing looks ahead.
        """
        settings: dict[str, Any] = {"input_ids": batch["input_ids"], "labels": batch["labels"]}
        settings["use_cache"] = False
        longer = self.context is not None and batch["input_ids"].shape[1] > self.context
        if self.packing or self.bounded or longer:
            settings["position_ids"] = batch["position_ids"]
        if self.bounded:
            settings["attention_mask"] = conversation_bounds(batch["position_ids"])
        return settings

    @torch.no_grad()
    def check_causal(self, model: Any, *, vocabulary: int) -> None:
        """Refuse a model whose tokens see what comes after them, or another conversation."""
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
        inputs = self.arguments({"input_ids": ids, "labels": ids, "position_ids": places})
        del inputs["labels"]
        logits: Tensor = model(**inputs).logits.float()
        return logits


def _differ(one: Tensor, other: Tensor, tolerance: float) -> bool:
    """Say whether logits differ by more than rounding; what is no number differs from nothing."""
    return bool(((one - other).abs() > tolerance * one.abs().max()).any())
