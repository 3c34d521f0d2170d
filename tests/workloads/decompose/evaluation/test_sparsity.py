"""Counts of importances, against numpy."""

import numpy as np
import pytest
import torch

from narrowcast.errors import RecipeError
from narrowcast.workloads.decompose.evaluation.sparsity import FiringCounts, grouped, l0


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
    assert np.allclose(counts.mean, everything.mean(axis=1))
    assert np.allclose(counts.largest, everything.max(axis=1))
    assert np.allclose(counts.l0, (everything > 0.1).sum(axis=2).mean(axis=1))
    assert np.allclose(counts.l0, l0(torch.from_numpy(everything), threshold=0.1))
    assert counts.alive().sum(dim=1).tolist() == [5, 5]
    often = (everything > 0.1).mean(axis=1) > 0.5
    assert counts.alive(density=0.5).tolist() == often.tolist()


def test_a_component_at_the_threshold_is_not_above_it():
    assert l0(torch.tensor([[[0.0, 0.5, 1.0]]])).tolist() == [2.0]
    assert l0(torch.tensor([[[0.0, 0.5, 1.0]]]), threshold=0.5).tolist() == [1.0]


def test_groups_are_sums_over_the_sites_they_match():
    by_site = {f"h.{n}.{part}": torch.tensor([10.0 * n, 1.0]) for n in (0, 1) for part in "qk"}
    sums = grouped(by_site, {"total": ["*"], "layer 1": ["h.1.*"], "q": ["h.0.q", "*.q"]})
    assert {name: value.tolist() for name, value in sums.items()} == {
        "total": [20.0, 4.0],
        "layer 1": [20.0, 2.0],
        "q": [10.0, 2.0],
    }


def test_a_group_of_no_site_is_refused():
    with pytest.raises(RecipeError, match=r"group mlp: \*\.mlp matches none of the sites h\.0\.q"):
        grouped({"h.0.q": torch.zeros(1)}, {"mlp": ["*.mlp"]})
