"""The network begins as the last movement, learns what its run shows, and resumes bit for bit."""

import copy

import pytest
import torch

from narrowcast.errors import CheckpointError, RecipeError
from narrowcast.strategies.hybrid.jumps.history import WeightHistory
from narrowcast.strategies.hybrid.jumps.network import NetworkSettings, WeightNetwork

CPU = torch.device("cpu")
SMALL = NetworkSettings(context=2, width=8, updates=8, sample=256, lr=0.01)


def network(settings=SMALL):
    return WeightNetwork(settings, device=CPU)


def test_a_straight_line_goes_on_before_anything_is_learnt(history_of, randn):
    slope = [randn(6, 5), randn(4)]
    history = history_of(lambda t: [t * b for b in slope], 4)
    for delta, b in zip(network().predict(history, ahead_steps=25), slope, strict=True):
        assert torch.allclose(delta, 2.5 * b, rtol=1e-5, atol=1e-5)


def test_it_learns_a_decay_that_a_line_overshoots(history_of, randn):
    size = randn(400)
    way = lambda t: [0.7**t * size]  # noqa: E731
    learner, history = network(), history_of(way, 1, most=8)
    for time in range(1, 12):
        history.take(time * 10, way(time))
        learner.observe(history)
    truth = way(13)[0] - way(11)[0]
    learnt = (learner.predict(history, ahead_steps=20)[0] - truth).norm()
    untaught = (network().predict(history, ahead_steps=20)[0] - truth).norm()
    assert learnt < 0.5 * untaught


def test_it_learns_from_a_snapshot_once(history_of, randn):
    history = history_of(lambda t: [0.7**t * torch.ones(50)], 5)
    learner = network()
    learner.observe(history)
    before = learner.state_dict()["parameters"]
    learner.observe(history)
    assert all(map(torch.equal, learner.state_dict()["parameters"], before))


def test_weights_at_rest_stay_at_rest_also_for_who_has_learnt(history_of, randn):
    size = randn(50)
    learner = network()
    learner.observe(history_of(lambda t: [0.7**t * size], 5))
    resting = history_of(lambda _: [torch.ones(50)], 5)
    learner.observe(resting)
    assert not learner.predict(resting, ahead_steps=30)[0].any()


def test_a_resumed_network_learns_on_bit_for_bit(history_of, randn):
    size = randn(300)
    way = lambda t: [0.7**t * size]  # noqa: E731
    first, history = network(), history_of(way, 5, most=8)
    first.observe(history)
    second = network()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    history.take(50, way(5))
    for learner in (first, second):
        learner.observe(history)
    one, other = (n.predict(history, ahead_steps=20)[0] for n in (first, second))
    assert torch.equal(one, other)


def test_nobody_elses_random_numbers_are_drawn(history_of):
    before = torch.get_rng_state()
    learner = network()
    learner.observe(history_of(lambda t: [0.7**t * torch.ones(50)], 5))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_network_of_another_size_is_refused():
    with pytest.raises(CheckpointError, match="another context or width than 2 and 8"):
        network().load_state_dict(network(NetworkSettings(width=4)).state_dict())


def test_too_few_snapshots_are_refused(history_of):
    history = history_of(lambda t: [torch.ones(2) * t], 2)
    with pytest.raises(RecipeError, match="network was asked with 2 snapshots and needs 3"):
        network().predict(history, ahead_steps=10)


def test_movements_kept_in_bf16_are_enough(history_of, randn):
    slope = randn(40)
    history: WeightHistory = history_of(lambda t: [t * slope], 4, keep="bf16")
    (delta,) = network().predict(history, ahead_steps=10)
    assert torch.allclose(delta, slope, rtol=2**-7, atol=1e-6)
