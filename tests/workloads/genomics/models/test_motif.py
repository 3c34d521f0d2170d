"""Motif networks: padding, windows, gradients and where filters start."""

import pytest
import torch

from narrowcast.errors import ConfigError
from narrowcast.workloads.genomics.models.config import GenomicConfig
from narrowcast.workloads.genomics.models.motif import MotifModel

VOCABULARY, LETTERS = 12, 4


def model_of(**fields):
    torch.manual_seed(0)
    shape = {"width": 8, "layers": 2, "max_length": 40, "kernel": 5, "pooling": 4}
    config = GenomicConfig(vocab_size=VOCABULARY, backbone="motif", **{**shape, **fields})
    return MotifModel(config, LETTERS).double().eval()


def tokens_of(rows, length):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(VOCABULARY - LETTERS, VOCABULARY, (rows, length), generator=generator)


@pytest.mark.parametrize("pooling", [1, 3, 4])
@pytest.mark.parametrize("length", [17, 24])
def test_hidden_states_do_not_depend_on_padding(pooling, length):
    model, tokens = model_of(pooling=pooling), tokens_of(2, length)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    alone, own = model(tokens, mask), model.pooled_mask(mask)
    padded = torch.nn.functional.pad(tokens, (0, 15))
    wide = torch.nn.functional.pad(mask, (0, 15))
    states, real = model(padded, wide), model.pooled_mask(wide)
    assert own.all()
    assert real.sum(1).tolist() == own.sum(1).tolist()
    torch.testing.assert_close(states[real], alone[own])
    assert (states[~real] == 0).all()


def test_only_letters_in_the_window_are_read():
    model, tokens = model_of(window_start=4, window_end=20), tokens_of(1, 40)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    other = tokens.clone()
    other[:, :4], other[:, 20:] = 8, 8
    assert torch.equal(model(tokens, mask), model(other, mask))
    assert model(tokens, mask).shape == (1, 4, 8)


def test_special_tokens_are_no_letters():
    model, tokens = model_of(), tokens_of(1, 16)
    states = [model(tokens.index_fill(1, torch.tensor([3]), n), tokens > 0) for n in (1, 7)]
    assert torch.equal(*states)


def test_every_parameter_gets_a_gradient():
    model, tokens = model_of(), tokens_of(2, 40)
    model(tokens, tokens > 0).square().sum().backward()
    stages = {p for stage in model.stages() for p in stage.parameters()}
    assert stages == set(model.parameters())
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


def test_a_filter_starts_at_its_kmer():
    model = model_of(kernel=9)
    with torch.no_grad():
        model.filters.weight.zero_()
    model.start_from([[0, 1, 2, 3]])
    matched = model.filters.weight[0].argmax(0)[2:6]
    assert matched.tolist() == [0, 1, 2, 3]
    assert model.filters.weight[1:].abs().sum() == 0


def test_a_window_that_ends_before_it_starts_raises():
    with pytest.raises(ConfigError, match="window_start"):
        model_of(window_start=9, window_end=4)
