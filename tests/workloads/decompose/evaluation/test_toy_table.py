"""A toy that is decomposed by hand, and rightly; and what is said where it is not."""

import pytest
import torch

from narrowcast.workloads.decompose.components.decomposition import Decomposition
from narrowcast.workloads.decompose.components.sites import find_sites
from narrowcast.workloads.decompose.evaluation.toy_table import toy_table
from narrowcast.workloads.decompose.targets.tms import TMS, tms_plan


@pytest.fixture
def right():
    """Components that are the columns of W, in both seeds, and as many of nothing."""
    target = TMS(5, 2, identity=True, seeds=2, generator=torch.Generator().manual_seed(0))
    weight = target.linear1.weight.detach().clone()
    plan = tms_plan(5, 2, identity=True)
    sites = find_sites(target, dict.fromkeys(plan.sites, 10))
    decomposition = Decomposition(target, sites, seeds=2, tied=plan.tied)
    pairs = dict(zip((site.name for site in sites), decomposition.components.values(), strict=True))
    with torch.no_grad():
        for name in ("linear1", "hidden_layers.0"):
            pairs[name].V.zero_()
            pairs[name].U.zero_()
        pairs["linear1"].V[:, :, :5] = torch.eye(5)
        pairs["linear1"].U[:, :5] = weight.mT
        pairs["hidden_layers.0"].V[:, :, :2] = torch.eye(2)
        pairs["hidden_layers.0"].U[:, :2] = torch.eye(2)
    one_each = torch.eye(5, 10).repeat(2, 1, 1)
    dense = torch.zeros(2, 5, 10)
    dense[:, :, :2] = 1.0
    by_site = {"linear1": one_each, "linear2": one_each, "hidden_layers.0": dense}
    return decomposition, [by_site[site.name].clone() for site in sites], plan.truth


def test_a_right_decomposition_has_no_error(right):
    table = toy_table(*right)
    assert set(table) == {"linear1", "linear2", "hidden_layers.0"}
    for site in table.values():
        assert site.errors.tolist() == [0, 0]
    assert {name: site.alive.tolist() for name, site in table.items()} == {
        "linear1": [5, 5],
        "linear2": [5, 5],
        "hidden_layers.0": [2, 2],
    }
    for name in ("linear1", "linear2"):
        assert table[name].least_cosine.tolist() == pytest.approx([1.0, 1.0], abs=1e-5)
        assert table[name].norm_ratio.tolist() == pytest.approx([1.0, 1.0], abs=1e-5)
    assert table["hidden_layers.0"].least_cosine is None


def test_one_seed_that_is_wrong_does_not_touch_the_other(right):
    decomposition, importance, truth = right
    names = [site.name for site in decomposition.sites]
    importance[names.index("linear1")][1, 0] = 0.0  # nothing is needed for feature 0
    table = toy_table(decomposition, importance, truth)
    assert table["linear1"].errors.tolist() == [0, 1]
    assert table["linear1"].alive.tolist() == [5, 4]
    # What is left there is no component of feature 0 at all.
    assert table["linear1"].least_cosine.tolist() == pytest.approx([1.0, 0.0], abs=1e-5)
    assert table["linear1"].norm_ratio.tolist() == pytest.approx([1.0, 0.8], abs=1e-5)
