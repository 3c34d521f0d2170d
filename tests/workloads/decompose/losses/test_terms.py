"""What holds for every term: seeds are apart, and nothing waits for the device."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from narrowcast.errors import UnsupportedError
from narrowcast.workloads.decompose.losses.total import KINDS, total

ONE = {"coefficient": 1.0}
TERMS = {
    **{kind: (kind, ONE) for kind in KINDS},
    "minimality": ("minimality", {**ONE, "p": 2.0}),  # at 1 the slope is the same everywhere
    "annealed": ("minimality", {**ONE, "p": 2.0, "p_final": 0.5, "beta": 0.5}),
    "layerwise": ("stochastic", {**ONE, "routing": "layerwise"}),
    "batched": ("stochastic", {**ONE, "routing": "layerwise", "batched": True}),
    "subset": ("stochastic", {**ONE, "routing": "uniform_k_subset"}),
    "static": ("importance_masked", {**ONE, "routing": "static_probability", "probability": 0.5}),
    "pgd_layerwise": ("pgd", {**ONE, "routing": "layerwise"}),
    "pgd_subset": ("pgd", {**ONE, "routing": "uniform_k_subset", "scope": "per_datapoint"}),
    "persistent_subset": ("persistent_pgd", {**ONE, "routing": "uniform_k_subset"}),
}


def build_losses(terms):
    return [KINDS[kind](**settings) for kind, settings in terms]


def prepared(network, term, **settings):
    step = network(**settings)
    losses = build_losses([{**TERMS, **RECOMPUTED}[term]])
    if losses[0].kind == "persistent_pgd":
        state = losses[0].sources(
            step.decomposition.sites, seeds=step.seeds, rows=step.rows, length=1, delta=True
        )
        step.state[losses[0].name] = state.to(step.target.dtype).to(step.target.device)
    return step, losses


def leaves(step):
    return [*step.decomposition.components.parameters(), *step.lower]


def descended(step, losses, form=(2,)):
    """One backward pass of the step, as training makes it."""
    everything, parts = total(losses, step, form)
    everything.backward()
    for state in step.state.values():
        state.ascend()
    return parts


@pytest.mark.parametrize("divergence", ["mse", "kl"])
@pytest.mark.parametrize("term", TERMS)
def test_what_one_seed_is_given_changes_nothing_for_another(network, term, divergence):
    found = []
    for changed in (False, True):
        step, losses = prepared(network, term, divergence=divergence)
        if changed:
            with torch.no_grad():
                step.args[0][0] += 1.0
                step.target[0] += 0.5
                for each in leaves(step):
                    each[0] *= 0.9
        torch.manual_seed(5)
        descended(step, losses)
        grads = [each.grad for each in leaves(step) if each.grad is not None]
        state = [each for kept in step.state.values() for each in kept.buffers() if each.dim()]
        found.append([*grads, *state])
    assert any(not torch.equal(one[0], other[0]) for one, other in zip(*found, strict=True))
    # A batch of products may be summed in another order when other numbers stand beside them.
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one[1], other[1], rtol=1e-13, atol=1e-15)


class NoWaiting(TorchDispatchMode):
    """Refuses whatever would wait on a GPU: numbers read, and sizes that depend on numbers."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket.__name__ not in ("_local_scalar_dense", "nonzero", "is_nonzero")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("term", TERMS)
def test_a_term_reads_no_number_from_the_device(network, term):
    step, losses = prepared(network, term)
    with NoWaiting():
        parts = descended(step, losses)
    assert list(parts) == [losses[0].name]


def test_a_step_without_adversaries_is_compiled_whole(network):
    step = network(divergence="kl")
    chosen = ["faithfulness", "minimality", "importance_masked", "unmasked"]
    losses = build_losses([TERMS[each] for each in chosen])
    # The compiler's first half: what it cannot trace whole it would refuse.
    compiled = torch.compile(lambda: total(losses, step)[0], fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(), total(losses, step)[0])


@pytest.mark.parametrize("term", TERMS)
def test_a_term_in_bf16_is_near_the_one_in_fp32(language, term):
    found = []
    for narrow in (False, True):
        step, losses = prepared(language, term)
        torch.manual_seed(5)
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            parts = descended(step, losses)
        found.append(next(iter(parts.values())))
        assert all(each.grad is None or each.grad.dtype == torch.float32 for each in leaves(step))
    # Signs of small gradients may differ, and so which sources an ascent finds.
    torch.testing.assert_close(*found, rtol=0.5 if "pgd" in term else 0.1, atol=0.0)


RECOMPUTED = {
    "recomputed": ("stochastic", {**ONE, "recompute": True}),
    "recomputed_subset": (
        "stochastic",
        {**ONE, "recompute": True, "routing": "uniform_k_subset"},
    ),
    "recomputed_pgd": ("pgd", {**ONE, "recompute": True}),
}
CONSTANT = ("faithfulness", "minimality", "smooth_l0", "importance_masked", "unmasked", "annealed")
SEARCHED = ("pgd", "pgd_layerwise", "recomputed_pgd")
"""Where sources end up may, but need not, depend on where they began."""


def captured(step, losses):
    """A graph of one backward pass, and where it leaves the term."""

    def once():
        for each in leaves(step):
            each.grad = None
        return descended(step, losses)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            once()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        parts = once()
    return graph, next(iter(parts.values()))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["network", "language"])
@pytest.mark.parametrize("term", [*TERMS, *RECOMPUTED])
def test_a_captured_step_replays_with_new_draws(request, term, kind):
    if kind == "network" and term in ("recomputed", "recomputed_subset"):
        kind = "language"  # float64 draws without a kernel, and is refused
    step, losses = prepared(request.getfixturevalue(kind), term, device="cuda")
    graph, value = captured(step, losses)
    found = []
    for _ in range(3):
        graph.replay()
        found.append(value.item())
    assert all(map(math.isfinite, found))
    if term not in SEARCHED:
        assert (len(set(found)) == 1) == (term in CONSTANT)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch's, of one that was refused
def test_what_cannot_be_drawn_again_inside_a_graph_is_refused(network):
    step, losses = prepared(network, "recomputed", device="cuda")
    with pytest.raises(UnsupportedError, match="cannot be drawn again"):
        captured(step, losses)
