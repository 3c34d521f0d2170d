"""What is parked on the host comes back bit for bit, and steps go on as if it had never left."""

import pytest
import torch

import narrowcast as nc
from narrowcast.precision.nested import tensors_in
from narrowcast.strategies.hybrid.jumps.offload import Freed, Parked, offloaded


def test_parked_memory_is_freed_and_comes_back_bit_for_bit(randn):
    whole = randn(6, 4)
    tensors = [randn(5).bfloat16(), whole, whole[2:4], torch.tensor(3.0), torch.empty(0)]
    before = [t.clone() for t in tensors]
    parked = Parked(tensors)
    assert parked.bytes() == 10 + 96 + 4
    assert all(t.untyped_storage().nbytes() == 0 for t in tensors)
    parked.bring_back()
    assert all(map(torch.equal, tensors, before))
    assert whole[2:4].data_ptr() == tensors[2].data_ptr()


def test_on_a_cpu_gradients_go_and_the_state_stays_where_it_is(prepared, train):
    run = train(prepared("fp32"), 2)
    with run.compute():
        loss = run.model(torch.ones(8, 16)).sum()
    run.backward(loss)
    state = list(tensors_in(run.optimizer.state_dict()))
    addresses = [t.data_ptr() for t in state]
    with offloaded(run, graph_knows=False) as freed:
        assert freed == Freed(sum(4 * p.numel() for p in run.model.parameters()), 0, False)
        assert all(p.grad is None for p in run.model.parameters())
    assert [t.data_ptr() for t in tensors_in(run.optimizer.state_dict())] == addresses


@pytest.mark.parametrize("graph_knows", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_steps_after_it_are_those_without_it(cuda, graph_knows, fused):
    def steps(count, run=None):
        if run is None:
            torch.manual_seed(0)
            net = torch.nn.Linear(64, 64).to(cuda)
            adam = torch.optim.AdamW(net.parameters(), lr=0.01)
            run = nc.prepare(net, adam, policy="fp32", fused_optimizer=fused)
        for _ in range(count):
            with run.compute():
                loss = run.model(torch.ones(8, 64, device=cuda)).square().mean()
            run.step(loss)
        return run

    run = steps(3)
    held = torch.cuda.memory_allocated()
    addresses = [t.data_ptr() for t in tensors_in(run.optimizer.state_dict())]
    with offloaded(run, graph_knows=graph_knows) as freed:
        assert freed.same_addresses == graph_knows
        assert (freed.moment_bytes == 0) == graph_knows
        assert torch.cuda.memory_allocated() <= held - freed.moment_bytes
    if graph_knows:
        assert [t.data_ptr() for t in tensors_in(run.optimizer.state_dict())] == addresses
    plain, offloaded_once = steps(6), steps(3, run)
    state = (tensors_in(each.state_dict()) for each in (plain, offloaded_once))
    assert all(torch.equal(a, b) for a, b in zip(*state, strict=True))
