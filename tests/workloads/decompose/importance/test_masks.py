"""Routing, by counting."""

import pytest
import torch

from narrowcast.workloads.decompose.components.masked import Draw
from narrowcast.workloads.decompose.importance.masks import (
    fixed_route,
    routes,
    site_masks,
    uniform_k_subset,
)

SITES, SEEDS, ROWS = 3, 2, 5
IMPORTANCE = [torch.rand(SEEDS, ROWS, c) for c in (2, 3, 4)]


def test_a_subset_of_every_size_and_every_choice_is_as_likely():
    torch.manual_seed(0)
    rows = 60_000
    routed = uniform_k_subset(SITES, 1, rows, torch.device("cpu"))[:, 0]
    patterns = (routed.int() * torch.tensor([[1], [2], [4]])).sum(0).bincount(minlength=8) / rows
    chance = torch.tensor([0, 1 / 9, 1 / 9, 1 / 9, 1 / 9, 1 / 9, 1 / 9, 1 / 3])
    assert patterns[0] == 0  # at least one site
    assert (patterns[[1, 2, 4, 3, 5, 6, 7]] - chance[1:]).abs().max() < 5 * (0.25 / rows) ** 0.5


def test_rows_of_every_seed_are_drawn_by_themselves():
    (route,) = routes("uniform_k_subset", [torch.rand(2, 200, 2)] * 4)
    assert route.routed.shape == (4, 2, 200)
    assert not torch.equal(route.routed[:, 0], route.routed[:, 1])


def test_all_is_one_pass_with_every_site_everywhere():
    (route,) = routes("all", IMPORTANCE)
    assert (route.active, route.routed, route.copies) == ((0, 1, 2), None, 1)


def test_layerwise_is_a_pass_for_each_site():
    found = routes("layerwise", IMPORTANCE)
    assert [route.active for route in found] == [(0,), (1,), (2,)]
    masks = site_masks(found[1], IMPORTANCE, [Draw()] * 3, [None] * 3)
    assert masks[0] is None
    assert masks[2] is None
    assert masks[1].importance is IMPORTANCE[1]


def test_batched_layerwise_routes_each_copy_of_the_batch_to_one_site():
    (route,) = routes("layerwise", IMPORTANCE, batched=True)
    assert route.copies == SITES
    by_copy = route.routed.unflatten(2, (SITES, ROWS))
    for site in range(SITES):
        for copy in range(SITES):
            assert by_copy[site, :, copy].all() == (site == copy)
            assert by_copy[site, :, copy].any() == (site == copy)
    shared, own = torch.rand(SEEDS, 1, 3), torch.rand(SEEDS, ROWS)
    mask = site_masks(route, IMPORTANCE, [shared] * 3, [own] * 3)[1]
    assert mask.source is shared
    assert torch.equal(mask.delta, torch.cat([own] * 3, 1))
    assert torch.equal(mask.importance, torch.cat([IMPORTANCE[1]] * 3, 1))


@pytest.mark.parametrize("probability", [0.2, 0.9])
def test_a_static_probability_is_that_of_each_site(probability):
    torch.manual_seed(0)
    (route,) = routes("static_probability", [torch.rand(1, 20_000, 1)] * 2, probability=probability)
    assert (route.routed.float().mean((1, 2)) - probability).abs().max() < 5 * 0.5 / 20_000**0.5


def test_a_fixed_route_has_copies_for_all_sites_and_for_each_alone():
    route = fixed_route(["all", "layerwise"], IMPORTANCE)
    assert route.copies == 1 + SITES
    by_copy = route.routed.unflatten(2, (route.copies, ROWS))
    for site in range(SITES):
        expected = [True, *(site == other for other in range(SITES))]
        assert (by_copy[site] == torch.tensor(expected)[:, None]).all()


def test_a_fixed_route_is_made_once_and_can_be_trained_with_wherever_it_was_made():
    kept = {}
    with torch.inference_mode():
        first = fixed_route(["layerwise"], IMPORTANCE, saved=kept).routed
    assert not first.is_inference()
    assert fixed_route(["layerwise"], IMPORTANCE, saved=kept).routed is first
    fewer = fixed_route(["layerwise"], IMPORTANCE[:2], saved=kept).routed
    assert fewer.shape == (2, SEEDS, 2 * ROWS)
    assert fixed_route(["layerwise"], IMPORTANCE).routed is not first


@pytest.mark.gpu
def test_a_fixed_route_that_a_graph_has_made_is_not_kept():
    importance = [each.cuda() for each in IMPORTANCE]
    kept, graph = {}, torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        route = fixed_route(["all", "layerwise"], importance, saved=kept)
    assert not kept
    graph.replay()
    assert torch.equal(route.routed, fixed_route(["all", "layerwise"], importance).routed)
