"""Counts of importances, against numpy."""

import numpy as np
import torch

from narrowcast.workloads.decompose.judging import FiringCounts


def test_counts_over_batches_are_those_of_all_positions_together():
    generator = torch.Generator().manual_seed(0)
    batches = [torch.rand(2, n, 6, generator=generator) - 0.3 for n in (5, 11, 1)]
    batches = [batch.clamp(min=0) * (torch.arange(6) > 0) for batch in batches]
    counts = FiringCounts(2, 6, threshold=0.1, device="cpu")
    for batch in batches:
        counts.add(batch)
    everything = torch.cat(batches, dim=1).numpy()
    assert counts.positions == 17
    assert np.allclose(counts.density, (everything > 0.1).mean(axis=1))
    assert np.allclose(counts.l0, (everything > 0.1).sum(axis=2).mean(axis=1))
    assert counts.alive.tolist() == (everything > 0.1).any(axis=1).tolist()
    assert counts.alive.sum(dim=1).tolist() == [5, 5]


def test_a_component_at_the_threshold_is_not_above_it():
    counts = FiringCounts(1, 3, threshold=0.5, device="cpu")
    counts.add(torch.tensor([[[0.0, 0.5, 1.0]]]))
    assert counts.l0.tolist() == [1.0]
