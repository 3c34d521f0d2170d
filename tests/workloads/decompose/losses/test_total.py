"""The total of several terms, and which of them are parts of one pass."""

import pytest
import torch

from narrowcast.workloads.decompose.losses.total import KINDS, total

ONE = {"coefficient": 1.0}
ALL = ("stochastic", ONE)
LAYERWISE = ("stochastic", {"coefficient": 0.5, "routing": "layerwise", "batched": None})
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def build_losses(terms):
    return [KINDS[kind](**settings) for kind, settings in terms]


def test_the_total_is_a_sum_over_seeds_and_what_is_told_their_mean(network):
    step = network()
    losses = build_losses([("unmasked", {"coefficient": 2.0}), ("faithfulness", ONE)])
    everything, parts = total(losses, step)
    apart = [loss(step) for loss in losses]
    torch.testing.assert_close(everything, 2 * apart[0].sum() + apart[1].sum())
    assert parts == {
        loss.name: pytest.approx(value.mean().item(), rel=1e-14)
        for loss, value in zip(losses, apart, strict=True)
    }
    left_out, rest = total(losses, step, (0, 1))
    torch.testing.assert_close(left_out, apart[1].sum())
    assert list(rest) == ["faithfulness"]


def whole_importance(network, seeds):
    """Return a step whose masks are 1 whatever is drawn."""
    step = network(seeds=seeds, device=DEVICE, delta=False)
    for each in step.lower:
        torch.nn.init.ones_(each)
    return step


def counted(step):
    """Return a list that grows with every pass of the target."""
    passes = []
    step.decomposition.target.register_forward_hook(lambda *_: passes.append(None))
    return passes


@pytest.mark.interpreted
@pytest.mark.parametrize("seeds", [1, 2])
def test_terms_in_one_pass_are_those_of_a_pass_each(network, seeds):
    losses = build_losses([ALL, LAYERWISE, ("minimality", ONE)])
    step = whole_importance(network, seeds)
    expected = [loss(step) for loss in losses]
    weights = list(step.decomposition.components.parameters())
    apart = sum(a.coefficient * b.sum() for a, b in zip(losses, expected, strict=True))
    theirs = torch.autograd.grad(apart, weights)
    passes = counted(step)
    everything, parts = total(losses, step)
    assert len(passes) == 1
    ours = torch.autograd.grad(everything, weights)
    torch.testing.assert_close(everything, apart)
    assert list(parts) == ["stochastic", "stochastic_layerwise", "minimality"]
    for found, known in zip(parts.values(), expected, strict=True):
        torch.testing.assert_close(found, known.mean())
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-14)


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("terms", "passes"),
    [
        ([ALL, LAYERWISE], 1),
        ([ALL], 1),
        ([ALL, ("stochastic", {**LAYERWISE[1], "batched": False})], 3),  # as it was asked for
        ([("stochastic", {**ONE, "recompute": True}), LAYERWISE], 2),
        ([ALL, ("importance_masked", LAYERWISE[1])], 2),  # other masks
    ],
)
def test_only_terms_that_draw_alike_share_a_pass(network, terms, passes):
    step = network(device=DEVICE)
    made = counted(step)
    total(build_losses(terms), step)
    assert len(made) == passes


@pytest.mark.skipif(DEVICE == "cuda", reason="needs a device without kernels")
def test_without_kernels_every_term_makes_its_own_passes(network):
    step = network()
    made = counted(step)
    total(build_losses([ALL, LAYERWISE]), step)
    assert len(made) == 3


@pytest.mark.gpu
def test_a_captured_pass_of_several_terms_replays_with_new_draws(network):
    losses, step = build_losses([ALL, LAYERWISE]), network(device="cuda")
    weights = list(step.decomposition.components.parameters())

    def once():
        everything, parts = total(losses, step)
        return torch.autograd.grad(everything, weights), parts

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        once()
    torch.cuda.current_stream().wait_stream(side)
    assert len(step.decomposition.fixed) == 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grads, parts = once()
    found = []
    for _ in range(3):
        graph.replay()
        assert all(each.isfinite().all() for each in grads)
        found.append(tuple(each.item() for each in parts.values()))
    assert len(set(found)) == 3
