"""What a model predicts of documents: losses and hits, summed over each."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import numpy as np
import torch
from torch import Tensor, nn

from narrowcast.training.evaluation import in_eval_mode
from narrowcast.workloads.sft.data.packing import IGNORED
from narrowcast.workloads.sft.ica.study.ablation import Level
from narrowcast.workloads.sft.ica.study.bootstrap import Sums

MOST_TOKENS = 2048
"""Of a batch: their logits over a large vocabulary are what memory goes to."""
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
    with in_eval_mode(model):
        matches = [_scored(model, batch, device) for batch in _batches(documents)]
    losses, hits, tokens = torch.cat(matches, 1).cpu().numpy()
    return Scores(losses=np.array(losses), hits=np.array(hits), tokens=np.array(tokens))


def learnt(document: Document) -> int:
    """Return how many tokens of a document are predicted."""
    return int((document["labels"][:, 1:] != IGNORED).sum())


def _batches(documents: Sequence[Document]) -> Iterator[dict[str, Tensor]]:
    """Put neighbours of one length together; nothing is filled up."""
    waiting: list[Document] = []
    for document in documents:
        length = document["input_ids"].shape[1]
        others = {each["input_ids"].shape[1] for each in waiting}
        if waiting and (others != {length} or (len(waiting) + 1) * length > MOST_TOKENS):
            yield _joined(waiting)
            waiting = []
        waiting.append(document)
    if waiting:
        yield _joined(waiting)


def _joined(documents: Sequence[Document]) -> dict[str, Tensor]:
    return {name: torch.cat([each[name] for each in documents]) for name in documents[0]}


def _scored(model: Any, batch: Document, device: torch.device) -> Tensor:
    """Return losses, hits and tokens of each document of a batch, (3, documents)."""
    settings = {name: each.to(device) for name, each in batch.items() if name != "labels"}
    labels = batch["labels"][:, 1:].to(device)
    logits = model(**settings, use_cache=False).logits[:, :-1].float()
    losses = nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=IGNORED
    ).view_as(labels)
    counted = labels != IGNORED
    hits = (logits.argmax(-1) == labels) & counted
    return torch.stack([each.double().sum(1) for each in (losses, hits, counted)])
