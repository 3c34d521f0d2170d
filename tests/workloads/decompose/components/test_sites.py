"""Sites are found by name; what is no matrix, or named twice or not at all, is refused."""

import pytest
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from transformers.pytorch_utils import Conv1D

from narrowcast.errors import ConfigError
from narrowcast.workloads.decompose.components.sites import Site, find_sites


class Scaled(nn.Embedding):
    def forward(self, tokens):
        return 2 * super().forward(tokens)


def target():
    block = {"c_fc": Conv1D(12, 8), "out": nn.Linear(12, 8, bias=False), "norm": nn.LayerNorm(8)}
    blocks = nn.ModuleList([nn.ModuleDict(block), nn.ModuleDict({"c_fc": Conv1D(12, 8)})])
    return nn.ModuleDict({"wte": nn.Embedding(20, 8), "h": blocks})


def test_sites_are_in_the_targets_order_with_their_widths():
    found = find_sites(target(), {"h.*.c_fc": 9, "wte": 30, "h.0.out": 4}, {"h.1.*": 3})
    assert found == [
        Site("wte", "embedding", 20, 8, 30, bias=False),
        Site("h.0.c_fc", "conv1d", 8, 12, 9, bias=True),
        Site("h.0.out", "linear", 12, 8, 4, bias=False),
        Site("h.1.c_fc.pre_identity", "identity", 8, 8, 3, bias=False),
        Site("h.1.c_fc", "conv1d", 8, 12, 9, bias=True),
    ]


@pytest.mark.parametrize(
    ("patterns", "identities", "said"),
    [
        (
            {"h.*.fc": 4},
            {},
            "'h.*.fc' matches no module of the target. Its matrices are wte, h.*.c_fc, h.*.out.$",
        ),
        ({"wte": 4}, {"nothing": 4}, "'nothing' matches no module"),
        ({"h.0.*": 4}, {}, "got h.0.norm, a LayerNorm"),
        ({"h.0": 4}, {}, "got h.0, a ModuleDict"),
        ({"h.0.c_fc": 4, "*.c_fc": 4}, {}, "h.0.c_fc matches both 'h.0.c_fc' and"),
        ({"wte": 0}, {}, "components of wte, a 20 x 8 matrix, must"),
        ({"wte": 513}, {}, "between 1 and 512"),
        ({}, {"wte": 4}, "wte is an embedding"),
        ({}, {}, "No sites are named"),
    ],
)
def test_what_cannot_be_meant_is_refused(patterns, identities, said):
    with pytest.raises(ConfigError, match=said.replace("*", r"\*")):
        find_sites(target(), patterns, identities)


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (Scaled(5, 4), "got it, a Scaled"),
        (nn.Embedding(5, 4, max_norm=1.0), "without max_norm"),
        (nn.Conv1d(4, 4, 1), "got it, a Conv1d"),
        (weight_norm(nn.Linear(4, 4)), "got it, a ParametrizedLinear"),
    ],
)
def test_a_module_that_does_more_than_apply_its_matrix_is_refused(module, said):
    with pytest.raises(ConfigError, match=said):
        find_sites(nn.ModuleDict({"it": module}), {"it": 2})


def test_a_module_with_two_names_or_with_hooks_is_refused():
    shared = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match="one and two are one module"):
        find_sites(nn.ModuleDict({"one": shared, "two": shared}), {"one": 2})
    shared.register_forward_hook(lambda *_: None)
    with pytest.raises(ConfigError, match="has hooks"):
        find_sites(nn.ModuleDict({"one": shared}), {"one": 2})
