"""Residual networks of toy features: their algebra, and what they learn."""

import pytest
import torch

from narrowcast.errors import ConfigError
from narrowcast.workloads.decompose.targets.resid_mlp import ResidMLP
from narrowcast.workloads.decompose.targets.toy import Pretraining, SparseFeatures, pretrain
from narrowcast.workloads.decompose.targets.toys import toy_plan, toy_target


def network(layers, *, features=12, width=200, neurons=8):
    generator = torch.Generator().manual_seed(0)
    return ResidMLP(features, width, neurons, layers, seeds=2, generator=generator)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_the_form_it_is_trained_in_is_its_forward(layers):
    net = network(layers).double()
    x = torch.randn(2, 30, 12, dtype=torch.float64)
    assert torch.allclose(net.folded(x), net(x), rtol=0, atol=1e-12)
    expected = (net(x) - x - x.clamp(min=0)).square().mean((1, 2))
    assert torch.allclose(net.loss(x), expected, rtol=1e-12)


def test_one_layer_by_hand():
    net = network(1).double()
    x = torch.randn(2, 30, 12, dtype=torch.float64)
    embedding, layer = net.embedding, net.layers[0]
    assert torch.allclose(embedding.norm(dim=-1), torch.ones(2, 12, dtype=torch.float64))
    for seed in range(2):
        residual = x[seed] @ embedding[seed]
        hidden = torch.relu(residual @ layer.mlp_in.weight[seed].T)
        residual = residual + hidden @ layer.mlp_out.weight[seed].T
        assert torch.allclose(net(x)[seed], residual @ embedding[seed].T)


def test_training_halves_the_error_of_a_network_that_adds_nothing():
    net = network(2)
    data = SparseFeatures(features=12, probability=0.05, low=-1.0)
    generator = torch.Generator().manual_seed(1)

    def draw(batch):
        return data.draw(2, batch, device="cpu", generator=generator)

    embedding = net.embedding.clone()
    pretrain(net, draw, Pretraining(steps=200, batch_size=256, lr=3e-3, schedule="cosine"))
    x = draw(4096)
    nothing = x.clamp(min=0).square().mean((1, 2))
    assert (net.loss(x) < nothing / 2).all()
    assert torch.equal(net.embedding, embedding)


def test_a_network_that_was_not_trained_is_refused():
    with pytest.raises(ConfigError, match=r"resid_mlp1 did not learn.*up to 100 of 100"):
        toy_target("resid_mlp1", seeds=1, seed=0, device="cpu", steps=0)


def test_a_little_training_is_enough_to_be_taken():
    toy = toy_target("resid_mlp1", seeds=1, seed=0, device="cpu", steps=300, batch_size=512)
    with torch.no_grad():
        given = toy.target(toy.probe)[0].diagonal()
    assert (given > 1.0).all()


@pytest.mark.parametrize(("layers", "neurons"), [(1, 50), (2, 25), (3, 17)])
def test_what_is_known_of_each_site_is_said(layers, neurons):
    truth = toy_plan(f"resid_mlp{layers}").truth
    assert len(truth) == 2 * layers
    last = layers - 1
    assert truth[f"layers.{last}.mlp_in"].kind == "identity"
    assert (truth[f"layers.{last}.mlp_out"].kind, truth[f"layers.{last}.mlp_out"].size) == (
        "dense",
        neurons,
    )
