"""Reconstruction by hand: y = 2 (3 x) with components 2 and 1, importances 1/2 and 1/4."""

import pytest
import torch
import torch.nn.functional as F

from narrowcast.workloads.decompose.components.masked import SiteMask
from narrowcast.workloads.decompose.losses.reconstruction import (
    HiddenActivations,
    ImportanceMasked,
    Stochastic,
    Unmasked,
)

MEAN_SQUARE = (1 + 4) / 2  # of the two rows
BOTH, FIRST, SECOND = (6 - 2 / 2 / 4) ** 2, (6 - 2 * 2 / 2) ** 2, (6 - 3 / 4) ** 2


def test_all_components_without_the_rest_of_the_weights(numbers):
    assert Unmasked(coefficient=1.0)(numbers()).tolist() == [(6 - 2) ** 2 * MEAN_SQUARE]


@pytest.mark.parametrize("delta", [True, False])
def test_masks_of_importances_leave_out_what_components_leave(numbers, delta):
    found = ImportanceMasked(coefficient=1.0)(numbers(delta=delta))
    assert found.tolist() == [BOTH * MEAN_SQUARE]


@pytest.mark.parametrize("batched", [True, False])
def test_layerwise_is_the_mean_of_passes_with_one_site_each(numbers, batched):
    loss = ImportanceMasked(coefficient=1.0, routing="layerwise", batched=batched)
    assert loss(numbers()).tolist() == [(FIRST + SECOND) / 2 * MEAN_SQUARE]


def test_subsets_have_a_number_of_sites_drawn_evenly_and_sites_drawn_evenly(numbers):
    torch.manual_seed(0)
    rows = 40_000
    step = numbers(x=(1.0,) * rows)
    found = ImportanceMasked(coefficient=1.0, routing="uniform_k_subset")(step).item()
    # One site with chance 1/2, either of them; both with chance 1/2.
    mean = BOTH / 2 + (FIRST + SECOND) / 4
    square = BOTH**2 / 2 + (FIRST**2 + SECOND**2) / 4
    assert abs(found - mean) < 5 * ((square - mean**2) / rows) ** 0.5


def test_a_static_probability_chooses_each_site_by_itself(numbers):
    torch.manual_seed(0)
    rows, p = 40_000, 0.3
    step = numbers(x=(1.0,) * rows)
    loss = ImportanceMasked(coefficient=1.0, routing="static_probability", probability=p)
    found = loss(step).item()
    chances = {BOTH: p * p, FIRST: p * (1 - p), SECOND: p * (1 - p)}  # neither: no error
    mean = sum(value * chance for value, chance in chances.items())
    square = sum(value**2 * chance for value, chance in chances.items())
    assert abs(found - mean) < 5 * ((square - mean**2) / rows) ** 0.5


@pytest.mark.parametrize(
    ("sampling", "delta", "mean"),
    [
        # (3 - 2 s - d)² for s and d even in [0, 1], or s of 0 and 1: the square of the mean, and
        # the variances, 4/12 or 4/4, and 1/12.
        ("continuous", True, 1.5**2 + 4 / 12 + 1 / 12),
        ("binomial", True, 1.5**2 + 1 + 1 / 12),
        ("continuous", False, 2.0**2 + 4 / 12),
    ],
)
def test_what_is_not_important_takes_part_at_random(numbers, sampling, delta, mean):
    torch.manual_seed(0)
    rows = 40_000
    step = numbers((1.0,) * rows, importance=(0.0, 1.0), sampling=sampling, delta=delta)
    # Only the first site: with importance 1 and a faithful component the second is the target.
    torch.nn.init.constant_(list(step.decomposition.components.parameters())[3], 2.0)
    found = Stochastic(coefficient=1.0)(step).item() / 2**2
    assert abs(found - mean) < 5 * (3**2 / 2) / rows**0.5  # errors lie between 0 and 3²


def test_draws_are_new_for_every_term(numbers):
    step, loss = numbers(), Stochastic(coefficient=1.0)
    assert loss(step).item() != loss(step).item()


def test_what_is_important_and_faithful_is_reconstructed_whatever_is_drawn(numbers):
    step = numbers(importance=(1.0, 1.0))
    for parameter, value in zip(
        step.decomposition.components.parameters(), (1, 3, 1, 2), strict=True
    ):
        torch.nn.init.constant_(parameter, value)
    for routing in ("all", "layerwise", "uniform_k_subset"):
        assert Stochastic(coefficient=1.0, routing=routing)(step).item() < 1e-28


def test_kl_compares_the_logits_of_rows(network):
    step = network(divergence="kl")
    masks = [SiteMask(g, 0.0) for g in step.lower]
    made = step.decomposition(*step.args, masks=masks).output
    found = ImportanceMasked(coefficient=1.0)(step)
    for seed in range(2):
        pair = made[seed].log_softmax(-1), step.target[seed].log_softmax(-1)
        expected = F.kl_div(*pair, reduction="batchmean", log_target=True)
        torch.testing.assert_close(found[seed], expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("divergence", ["mse", "kl"])
def test_batched_layerwise_is_looped_layerwise_with_its_gradients(network, divergence):
    found = []
    for batched in (True, False):
        step = network(divergence=divergence)
        loss = ImportanceMasked(coefficient=1.0, routing="layerwise", batched=batched)(step)
        wanted = [*step.decomposition.components.parameters(), *step.lower]
        found.append([loss, *torch.autograd.grad(loss.sum(), wanted)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)


def test_copies_of_texts_are_routed_each_to_one_site(language):
    found = []
    for batched in (True, False):
        loss = ImportanceMasked(coefficient=1.0, routing="layerwise", batched=batched)
        found.append(loss(language()))
    torch.testing.assert_close(*found, rtol=1e-5, atol=0)


def test_hidden_activations_are_compared_where_sites_are_given_them(numbers):
    # The first site is given x, and never wrong; the second 3 x (1/2 2 + 1/2 2 s + d) / 3.
    step = numbers(importance=(1.0, 1.0), delta=False)  # the first makes 2 x of 3 x
    found = HiddenActivations(coefficient=1.0)(step)
    assert found.tolist() == [(3 - 2) ** 2 * MEAN_SQUARE / 2]  # a mean over two sites


def test_hidden_activations_use_those_that_the_step_has_kept(numbers):
    kept = [torch.zeros(1, 2, 1, dtype=torch.float64)] * 2
    step = numbers(importance=(1.0, 1.0), delta=False, inputs=kept)
    found = HiddenActivations(coefficient=1.0)(step)
    assert found.tolist() == [(1 + 2**2) * MEAN_SQUARE / 2]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (Stochastic, {}),
        (Stochastic, {"routing": "layerwise"}),
        (Stochastic, {"routing": "uniform_k_subset"}),
        (ImportanceMasked, {"routing": "uniform_k_subset"}),
        (Unmasked, {}),
        (HiddenActivations, {}),
    ],
)
def test_passes_computed_again_have_the_same_draws_and_gradients(network, kind, settings):
    found = []
    for recompute in (True, False):
        step = network()
        torch.manual_seed(1)
        loss = kind(coefficient=1.0, recompute=recompute, **settings)(step)
        torch.rand(3)  # draws in between must not change those of the second pass
        wanted = [*step.decomposition.components.parameters(), *step.lower]
        found.append([loss, *torch.autograd.grad(loss.sum(), wanted, materialize_grads=True)])
    assert all(map(torch.equal, *found))


@pytest.mark.interpreted
def test_kernels_draw_the_same_when_a_pass_is_computed_again(language):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = []
    for recompute in (True, False):
        step = language(device=device)
        torch.manual_seed(1)
        loss = Stochastic(coefficient=1.0, recompute=recompute)(step)
        wanted = [*step.decomposition.components.parameters(), *step.lower]
        found.append([loss, *torch.autograd.grad(loss.sum(), wanted)])
    assert all(map(torch.equal, *found))


def test_a_pass_computed_again_keeps_fewer_numbers(network):
    kept = {}
    for recompute in (True, False):
        step, sizes = network(rows=100), []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, sizes=sizes: sizes.append(x.numel()) or x, lambda x: x
        ):
            Stochastic(coefficient=1.0, recompute=recompute)(step)
        kept[recompute] = sum(sizes)
    assert kept[True] < kept[False] / 4
