"""Heads: pools against torch on the real letters alone."""

from typing import get_args

import pytest
import torch

from narrowcast.errors import ConfigError
from narrowcast.workloads.genomics.models.heads import NextTokenHead, SequenceHead, TokenHead

Pool = ("mean", "max", "cls", "attention", "position")


@pytest.mark.parametrize("pool", get_args(Pool))
def test_a_pool_sees_only_what_the_mask_shows(pool):
    torch.manual_seed(0)
    hidden, mask = torch.randn(2, 9, 8), torch.arange(9) < torch.tensor([[9], [4]])
    head = SequenceHead(8, 3, pool, length=9)
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


def test_pooling_by_position_is_a_bilinear_form_that_knows_where_a_state_stood():
    torch.manual_seed(0)
    hidden, head = torch.randn(1, 9, 8), SequenceHead(8, 3, "position", length=9)
    place = head.position.weight.reshape(8, 9, 2)
    expected = (
        torch.einsum("olk,kw,rlw->ro", place, head.narrow.weight, hidden) + head.position.bias
    )
    torch.testing.assert_close(head.pooled(hidden), expected)
    assert not torch.allclose(head(hidden), head(hidden.flip(1)))
    # What a batch is filled up with beyond the last position changes nothing.
    filled = torch.cat([hidden, torch.randn(1, 3, 8)], 1)
    torch.testing.assert_close(head.pooled(filled, torch.arange(12)[None] < 9), expected)


def test_pooling_by_position_wants_to_know_how_many_there_are():
    with pytest.raises(ConfigError, match="Give length"):
        SequenceHead(8, 3, "position")


@pytest.mark.parametrize("pool", get_args(Pool))
def test_every_parameter_receives_a_gradient(pool):
    torch.manual_seed(0)
    hidden = torch.randn(2, 9, 8)
    for head in (SequenceHead(8, 3, pool, length=9), TokenHead(8, 5), NextTokenHead(8, 12)):
        out = head(hidden)
        out.square().sum().backward()
        assert all(p.grad is not None and p.grad.any() for p in head.parameters())
    assert out.shape == (2, 9, 12)
