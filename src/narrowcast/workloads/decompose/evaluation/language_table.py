"""Cross-entropies and divergences of masked language models; each row is one way to mask."""

import math
from collections.abc import Sequence
from typing import Literal, final, get_args

import torch
from torch import Tensor

from narrowcast.workloads.decompose.components.masked import Draw, SiteMask
from narrowcast.workloads.decompose.losses.divergence import divergence
from narrowcast.workloads.decompose.losses.terms import Step
from narrowcast.workloads.decompose.targets.language import next_token_losses

Masking = Literal["ci", "unmasked", "stochastic", "random", "rounded", "zero"]
MASKINGS: tuple[Masking, ...] = get_args(Masking)


def masks_for(masking: Masking, step: Step, *, rounding: float = 0.0) -> list[SiteMask]:
    """Return the masks of all sites; `rounding` is above what an importance counts as 1."""
    return [_mask(masking, importance.detach(), step, rounding) for importance in step.lower]


@final
class LanguageTable:
    """Sums over batches of what each way to mask loses; nothing waits before it is read."""

    def __init__(self, *, rounding: float = 0.0, maskings: Sequence[Masking] = MASKINGS) -> None:
        self.rounding, self.maskings = rounding, tuple(maskings)
        self._rows, self._predicted = 0, 0
        self._nats: dict[str, Tensor] = {}
        self._kl: dict[str, Tensor] = {}

    @torch.no_grad()
    def add(self, step: Step, tokens: Tensor) -> None:
        """Pass a batch of tokens (batch, length) through every row of the table."""
        self._rows += step.rows
        self._predicted += tokens[:, 1:].numel()
        self._sum(self._nats, "target", _nats(step.target, tokens))
        known = step.target.reshape(1, -1, step.target.shape[-1])
        for masking in self.maskings:
            output = step.masked(masks_for(masking, step, rounding=self.rounding)).output
            separate = divergence(output.reshape(1, *known.shape), known, "kl")
            self._sum(self._kl, masking, separate.sum().double() * step.rows)
            self._sum(self._nats, masking, _nats(output, tokens))

    def read(self) -> dict[str, float]:
        """Return `ce_target`, and kl, ce, ce_difference and ce_unrecovered per row; waits."""
        nats = {name: each.item() / self._predicted for name, each in self._nats.items()}
        target = nats["target"]
        worst = nats["zero"] - target if "zero" in nats else math.nan
        results = {"ce_target": target}
        for masking in self.maskings:
            more = nats[masking] - target
            results[f"kl_{masking}"] = self._kl[masking].item() / self._rows
            results[f"ce_{masking}"] = nats[masking]
            results[f"ce_difference_{masking}"] = more
            results[f"ce_unrecovered_{masking}"] = more / worst if worst > 0 else math.nan
        return results

    def _sum(self, sums: dict[str, Tensor], name: str, value: Tensor) -> None:
        sums[name] = sums[name] + value if name in sums else value


def _mask(masking: Masking, importance: Tensor, step: Step, rounding: float) -> SiteMask:
    nothing = torch.zeros_like(importance)
    match masking:
        case "ci":
            return SiteMask(importance, 0.0)
        case "unmasked":
            return SiteMask(nothing, 1.0)
        case "stochastic":
            return SiteMask(importance, Draw(step.sampling), Draw() if step.delta else None)
        case "random":
            return SiteMask(nothing, Draw())
        case "rounded":
            return SiteMask((importance > rounding).to(importance.dtype), 0.0)
        case "zero":
            return SiteMask(nothing, 0.0)


def _nats(logits: Tensor, tokens: Tensor) -> Tensor:
    return next_token_losses(logits, tokens).double().sum()
