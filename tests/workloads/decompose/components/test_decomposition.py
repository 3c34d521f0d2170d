"""Passes through a target with components in it, against the target before they were put there."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

from narrowcast.errors import ConfigError
from narrowcast.workloads.decompose.components.decomposition import Decomposition
from narrowcast.workloads.decompose.components.masked import Draw, SiteMask
from narrowcast.workloads.decompose.components.sites import find_sites


class SeededLinear(nn.Module):
    """As the toys have them: a weight for each seed."""

    def __init__(self, seeds, d_in, d_out):
        super().__init__()
        self.seeds = seeds
        self.weight = nn.Parameter(torch.randn(seeds, d_out, d_in))
        self.bias = nn.Parameter(torch.randn(seeds, d_out))

    def forward(self, x):
        return torch.einsum("sbi,soi->sbo", x, self.weight) + self.bias[:, None]


class Mixed(nn.Module):
    """One of each kind."""

    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(11, 8)
        self.up = nn.Linear(8, 16)
        self.down = Conv1D(8, 16)

    def forward(self, tokens, fail=False):
        x = self.wte(tokens)
        hidden = F.gelu(self.up(x))
        if fail:
            raise ValueError("in the midst")
        return x + self.down(hidden)


TOKENS = torch.arange(10).reshape(2, 5)


def mixed(output=None):
    torch.manual_seed(0)
    target = Mixed()
    plain = copy.deepcopy(target)
    sites = find_sites(target, {"wte": 12, "up": 10, "down": 9}, {"down": 7})
    return plain, Decomposition(target, sites, output=output)


def masks(decomposition, rows, source, delta=None, routed=None):
    sites, seeds = decomposition.sites, decomposition.seeds
    return [
        SiteMask(torch.rand(seeds, rows, s.components).requires_grad_(), source, delta, routed)
        for s in sites
    ]


def test_without_masks_it_is_the_target_to_the_bit():
    plain, decomposition = mixed()
    assert torch.equal(decomposition(TOKENS).output, plain(TOKENS))
    assert torch.equal(decomposition.target(TOKENS), plain(TOKENS))


def test_with_every_component_and_what_they_leave_it_is_the_target():
    plain, decomposition = mixed()
    found = decomposition(TOKENS, masks=masks(decomposition, 10, 1.0, 1.0)).output
    torch.testing.assert_close(found, plain(TOKENS), rtol=0, atol=1e-5)


def test_rows_that_are_not_routed_and_sites_without_a_mask_are_the_targets():
    plain, decomposition = mixed()
    routed = torch.tensor([[True] * 5 + [False] * 5])
    found = decomposition(TOKENS, masks=masks(decomposition, 10, 0.0, None, routed)).output
    torch.testing.assert_close(found[1], plain(TOKENS)[1], rtol=0, atol=1e-5)
    assert (found[0] - plain(TOKENS)[0]).abs().max() > 0.1
    some = [None, None, None, masks(decomposition, 10, 0.0)[3]]
    seen = decomposition(TOKENS, masks=some, cache="inputs")
    own = decomposition(TOKENS, cache="inputs")
    assert all(torch.equal(a, b) for a, b in zip(seen.inputs, own.inputs, strict=True))


def test_inputs_and_activations_are_those_of_the_targets_modules():
    plain, decomposition = mixed()
    inputs = decomposition(TOKENS, cache="inputs").inputs
    acts = decomposition(TOKENS, cache="acts").acts
    x = plain.wte(TOKENS)
    hidden = F.gelu(plain.up(x)).reshape(1, 10, 16)
    assert torch.equal(inputs[0], TOKENS.reshape(1, 10))
    assert [site.name for site in decomposition.sites][2:] == ["down.pre_identity", "down"]
    assert torch.equal(inputs[1], x.reshape(1, 10, 8))
    assert torch.equal(inputs[2], hidden)
    assert torch.equal(inputs[3], hidden)
    parts = decomposition.components
    assert torch.equal(acts[0], parts["wte"].V[:, TOKENS.flatten()])
    torch.testing.assert_close(acts[3], hidden @ parts["down"].V)


def test_deltas_are_what_components_leave_of_the_weights_as_linear_layers_keep_them():
    plain, decomposition = mixed()
    weights = [plain.wte.weight.T, plain.up.weight, torch.eye(16), plain.down.weight.T]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        deltas = decomposition.deltas()
    for delta, weight, parts in zip(
        deltas, weights, decomposition.components.values(), strict=True
    ):
        torch.testing.assert_close(delta[0], weight - (parts.V[0] @ parts.U[0]).T)


def test_components_alone_are_trained():
    plain, decomposition = mixed()
    decomposition.train()
    trained = {name for name, p in decomposition.named_parameters() if p.requires_grad}
    assert trained == {
        f"components.{name}.{which}"
        for name in ("wte", "up", "down/pre_identity", "down")
        for which in "VU"
    }
    assert not decomposition.target.training
    assert decomposition.target.state_dict().keys() == plain.state_dict().keys()
    passed = decomposition(TOKENS, masks=masks(decomposition, 10, Draw(), Draw()))
    passed.output.square().sum().backward()
    assert all(p.grad.any() for p in decomposition.components.parameters())


def test_frozen_components_leave_gradients_to_the_masks():
    _, decomposition = mixed()
    given = masks(decomposition, 10, 0.5)
    decomposition(TOKENS, masks=given, frozen=True).output.sum().backward()
    assert all(p.grad is None for p in decomposition.parameters())
    assert all(mask.importance.grad.any() for mask in given)


def test_components_begin_with_the_variances_of_their_inputs():
    decomposition = Decomposition(
        target := nn.ModuleDict({"it": nn.Linear(100, 50)}), find_sites(target, {"it": 400})
    )
    parts = decomposition.components["it"]
    # Five standard errors of a variance of n normal numbers: sqrt(2 / n) of it.
    assert parts.V.var().item() * 100 == pytest.approx(1, abs=5 * (2 / parts.V.numel()) ** 0.5)
    assert parts.U.var().item() * 400 == pytest.approx(1, abs=5 * (2 / parts.U.numel()) ** 0.5)


def seeded(seeds=3, tied=None):
    torch.manual_seed(0)
    target = nn.Sequential(SeededLinear(seeds, 5, 2), SeededLinear(seeds, 2, 5))
    plain = copy.deepcopy(target)
    sites = find_sites(target, {"0": 20, "1": 20})
    return plain, Decomposition(target, sites, seeds=seeds, tied=tied)


def test_seeds_side_by_side_are_each_their_own():
    plain, decomposition = seeded()
    x = torch.randn(3, 6, 5)
    torch.testing.assert_close(decomposition(x).output, plain(x))
    full = masks(decomposition, 6, 1.0, 1.0)
    torch.testing.assert_close(decomposition(x, masks=full).output, plain(x), rtol=0, atol=1e-4)
    out = decomposition(x, masks=masks(decomposition, 6, 0.3)).output
    (grad,) = torch.autograd.grad(out[1].sum(), decomposition.components["0"].V)
    assert grad[1].any()
    assert not grad[[0, 2]].any()


def test_tied_sites_share_one_parameter_each():
    _, decomposition = seeded(tied={"1": "0"})
    assert [n for n, _ in decomposition.components.named_parameters()] == ["0.V", "0.U"]
    one, two = decomposition.components["0"], decomposition.components["1"]
    assert torch.equal(two.V, one.U.mT)
    assert torch.equal(two.U, one.V.mT)
    assert set(decomposition.components.state_dict()) == {"0.V", "0.U"}
    x = torch.randn(3, 6, 5)
    decomposition(x, masks=[None, masks(decomposition, 6, 0.5)[1]]).output.sum().backward()
    assert one.V.grad.any()
    assert one.U.grad.any()


@pytest.mark.parametrize(
    ("tied", "said"),
    [
        ({"0": "2"}, "tied must name sites .* got 2"),
        ({"1": "0", "0": "1"}, "itself tied"),
        ({"0": "0"}, "itself tied"),
    ],
)
def test_ties_that_cannot_be_are_refused(tied, said):
    with pytest.raises(ConfigError, match=said):
        seeded(tied=tied)


def test_a_tie_of_matrices_that_are_not_transposes_is_refused():
    target = nn.Sequential(nn.Linear(5, 2), nn.Linear(2, 4))
    sites = find_sites(target, {"*": 6})
    with pytest.raises(ConfigError, match="is not the transpose of"):
        Decomposition(target, sites, tied={"1": "0"})


def test_a_masked_pass_compiles_without_a_break():
    _, decomposition = mixed()
    given = masks(decomposition, 10, 0.25, 0.5, torch.rand(1, 10) < 0.5)
    plainly = decomposition(TOKENS, masks=given, cache="inputs")
    compiled = torch.compile(decomposition, fullgraph=True, backend="aot_eager")
    found = compiled(TOKENS, masks=given, cache="inputs")
    torch.testing.assert_close(found.output, plainly.output)
    torch.testing.assert_close(found.inputs[3], plainly.inputs[3])
    found.output.sum().backward()
    assert given[0].importance.grad.any()


def test_nothing_is_left_of_a_pass_that_failed():
    plain, decomposition = mixed()
    with pytest.raises(ValueError, match="in the midst"):
        decomposition(TOKENS, fail=True, masks=masks(decomposition, 10, 0.0))
    assert torch.equal(decomposition.target(TOKENS), plain(TOKENS))
    assert decomposition(TOKENS).inputs == []


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_pass_that_is_computed_again_draws_the_same_and_has_the_same_gradients(reentrant):
    _, decomposition = mixed()
    given = masks(decomposition, 10, Draw(), Draw())
    # A reentrant checkpoint differentiates only where something that it is given wants it.
    wants = torch.zeros((), requires_grad=True)

    def out(zero):
        return decomposition(TOKENS, masks=given).output.square().sum() + zero

    def grads(loss):
        loss.backward()
        found = [p.grad.clone() for p in decomposition.components.parameters()]
        decomposition.zero_grad()
        return found

    torch.manual_seed(1)
    kept = grads(out(wants))
    torch.manual_seed(1)
    again = grads(checkpoint(out, wants, use_reentrant=reentrant))
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))


class Once(nn.Module):
    def __init__(self, times):
        super().__init__()
        self.it, self.times = nn.Linear(4, 4), times

    def forward(self, x, **kwargs):
        for _ in range(self.times):
            x = self.it(x, **kwargs)
        return x


@pytest.mark.parametrize(
    ("times", "kwargs", "said"),
    [
        (0, {}, "does not call it"),
        (2, {}, "calls it more than once"),
        (1, {"more": torch.ones(1)}, "with 2 arguments"),
    ],
)
def test_a_target_that_calls_a_site_otherwise_is_refused(times, kwargs, said):
    target = Once(times)
    decomposition = Decomposition(target, find_sites(target, {"it": 3}))
    with pytest.raises(ConfigError, match=said):
        decomposition(torch.ones(2, 4), masks=[SiteMask(torch.ones(1, 2, 3), 0.0)], **kwargs)


def test_a_site_may_be_called_by_keyword():
    class ByName(Once):
        def forward(self, x):
            return self.it(input=x)

    target = ByName(1)
    expected = target(torch.ones(2, 4))
    decomposition = Decomposition(target, find_sites(target, {"it": 3}))
    assert torch.equal(decomposition(torch.ones(2, 4)).output, expected)


def test_masks_and_inputs_of_other_shapes_are_refused():
    _, decomposition = mixed()
    with pytest.raises(ConfigError, match="masks must be one per site, got 3 for 4"):
        decomposition(TOKENS, masks=[None] * 3)
    with pytest.raises(ConfigError, match=r"wte must have shape \(1, 10, 12\) .*got \(1, 9, 12\)"):
        decomposition(TOKENS, masks=masks(decomposition, 9, 0.0))
    _, several = seeded()
    with pytest.raises(ConfigError, match=r"must be 3 seeds, got"):
        several(torch.ones(4, 6, 5), cache="inputs")
    with pytest.raises(ConfigError, match=r"seeds must be 3 .*, got 1"):
        Decomposition(target := seeded()[0], find_sites(target, {"0": 4}))


@pytest.mark.parametrize("output", ["logits", "idx_0", lambda raw: raw.logits])
def test_a_language_model_of_transformers_is_taken_apart_with_its_tied_weights(output):
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=50, n_positions=16)
    target = GPT2LMHeadModel(config).eval()
    tokens = torch.randint(0, 50, (2, 8))
    expected = target(tokens).logits.detach()
    patterns = {"transformer.h.*.attn.c_attn": 40, "transformer.wte": 50, "lm_head": 50}
    sites = find_sites(target, patterns)
    decomposition = Decomposition(target, sites, output=output)
    assert torch.equal(decomposition(tokens).output, expected)
    everything = masks(decomposition, 16, 1.0, 1.0)
    found = decomposition(input_ids=tokens, masks=everything).output
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert target.lm_head.weight is target.transformer.wte.weight


def test_an_output_that_is_no_tensor_is_refused():
    _, decomposition = mixed(output="logits")
    with pytest.raises(ConfigError, match="such as logits, or idx_0"):
        decomposition(TOKENS)
