"""Movements applied at once are those applied one by one."""

import copy

import torch

from narrowcast.strategies.hybrid.jumps.accumulate import DeltaAccumulator
from narrowcast.strategies.hybrid.jumps.prepared_weights import PreparedWeights


def test_a_flush_equals_the_movements_one_by_one(listed, randn):
    start = [randn(5, 4), randn(3)]
    moves = [[randn(5, 4), randn(3)] for _ in range(10)]
    at_once, one_by_one = (listed([w.clone() for w in start]) for _ in range(2))
    sums = DeltaAccumulator()
    for move in moves:
        sums.add(move, scale=0.5)
        one_by_one.write([w + 0.5 * m for w, m in zip(one_by_one.read(), move, strict=True)])
    assert sums.flush(at_once) == 10
    for a, b in zip(at_once.weights, one_by_one.weights, strict=True):
        # Ten roundings each, of sums that stay below 32.
        assert torch.allclose(a, b, rtol=0, atol=20 * 32 * 2**-24)


def test_small_movements_add_up_where_weights_have_eight_digits(prepared):
    run = prepared("bf16,params=bf16,master=none")
    access, sums = PreparedWeights(run), DeltaAccumulator()
    access.write([torch.ones_like(w) for w in access.read()])
    for _ in range(16):
        sums.add([torch.full_like(w, 2**-10) for w in access.read()])
    sums.flush(access)
    assert all(torch.equal(w, torch.full_like(w, 1 + 2**-6)) for w in access.read())


def test_after_a_flush_there_is_nothing_left(listed):
    access, sums = listed([torch.zeros(3)]), DeltaAccumulator()
    sums.add([torch.ones(3)])
    assert sums.bytes() == 12
    sums.flush(access)
    assert (sums.flush(access), sums.bytes()) == (0, 0)
    assert torch.equal(access.weights[0], torch.ones(3))


def test_a_saved_sum_goes_on(listed, randn):
    first, second, delta = DeltaAccumulator(), DeltaAccumulator(), randn(3)
    first.add([delta])
    second.load_state_dict(copy.deepcopy(first.state_dict()), device=torch.device("cpu"))
    access = listed([torch.zeros(3)])
    assert second.flush(access) == 1
    assert torch.equal(access.weights[0], delta)
