"""Toy models of superposition: what they learn, and that they are refused where they did not."""

import math
from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from narrowcast.errors import ConfigError
from narrowcast.workloads.decompose.targets.tms import TMS, tms_plan
from narrowcast.workloads.decompose.targets.toy import Pretraining, make_toy
from narrowcast.workloads.decompose.targets.toys import toy_target


@pytest.fixture(scope="module")
def learnt():
    return toy_target("tms_5-2", seeds=5, seed=0, device="cpu", steps=1500, batch_size=512)


def test_every_seed_learns_the_pentagon(learnt):
    with torch.no_grad():
        given = learnt.target(learnt.probe)
    assert (given.diagonal(dim1=1, dim2=2) - 0.75).abs().max() < 0.1
    weight = learnt.target.linear1.weight  # (seeds, 2, 5)
    norms = weight.norm(dim=1)
    assert 1.10 < norms.min() <= norms.max() < 1.17
    # Five directions in a plane are furthest from one another 72 degrees apart.
    angles = torch.atan2(weight[:, 1], weight[:, 0]).sort(dim=1).values
    between = torch.diff(angles, append=angles[:, :1] + 2 * math.pi)
    assert (between - 2 * math.pi / 5).abs().max() < 0.1
    # Seeds are networks of their own.
    assert (angles[0] - angles[1]).abs().max() > 1e-3


def test_none_of_many_networks_drops_a_feature():
    # What begins three times larger, at a quarter of the learning rate, drops one in 9 of 96.
    toy = toy_target("tms_5-2", seeds=64, seed=1, device="cpu", steps=800, batch_size=128)
    with torch.no_grad():
        given = toy.target(toy.probe)
    assert (given.diagonal(dim1=1, dim2=2) - 0.75).abs().max() < 0.1


def test_the_target_is_frozen_and_its_two_layers_are_one_matrix(learnt):
    target = learnt.target
    assert not any(parameter.requires_grad for parameter in target.parameters())
    assert torch.equal(target.linear2.weight, target.linear1.weight.mT)
    assert dict(learnt.tied) == {"linear2": "linear1"}
    x = learnt.draw(16)
    weight, bias = target.linear1.weight, target.linear2.bias
    for seed in range(5):
        by_hand = torch.relu(x[seed] @ weight[seed].T @ weight[seed] + bias[seed])
        assert torch.allclose(target(x)[seed], by_hand, atol=1e-6)


def test_the_same_seed_gives_the_same_target_and_leaves_other_randomness_alone():
    before = torch.random.get_rng_state()
    plan = replace(
        tms_plan(5, 2),
        pretraining=Pretraining(steps=20, batch_size=64, lr=5e-3),
        check=lambda network, draw: None,
    )
    first, again = (
        make_toy(plan, seeds=2, seed=1, device="cpu").target.state_dict() for _ in range(2)
    )
    other = make_toy(plan, seeds=2, seed=2, device="cpu").target.state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first["linear1.weight"], other["linear1.weight"])
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_loss_it_learns_by_is_that_of_its_output():
    network = TMS(6, 3, identity=True, seeds=2, generator=torch.Generator().manual_seed(0))
    x = torch.rand(2, 10, 6)
    expected = (network(x) - x).square().mean((1, 2))
    assert torch.allclose(network.loss(x), expected, rtol=1e-5)


def test_an_identity_layer_changes_nothing():
    toy = toy_target("tms_5-2-id", seeds=1, seed=0, device="cpu", steps=800)
    x = toy.draw(32)
    hidden = toy.target.linear1(x)
    assert torch.equal(toy.target.hidden_layers[0](hidden), hidden)
    assert toy.truth["hidden_layers.0"].size == 2
    assert set(toy.sites) == {"linear1", "linear2", "hidden_layers.0"}


def test_a_network_that_was_not_trained_is_refused():
    with pytest.raises(
        ConfigError, match=r"tms_5-2 did not learn.*model.pretrain_steps=0.*a larger one"
    ):
        toy_target("tms_5-2", seeds=3, seed=0, device="cpu", steps=0)


def test_a_dead_network_is_refused(learnt):
    target = deepcopy(learnt.target)
    target.linear2.bias[3] = -10.0
    with pytest.raises(ConfigError, match=r"seed 3 of 5.*all outputs are 0"):
        learnt.check(target, learnt.draw)


def test_a_network_that_dropped_one_feature_is_refused(learnt):
    target = deepcopy(learnt.target)
    target.linear1.weight[1, :, 2] = 0
    target.linear2.weight[1, 2] = 0
    with pytest.raises(ConfigError, match=r"seed 1 of 5.*up to 1 of 5 features"):
        learnt.check(target, learnt.draw)


def test_an_unknown_toy_is_refused_with_what_there_is():
    with pytest.raises(ConfigError, match="tms_5-2"):
        toy_target("tms_5", seeds=1, seed=0, device="cpu")


def test_on_the_meta_device_only_shapes_count():
    toy = toy_target("tms_40-10", seeds=2, seed=0, device="meta")
    assert toy.target.linear1.weight.is_meta
    assert toy.target(toy.draw(4)).shape == (2, 4, 40)
