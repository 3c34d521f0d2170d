"""Sparse features against the distribution they are said to have."""

import pytest
import torch
from scipy import stats

from narrowcast.workloads.decompose.targets.toy import SparseFeatures


@pytest.mark.parametrize(("probability", "low"), [(0.05, 0.0), (0.01, -1.0), (1.0, -1.0)])
def test_features_are_there_with_their_probability_and_then_uniform(probability, low):
    data = SparseFeatures(features=50, probability=probability, low=low)
    generator = torch.Generator().manual_seed(0)
    x = data.draw(2, 4000, device="cpu", generator=generator)
    assert x.shape == (2, 4000, 50)
    there = x[x != 0]
    assert stats.binomtest(there.numel(), x.numel(), probability).pvalue > 1e-4
    assert stats.kstest(there.numpy(), stats.uniform(low, 1 - low).cdf).pvalue > 1e-4
    # Neither seeds nor features are copies of one another: a copy correlates by 1.
    correlation = torch.corrcoef(x.permute(0, 2, 1).flatten(0, 1)).fill_diagonal_(0)
    assert correlation.abs().max() < 0.5


def test_a_generator_of_its_own_leaves_the_process_generator_alone():
    data = SparseFeatures(features=5, probability=0.05)
    before = torch.random.get_rng_state()
    first, again = (
        data.draw(1, 64, device="cpu", generator=torch.Generator().manual_seed(3)) for _ in range(2)
    )
    assert torch.equal(first, again)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.gpu
def test_a_captured_draw_is_another_one_each_time():
    data = SparseFeatures(features=5, probability=0.5)
    data.draw(1, 64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x = data.draw(1, 64, device="cuda")
    drawn = []
    for _ in range(2):
        graph.replay()
        drawn.append(x.clone())
    assert not torch.equal(*drawn)
