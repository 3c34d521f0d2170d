"""Transformers of two attention layers that look up what followed a token when it last came.

begin a b ... S M c d ... S  ->  M
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from narrowcast.workloads.decompose.targets.toy import (
    Pretraining,
    SeededLinear,
    ToyPlan,
    check_accuracy,
)

LAYERS = 2
LEAST_ACCURACY = 0.95
"""Of a trained transformer, which is nearly always right; one that guesses is in 1 of 64 cases."""


@final
@dataclass(frozen=True, kw_only=True)
class InductionRows:
    """Rows of tokens: `ordinary` of them, then the one that begins a row, then S."""

    ordinary: int
    length: int

    @property
    def vocabulary(self) -> int:
        return self.ordinary + 2

    def draw(
        self,
        seeds: int,
        batch: int,
        *,
        device: torch.device | str,
        generator: Generator | None = None,
    ) -> Tensor:
        shape, begin, marker = (seeds, batch, self.length), self.ordinary, self.ordinary + 1
        rows = torch.randint(self.ordinary, shape, device=device, generator=generator)
        # After it comes the answer, and the last place is S again.
        at = torch.randint(1, self.length - 2, (*shape[:2], 1), device=device, generator=generator)
        rows.scatter_(2, at, marker)
        rows[..., 0] = begin
        rows[..., -1] = marker
        return rows

    def answers(self, rows: Tensor) -> Tensor:
        """Return the token (seeds, batch) that followed S."""
        at = (rows[..., :-1] == self.ordinary + 1).int().argmax(dim=2, keepdim=True)
        return rows.gather(2, at + 1).squeeze(2)


@final
class AttentionHead(nn.Module):
    """What one head adds to the stream; only its queries and keys know where they are."""

    def __init__(self, seeds: int, width: int, *, device: torch.device) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            SeededLinear(seeds, width, width, device=device) for _ in range(4)
        )

    def forward(self, stream: Tensor, positions: Tensor) -> Tensor:
        placed = stream + positions
        gathered = F.scaled_dot_product_attention(
            self.q_proj(placed), self.k_proj(placed), self.v_proj(stream), is_causal=True
        )
        added: Tensor = self.o_proj(gathered)
        return added


@final
class InductionTransformer(nn.Module):
    """One transformer per seed that predicts the next token."""

    def __init__(
        self, rows: InductionRows, width: int, *, seeds: int, generator: Generator
    ) -> None:
        super().__init__()
        device = generator.device
        self.rows, self.seeds = rows, seeds
        self.embed = nn.Parameter(torch.empty(seeds, rows.vocabulary, width, device=device))
        self.positions = nn.Parameter(torch.empty(seeds, 1, rows.length, width, device=device))
        self.blocks = nn.ModuleList(
            AttentionHead(seeds, width, device=device) for _ in range(LAYERS)
        )
        self.unembed = SeededLinear(seeds, width, rows.vocabulary, device=device)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(0, 1 / math.sqrt(width), generator=generator)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (seeds, batch, vocabulary) of tokens (seeds, batch, length)."""
        vocabulary, width = self.embed.shape[1:]
        own = torch.arange(self.seeds, device=tokens.device)[:, None, None] * vocabulary
        stream = F.embedding(tokens + own, self.embed.view(-1, width))
        for block in self.blocks:
            stream = stream + block(stream, self.positions)
        logits: Tensor = self.unembed(stream[:, :, -1])
        return logits

    def learnt(self) -> list[nn.Parameter]:
        return list(self.parameters())

    def loss(self, tokens: Tensor) -> Tensor:
        wrong = F.cross_entropy(
            self(tokens).flatten(0, 1), self.rows.answers(tokens).flatten(), reduction="none"
        )
        return wrong.view(self.seeds, -1).mean(dim=1)

    def settle(self) -> None:
        """Nothing follows from what was trained."""

    def accuracy(self, tokens: Tensor) -> Tensor:
        right = torch.eq(self(tokens).argmax(dim=2), self.rows.answers(tokens))
        return right.double().mean(dim=1)


def induction_plan() -> ToyPlan:
    """Return the plan of the published transformer."""
    return plan_for(InductionRows(ordinary=64, length=32), width=16, steps=600)


def plan_for(rows: InductionRows, *, width: int, steps: int) -> ToyPlan:
    """Return the plan of a transformer for other rows and widths."""
    name = "induction"

    def build(seeds: int, generator: Generator) -> nn.Module:
        return InductionTransformer(rows, width, seeds=seeds, generator=generator)

    def check(network: nn.Module, draw: Callable[[int], Tensor]) -> None:
        assert isinstance(network, InductionTransformer)
        check_accuracy(name, accuracy=network.accuracy(draw(1024)), least=LEAST_ACCURACY)

    return ToyPlan(
        name=name,
        build=build,
        data=rows,
        pretraining=Pretraining(steps=steps, batch_size=128, lr=1e-2, schedule="cosine"),
        check=check,
        sites={"blocks.*.*_proj": 100},
        divergence="kl",
        length=rows.length,
    )
