"""A byte model's doubt against that of a source whose entropy is known."""

import math
import time

import pytest
import torch

from narrowcast.workloads.genomics.models.patches import ByteLM, threshold_for, train_byte_lm


def source(letters, *, seed=0):
    """Every third letter is one of four by chance; the two after it repeat it."""
    chance = torch.randint(4, (letters // 3,), generator=torch.Generator().manual_seed(seed))
    return chance.repeat_interleave(3) + 2


def test_learns_in_seconds_where_a_source_is_open():
    tokens = source(30_000)
    began = time.process_time()
    generator = torch.Generator().manual_seed(0)
    model = train_byte_lm(tokens, vocab_size=6, generator=generator, steps=100, rows=4)
    assert time.process_time() - began < 20
    entropy = model.entropy(source(600, seed=1)[None])[0, 60:].view(-1, 3).mean(0)
    # Two bits, then none; it has to count letters to know which comes next.
    assert entropy[0] > 1.7
    assert entropy[1:].max() < 0.6
    assert not any(buffer.requires_grad for buffer in model.buffers())
    assert list(model.parameters()) == []


def test_entropy_is_that_of_torch_and_of_letters_before_alone():
    torch.manual_seed(0)
    model = ByteLM(6).double()
    tokens = torch.randint(6, (2, 40))
    entropy = model.entropy(tokens)
    spread = torch.distributions.Categorical(logits=model(tokens))
    torch.testing.assert_close(entropy[:, 1:], spread.entropy()[:, :-1] / math.log(2))
    changed = tokens.clone()
    changed[:, 20:] = 5 - changed[:, 20:]
    torch.testing.assert_close(model.entropy(changed)[:, :21], entropy[:, :21])


@pytest.mark.parametrize("size", [2, 4, 7.5])
def test_a_threshold_for_patches_of_a_size_leaves_as_many_letters_above_it(size):
    entropy = torch.rand(4, 5000, generator=torch.Generator().manual_seed(0))
    above = (entropy > threshold_for(entropy, patch_size=size)).float().mean()
    assert above.item() == pytest.approx(1 / size, abs=1e-3)
