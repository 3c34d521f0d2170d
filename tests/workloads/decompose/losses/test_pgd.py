"""Projected gradient ascent by hand, and against one written out."""

from fractions import Fraction

import pytest
import torch

from narrowcast.workloads.decompose.components.masked import SiteMask
from narrowcast.workloads.decompose.losses.adversary import PGD, step_form
from narrowcast.workloads.decompose.losses.penalties import Faithfulness

MEAN_SQUARE = 5 / 2
BOTH = (6 - 0.25) ** 2


@pytest.mark.parametrize("scope", ["shared", "per_datapoint"])
def test_where_more_is_better_the_worst_is_to_take_away_all_that_is_not_important(numbers, scope):
    # y = x (2 m1 + d1)(m2 + d2) never exceeds 6 x: a step of 1 takes every source to 0.
    loss = PGD(coefficient=1.0, step_size=1.0, scope=scope)
    assert loss(numbers()).tolist() == [BOTH * MEAN_SQUARE]


def test_sources_begin_where_they_are_told(numbers):
    ones, zeroes = (PGD(coefficient=1.0, init=init) for init in ("ones", "zeroes"))
    assert ones(numbers()).tolist() == [0.0]  # the target itself: no slope, and no step
    assert zeroes(numbers()).tolist() == [BOTH * MEAN_SQUARE]


@pytest.mark.parametrize("ascents", [1, 2, 5])
def test_each_ascent_moves_sources_by_the_step_and_not_beyond_0(numbers, ascents):
    loss = PGD(coefficient=1.0, init="ones", step_size=0.25)
    s = max(1 - ascents * Fraction(1, 4), Fraction(0))
    y = 2 * (Fraction(1, 2) + s / 2) * (Fraction(1, 4) + s * 3 / 4)
    expected = float((6 - y) ** 2) * MEAN_SQUARE
    assert loss(numbers(delta=False), ascents).item() == pytest.approx(expected, rel=1e-14)


def written_out(step, *, rows, ascents, size, begun):
    """PGD over all sites with autograd through everything, each seed by a loop of its own."""
    losses = []
    for seed in range(2):
        values = [begun(rows, c) for c in (6, 7, 1, 1)]
        for last in [False] * ascents + [True]:
            leaves = [each.clone().requires_grad_(not last) for each in values]
            everywhere = [each.expand(2, *each.shape) for each in leaves]
            masks = [
                SiteMask(step.lower[site], everywhere[site], everywhere[site + 2][..., 0])
                for site in (0, 1)
            ]
            made = step.decomposition(*step.args, masks=masks).output
            loss = (made - step.target)[seed].square().mean()
            if not last:
                grads = torch.autograd.grad(loss, leaves)
                values = [
                    (value + size * grad.sign()).clamp(0, 1).detach()
                    for value, grad in zip(values, grads, strict=True)
                ]
        losses.append(loss)
    return torch.stack(losses)


@pytest.mark.parametrize(("scope", "rows"), [("shared", 1), ("per_datapoint", 6)])
def test_pgd_is_the_ascent_written_out_for_each_seed_with_its_gradients(network, scope, rows):
    found = []
    for ours in (True, False):
        step = network()
        wanted = [*step.decomposition.components.parameters(), *step.lower]
        if ours:
            loss = PGD(coefficient=1.0, init="zeroes", step_size=0.3, scope=scope)(step, 3)
        else:
            loss = written_out(
                step, rows=rows, ascents=3, size=0.3, begun=lambda *s: torch.zeros(*s).double()
            )
        found.append([loss, *torch.autograd.grad(loss.sum(), wanted)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("scope", ["shared", "per_datapoint"])
def test_batched_layerwise_is_looped_layerwise_with_its_gradients(network, scope):
    found = []
    for batched in (True, False):
        step = network()
        loss = PGD(
            coefficient=1.0, routing="layerwise", batched=batched, init="zeroes", scope=scope
        )(step, 2)
        wanted = [*step.decomposition.components.parameters(), *step.lower]
        found.append([loss, *torch.autograd.grad(loss.sum(), wanted)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)


def test_more_ascents_do_more_harm_also_where_nobody_wants_a_gradient(network):
    step, loss = network(), PGD(coefficient=1.0, init="zeroes", step_size=0.1)
    with torch.no_grad():
        few, many = loss(step, 1), loss(step, 10)
    assert (many > few).all()
    assert not many.requires_grad


def leaves(node, found):
    """Collect what a backward pass from `node` accumulates gradients of."""
    if node is not None:
        if type(node).__name__ == "AccumulateGrad":
            found.add(id(node.variable))
        for after, _ in node.next_functions:
            leaves(after, found)
    return found


def test_an_ascent_computes_no_gradient_but_that_of_sources(network):
    step = network()
    source = torch.rand(2, 1, 6, dtype=torch.float64, requires_grad=True)
    trained = {id(each) for each in (step.lower[0], *step.decomposition.components.parameters())}
    passed = {}
    for each in (step, step.hold()):
        masks = [SiteMask(each.lower[0], source), SiteMask(each.lower[1].detach(), 0.0)]
        passed[each.held] = leaves(each.masked(masks).output.grad_fn, set())
    assert passed == {False: trained | {id(source)}, True: {id(source)}}


def test_a_pass_computed_again_has_the_same_gradients(network):
    found = []
    for recompute in (True, False):
        step = network()
        loss = PGD(coefficient=1.0, init="zeroes", step_size=0.3, recompute=recompute)(step, 2)
        wanted = [*step.decomposition.components.parameters(), *step.lower]
        found.append([loss, *torch.autograd.grad(loss.sum(), wanted)])
    assert all(map(torch.equal, *found))


def test_the_budget_is_smaller_early_and_spent_only_at_every_kth_step():
    pgd = PGD(coefficient=1.0, steps=20, early_steps=4, early_until=0.5, every=2)
    losses = [Faithfulness(coefficient=1.0), pgd]
    forms = [step_form(losses, step, 8) for step in range(8)]
    assert forms == [(1, 4), (1, 0), (1, 4), (1, 0), (1, 20), (1, 0), (1, 20), (1, 0)]
