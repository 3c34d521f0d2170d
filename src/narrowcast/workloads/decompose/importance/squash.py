"""Squash the logits of causal importance into [0, 1], twice.

The lower one makes masks. The upper one is for importance losses: it keeps a slope above 1, so that
a saturated logit can still be brought down.
"""

from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from narrowcast.errors import ConfigError
from narrowcast.workloads.decompose.components.masked import FORMATS, has_kernels

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
    return both(logits, kind)[0]


def upper(logits: Tensor, kind: Squash = "leaky_hard") -> Tensor:
    """Return the importances for minimality losses, at least 0."""
    return both(logits, kind)[1]


def both(logits: Tensor, kind: Squash = "leaky_hard") -> tuple[Tensor, Tensor]:
    """Return the lower and the upper importances of the same logits."""
    if kind == "leaky_hard":
        pair: tuple[Tensor, Tensor] = _apply(logits)
        return pair
    same = _same_for_both(logits, kind)
    return same, same


def shifted(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the logits for `lower`; binomial sampling adds noise."""
    if sampling == "continuous":
        return logits
    return (1 + BINOMIAL_SHIFT) * logits - BINOMIAL_SHIFT * torch.rand_like(logits)


def importances(
    logits: list[Tensor], kind: Squash = "leaky_hard", sampling: Sampling = "continuous"
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the lower and the upper importances of every site."""
    if sampling == "continuous":
        pairs = [both(each, kind) for each in logits]
    else:
        pairs = [(lower(shifted(each, sampling), kind), upper(each, kind)) for each in logits]
    return [low for low, _ in pairs], [up for _, up in pairs]


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
            raise ConfigError(f"squash must be one of {', '.join(get_args(Squash))}, got {kind!r}.")


class _LeakyHard(torch.autograd.Function):
    """Clamp to [0, 1], for losses with a slope above 1.

    Below 0 only gradients leak through: a real slope would make masks negative and destabilise.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        if _has_kernel(logits):
            from narrowcast.workloads.decompose.components.kernels import importance

            logits = logits.contiguous()
            low, up = importance.squash(logits, LEAK)
        else:
            low = logits.clamp(0, 1)
            up = (logits - 1).clamp_(min=0).mul_(LEAK).add_(low)
        ctx.save_for_backward(logits)
        return low, up

    @staticmethod
    def backward(ctx: Any, grad_low: Tensor | None, grad_up: Tensor | None) -> Tensor | None:
        (logits,) = ctx.saved_tensors
        if _has_kernel(logits):
            from narrowcast.workloads.decompose.components.kernels import importance

            low = None if grad_low is None else grad_low.contiguous()
            up = None if grad_up is None else grad_up.contiguous()
            return importance.squash_back(logits, low, up, LEAK)
        result, above = None, logits > 1
        if grad_low is not None:
            result = torch.where(logits <= 0, grad_low.clamp(max=0).mul_(LEAK), grad_low)
            result = result.masked_fill_(above, 0.0)
        if grad_up is not None:
            pressed = torch.where(above, LEAK * grad_up, grad_up).masked_fill_(logits < 0, 0.0)
            result = pressed if result is None else result.add_(pressed)
        return result


_apply: Any = _LeakyHard.apply


def _has_kernel(logits: Tensor) -> bool:
    # What is compiled fuses the arithmetic by itself.
    if torch.compiler.is_compiling() or logits.dtype not in FORMATS:
        return False
    return logits.numel() > 0 and has_kernels(logits.device.type)
