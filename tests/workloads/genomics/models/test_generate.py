"""Continuations: against a model whose next letter is known, and against chances of torch."""

import pytest
import torch
from torch import nn

from narrowcast.workloads.genomics.models.config import GenomicConfig
from narrowcast.workloads.genomics.models.heads import NextTokenHead
from narrowcast.workloads.genomics.models.model import GenomicModel, choose, generate

CHANCES = torch.tensor([0.1, 0.4, 0.2, 0.3])


def drawn(**how):
    logits = CHANCES.log().expand(20_000, 4)
    chosen = choose(logits, generator=torch.Generator().manual_seed(0), **how)
    return torch.bincount(chosen[:, 0], minlength=4) / len(chosen)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({}, CHANCES),
        ({"temperature": 0.0}, torch.tensor([0.0, 1.0, 0.0, 0.0])),
        ({"temperature": 0.5}, CHANCES.square() / CHANCES.square().sum()),
        ({"top_k": 2}, torch.tensor([0.0, 4 / 7, 0.0, 3 / 7])),
        ({"top_p": 0.6}, torch.tensor([0.0, 4 / 7, 0.0, 3 / 7])),
        ({"top_p": 0.3}, torch.tensor([0.0, 1.0, 0.0, 0.0])),
        ({"top_k": 3, "top_p": 0.5}, torch.tensor([0.0, 4 / 7, 0.0, 3 / 7])),
    ],
)
def test_letters_are_drawn_by_their_chances(how, expected):
    # Four deviations of a share of 20,000 draws.
    torch.testing.assert_close(drawn(**how), expected, rtol=0, atol=4 * 0.5 / 20_000**0.5)


@pytest.mark.parametrize("patching", ["none", "entropy"])
def test_a_continuation_is_what_the_model_scores_highest(patching):
    torch.manual_seed(0)
    config = GenomicConfig(vocab_size=8, width=32, max_length=64, causal=True, patching=patching)
    model, head = GenomicModel(config), NextTokenHead(32, 8)
    start = torch.randint(3, 7, (2, 5))
    found = generate(model, head, start, count=9, temperature=0.0)
    assert torch.equal(found[:, :5], start)
    with torch.no_grad():
        scored = head(model(found[:, :-1])).argmax(-1)
    assert torch.equal(found[:, 5:], scored[:, 4:])


def test_only_allowed_letters_are_drawn_and_the_mode_is_put_back():
    class Count(nn.Module):
        def forward(self, tokens):
            assert not self.training
            return nn.functional.one_hot((tokens + 1) % 8, 8).float()

    model, head = Count(), nn.Identity()
    found = generate(model, head, torch.tensor([[3]]), count=4, allowed=torch.tensor([3, 4, 5]))
    assert set(found.flatten().tolist()) <= {3, 4, 5}
    assert model.training
    counted = generate(model, head, torch.tensor([[3]]), count=4, temperature=0.0)
    assert counted.tolist() == [[3, 4, 5, 6, 7]]
