"""Heads: pools against torch on the real letters alone."""

import pytest
import torch

from narrowcast.errors import RecipeError
from narrowcast.workloads.genomics.models.heads import NextTokenHead, SequenceHead, TokenHead


@pytest.mark.parametrize("pool", ["mean", "max", "cls", "attention"])
def test_a_pool_sees_only_what_the_mask_shows(pool):
    torch.manual_seed(0)
    hidden, mask = torch.randn(2, 9, 8), torch.arange(9) < torch.tensor([[9], [4]])
    head = SequenceHead(8, 3, pool)
    logits = head(hidden, mask)
    assert logits.shape == (2, 3)
    torch.testing.assert_close(logits[:1], head(hidden[:1]))
    torch.testing.assert_close(logits[1:], head(hidden[1:, :4]))


def test_pools_are_those_of_torch():
    torch.manual_seed(0)
    hidden, mask = torch.randn(1, 9, 8), torch.arange(9)[None] < 4
    real = hidden[:, :4]
    torch.testing.assert_close(SequenceHead(8, 3, "mean").pooled(hidden, mask), real.mean(1))
    torch.testing.assert_close(SequenceHead(8, 3, "max").pooled(hidden, mask), real.amax(1))
    head = SequenceHead(8, 3, "attention")
    weights = (real @ head.query.weight[0]).softmax(1)
    torch.testing.assert_close(head.pooled(hidden, mask), torch.einsum("rl,rlw->rw", weights, real))


@pytest.mark.parametrize("pool", ["mean", "max", "cls", "attention"])
def test_every_parameter_receives_a_gradient(pool):
    torch.manual_seed(0)
    hidden = torch.randn(2, 9, 8)
    for head in (SequenceHead(8, 3, pool), TokenHead(8, 5), NextTokenHead(8, 12)):
        out = head(hidden)
        out.square().sum().backward()
        assert all(p.grad is not None and p.grad.any() for p in head.parameters())
    assert out.shape == (2, 9, 12)


def test_an_unknown_pool_is_refused():
    with pytest.raises(RecipeError, match="mean, max, cls, attention"):
        SequenceHead(8, 3, "sum")
