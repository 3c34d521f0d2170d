"""Squash the logits of causal importance into [0, 1], twice.

The lower one makes masks: it never leaves [0, 1]. The upper one is what importance losses press
on: above 1 it goes on rising a little, so that a saturated logit can still be brought down.
"""

from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from narrowcast.errors import RecipeError

Squash = Literal["leaky_hard", "normal", "hard", "swish_hard"]
Sampling = Literal["continuous", "binomial"]

LEAK = 0.01
"""The slope that is left where a hard sigmoid has none."""
SHARPNESS = 10.0
"""Of the two swishes whose difference is the smooth hard sigmoid."""
BINOMIAL_SHIFT = 0.05
"""How far noise spreads a logit where masks are binomial, so that it is seen near 0 and 1 too."""


def lower(logits: Tensor, kind: Squash = "leaky_hard") -> Tensor:
    """Return the importances that make masks, within [0, 1] (swish_hard: nearly)."""
    if kind == "leaky_hard":
        out: Tensor = _LowerLeakyHard.apply(logits)  # type: ignore[no-untyped-call]
        return out
    return _same_for_both(logits, kind)


def upper(logits: Tensor, kind: Squash = "leaky_hard") -> Tensor:
    """Return the importances that losses press on, at least 0."""
    if kind == "leaky_hard":
        return torch.where(logits > 1, 1 + LEAK * (logits - 1), logits.clamp(0, 1))
    return _same_for_both(logits, kind)


def shifted(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the logits for `lower`: binomial sampling spreads them with noise, drawn anew."""
    if sampling == "continuous":
        return logits
    return (1 + BINOMIAL_SHIFT) * logits - BINOMIAL_SHIFT * torch.rand_like(logits)


def importances(
    logits: list[Tensor], kind: Squash = "leaky_hard", sampling: Sampling = "continuous"
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the lower and the upper importances of every site."""
    masking = [lower(shifted(each, sampling), kind) for each in logits]
    return masking, [upper(each, kind) for each in logits]


def _same_for_both(logits: Tensor, kind: Squash) -> Tensor:
    match kind:
        case "normal":
            return torch.sigmoid(logits)
        case "hard":
            return logits.clamp(0, 1)
        case "swish_hard":
            rising, level = F.silu(SHARPNESS * logits), F.silu(SHARPNESS * (logits - 1))
            return (rising - level) / SHARPNESS
        case _:
            raise RecipeError(
                f"{kind!r} squashes no importances; write one of {', '.join(get_args(Squash))}"
            )


class _LowerLeakyHard(torch.autograd.Function):
    """Clamp to [0, 1]; below 0, a gradient that wants the logit to rise leaks through.

    A real slope below 0 would make masks negative, and those destabilise training.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return logits.clamp(0, 1)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        (logits,) = ctx.saved_tensors
        below = LEAK * grad_output.clamp(max=0)
        within = torch.where(logits > 1, 0.0, grad_output)
        return torch.where(logits <= 0, below, within)
