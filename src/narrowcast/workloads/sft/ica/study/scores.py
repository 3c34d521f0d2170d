"""What a model predicts of documents: losses and hits, summed over each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import numpy as np
import torch
from torch import Tensor, nn

from narrowcast.workloads.sft.ica.capture import evaluating
from narrowcast.workloads.sft.ica.study.ablation import Level
from narrowcast.workloads.sft.ica.study.bootstrap import Sums

IGNORED = -100
"""The label that torch's cross-entropy leaves out."""
Document: TypeAlias = Mapping[str, Tensor]
"""`input_ids` and `labels`, (1, tokens) each: a label is the token at its own place."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Scores:
    """Sums over the tokens of each document, (documents)."""

    losses: Sums
    hits: Sums
    tokens: Sums

    @property
    def level(self) -> Level:
        """All documents together."""
        count = self.tokens.sum()
        return Level(loss=float(self.losses.sum() / count), accuracy=float(self.hits.sum() / count))


@torch.no_grad()
def score(model: nn.Module, documents: Sequence[Document]) -> Scores:
    """Return how well a model predicts documents, each by itself. Waits for the device."""
    device = next(model.parameters()).device
    with evaluating(model):
        found = [_scored(model, document, device) for document in documents]
    losses, hits, tokens = torch.stack(found).double().cpu().numpy().T
    return Scores(losses=np.array(losses), hits=np.array(hits), tokens=np.array(tokens))


def learnt(document: Document) -> int:
    """Return how many tokens of a document are predicted."""
    return int((document["labels"][:, 1:] != IGNORED).sum())


def _scored(model: Any, document: Document, device: torch.device) -> Tensor:
    given = {name: each.to(device) for name, each in document.items() if name != "labels"}
    labels = document["labels"][:, 1:].to(device).flatten()
    logits = model(**given, use_cache=False).logits[:, :-1].flatten(0, 1)
    counted = labels != IGNORED
    logits, labels = logits[counted].float(), labels[counted]
    losses = nn.functional.cross_entropy(logits, labels, reduction="none").double()
    hits = (logits.argmax(-1) == labels).double()
    return torch.stack([losses.sum(), hits.sum(), counted.double().sum()])
