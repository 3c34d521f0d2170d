"""Sources that persist, against torch's Adam and by hand."""

import pytest
import torch

from narrowcast.errors import ConfigError
from narrowcast.workloads.decompose.components.masked import SiteMask
from narrowcast.workloads.decompose.losses.adversary import PersistentPGD
from narrowcast.workloads.decompose.losses.total import total


def kept(step, loss, *, length=1):
    """The step with what the term keeps, in float64 and beginning at the same place always."""
    torch.manual_seed(3)
    state = loss.sources(
        step.decomposition.sites, seeds=step.seeds, rows=step.rows, length=length, delta=step.delta
    ).double()
    step.state[loss.name] = state
    return state


def values(state):
    return [state.get_buffer(name).clone() for name in state.names]


@pytest.mark.parametrize("sigmoid", [False, True])
def test_sources_ascend_by_torchs_adam_on_the_gradient_of_the_main_backward_pass(network, sigmoid):
    step = network()
    loss = PersistentPGD(coefficient=0.5, lr=0.02, scope="per_position", sigmoid=sigmoid)
    state = kept(step, loss)
    theirs = [torch.nn.Parameter(each) for each in values(state)]
    adam = torch.optim.Adam(theirs, lr=0.02, betas=(0.5, 0.99), maximize=True)
    for _ in range(3):
        everything, _ = total([loss], step)
        everything.backward()
        state.ascend()

        adam.zero_grad()
        seen = [torch.sigmoid(each) if sigmoid else each for each in theirs]
        masks = [SiteMask(step.lower[site], seen[site], seen[site + 2]) for site in (0, 1)]
        made = step.decomposition(*step.args, masks=masks).output
        (made - step.target).square().mean((1, 2)).sum().backward()
        adam.step()
        if not sigmoid:
            for each in theirs:
                each.data.clamp_(0, 1)
        for one, other in zip(values(state), theirs, strict=True):
            torch.testing.assert_close(one, other.data, rtol=1e-9, atol=1e-12)


def test_signs_go_where_more_harm_is_done(numbers):
    # y = x (2 m1 + d1)(m2 + d2) never exceeds 6 x: every source goes down.
    step = numbers()
    loss = PersistentPGD(coefficient=3.0, optimizer="sign", lr=0.125)
    state = kept(step, loss)
    before = values(state)
    total([loss], step)[0].backward()
    state.ascend()
    for one, other in zip(values(state), before, strict=True):
        assert torch.equal(one, (other - 0.125).clamp(0, 1))


def test_all_ascents_but_the_last_are_made_before_the_pass(numbers):
    step = numbers()
    loss = PersistentPGD(coefficient=1.0, optimizer="sign", lr=0.125)
    state = kept(step, loss)
    before = values(state)
    loss(step, 3)
    for one, other in zip(values(state), before, strict=True):
        assert torch.equal(one, (other - 0.25).clamp(0, 1))


def test_a_step_that_leaves_the_term_out_or_only_evaluates_moves_nothing(numbers):
    step = numbers()
    loss = PersistentPGD(coefficient=1.0)
    state = kept(step, loss)
    before = values(state)
    state.ascend()
    with torch.no_grad():
        loss(step, 5)
    state.ascend()
    assert all(map(torch.equal, values(state), before))
    assert state.get_buffer("ascents").item() == 0


def test_a_backward_pass_that_overflowed_is_not_remembered(numbers):
    step = numbers()
    loss = PersistentPGD(coefficient=1.0)
    state = kept(step, loss)
    (total([loss], step)[0] * float("inf")).backward()
    state.ascend()
    assert all(each.isfinite().all() for each in state.buffers())


@pytest.mark.parametrize(
    ("scope", "more", "own"),
    [
        ("single", {}, 1),
        ("broadcast_across_batch", {}, 2),
        ("repeat_across_batch", {"repeat": 3}, 6),
        ("per_position", {}, 12),
    ],
)
def test_scopes_say_which_rows_share_a_source(network, scope, more, own):
    step = network(rows=12)  # six texts of two positions
    loss = PersistentPGD(coefficient=1.0, scope=scope, **more)
    state = kept(step, loss, length=2)
    sources, deltas = state.spread(step)
    for spread, name in zip((*sources, *deltas), state.names, strict=True):
        value = state.get_buffer(name)
        assert value.shape[1] == own
        rows = spread.expand(2, 12, *spread.shape[2:])
        for row in range(12):
            assert torch.equal(rows[:, row], value[:, row % own])


def test_sources_are_part_of_a_checkpoint(numbers):
    step = numbers()
    loss = PersistentPGD(coefficient=1.0)
    state = kept(step, loss)
    for _ in range(2):
        total([loss], step)[0].backward()
        state.ascend()
    other = kept(numbers(), loss)
    other.load_state_dict(state.state_dict())
    for each in (state, other):
        step.state[loss.name] = each
        total([loss], step)[0].backward()
        each.ascend()
    assert all(map(torch.equal, values(state), values(other)))
    assert not list(state.parameters())  # no optimizer may take them for weights


def test_a_batch_that_texts_with_sources_do_not_divide_is_refused(network):
    loss = PersistentPGD(coefficient=1.0, scope="repeat_across_batch", repeat=4)
    with pytest.raises(ConfigError, match="repeat must divide batch_size=6, got 4"):
        kept(network(), loss)


def test_a_batch_of_another_size_is_refused_where_sources_are_of_rows(network):
    loss = PersistentPGD(coefficient=1.0, scope="per_position")
    state = kept(network(), loss)
    with pytest.raises(ConfigError, match=r"must have 6 rows .* got 5"):
        state.spread(network(rows=5))
