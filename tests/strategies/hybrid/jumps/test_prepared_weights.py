"""A trial leaves a prepared model as it was, bit for bit, however its weights are kept."""

import copy

import pytest
import torch

from narrowcast.errors import RecipeError
from narrowcast.precision.nested import tensors_in
from narrowcast.strategies.hybrid.jumps.prepared_weights import PreparedWeights
from narrowcast.strategies.hybrid.jumps.verify import Trial

POLICIES = {
    "fp32": "fp32",
    "bf16 compute": "bf16,params=fp32",
    "split": "bf16,params=bf16,master=split",
    "fp32 master": "bf16,params=bf16,master=fp32",
    "kahan": "bf16,params=bf16,master=kahan",
    "stochastic": "bf16,params=bf16,master=stochastic",
    "none": "bf16,params=bf16,master=none",
}


def bits(run):
    """Return all tensors of a run's state, as they are."""
    return [t.detach().clone() for t in tensors_in(run.state_dict())]


def same(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.fixture(params=POLICIES.values(), ids=POLICIES.keys())
def policy(request):
    return request.param


def jump(access, randn, scale=1.0):
    deltas = [0.1 * randn(*w.shape) for w in access.read()]
    with Trial(access, deltas) as trial:
        trial.jump(scale)


def test_a_rolled_back_trial_leaves_no_trace(prepared, train, randn, policy):
    run = train(prepared(policy, ema_decay=0.9), 3)
    before = bits(run)
    access = PreparedWeights(run)
    jump(access, randn)
    assert same(bits(run), before)


def test_steps_after_a_rolled_back_trial_are_those_without_it(prepared, train, randn, policy):
    tried, plain = train(prepared(policy), 3), None
    random_state = torch.get_rng_state()
    access = PreparedWeights(tried)
    with access.aside():
        jump(access, randn)
        with tried.compute(), torch.no_grad():
            tried.model(torch.randn(8, 16))  # draws, drops out, and moves the batch norm
    assert torch.equal(torch.get_rng_state(), random_state)
    train(tried, 2, first=3)
    plain = train(prepared(policy), 5)
    assert same(bits(tried), bits(plain))


def test_inside_a_trial_the_model_has_moved(prepared, train, randn, policy):
    access = PreparedWeights(train(prepared(policy), 2))
    start = [w.clone() for w in access.read()]
    deltas = [0.1 * randn(*w.shape) for w in start]
    with Trial(access, deltas) as trial:
        trial.jump(1)
        for now, then, delta in zip(access.read(), start, deltas, strict=True):
            assert torch.allclose(now, then + delta, rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize("kept", ["fp32", "bf16 compute", "split", "fp32 master"])
def test_all_digits_that_are_written_are_read(prepared, train, randn, kept):
    access = PreparedWeights(train(prepared(POLICIES[kept]), 2))
    values = [randn(*w.shape) for w in access.read()]
    access.write(values)
    assert all(map(torch.equal, access.read(), values))


def test_a_kept_jump_keeps_moments_and_the_next_step_goes_from_there(prepared, train, randn):
    run = train(prepared("bf16,params=bf16,master=split"), 3)
    moments = copy.deepcopy(run.optimizer.state_dict()["state"])
    access = PreparedWeights(run)
    landed = [w + 0.1 for w in access.read()]
    with Trial(access, [torch.full_like(w, 0.1) for w in landed]) as trial:
        trial.jump(1)
        trial.keep()
    assert same(list(tensors_in(run.optimizer.state_dict()["state"])), list(tensors_in(moments)))
    train(run, 1, first=3)
    moved = [float((a - b).abs().max()) for a, b in zip(access.read(), landed, strict=True)]
    assert 0 < max(moved) < 0.05  # a step of Adam with a rate of 0.01


@pytest.mark.parametrize("policy", ["fp32", "bf16,moments=int8"])
@pytest.mark.parametrize("fused", [True, None])
def test_moments_that_are_reset_begin_anew(prepared, train, policy, fused):
    run = train(prepared(policy, fused_optimizer=fused), 3)
    access = PreparedWeights(run)
    exact = access.snapshot(with_moments=True)
    before = bits(run)
    access.reset_moments()
    assert not any(t.any() for t in tensors_in(run.optimizer.state_dict()["state"]))
    access.restore(exact)
    assert same(bits(run), before)
    access.reset_moments()
    assert all(t.isfinite().all() for t in access.read())
    assert all(t.isfinite().all() for t in PreparedWeights(train(run, 2)).read())


def test_a_state_that_may_be_no_moment_is_not_reset(prepared, train):
    run = train(prepared("fp32", optimizer="adagrad"), 2)
    before = bits(run)
    with pytest.raises(RecipeError, match=r"the optimizer keeps `sum`, .* write moments=keep"):
        PreparedWeights(run).reset_moments()
    assert same(bits(run), before)


def test_weights_are_where_they_were(prepared, train, randn, policy):
    run = train(prepared(policy), 2)
    addresses = [p.data_ptr() for p in run.model.parameters()]
    jump(PreparedWeights(run), randn)
    assert [p.data_ptr() for p in run.model.parameters()] == addresses


def test_averages_are_not_taken_for_weights(prepared, train):
    run = train(prepared("fp32", ema_decay=0.9), 2)
    access = PreparedWeights(run)
    with run.averaged(), pytest.raises(RecipeError, match=r"a jump was called inside averaged\(\)"):
        access.read()


def test_names_are_those_of_the_model(prepared):
    run = prepared("fp32")
    assert list(PreparedWeights(run).names) == [n for n, _ in run.model.named_parameters()]
