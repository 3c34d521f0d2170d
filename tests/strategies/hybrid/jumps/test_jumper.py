"""A jumper keeps what is verified, takes back all else, and never costs more than its budget."""

import contextlib
import copy
import math

import pytest
import torch

from narrowcast.errors import CheckpointError, RecipeError
from narrowcast.precision.nested import tensors_in
from narrowcast.strategies.hybrid.jumps.budget import JumpBudget
from narrowcast.strategies.hybrid.jumps.dmd import Modes
from narrowcast.strategies.hybrid.jumps.ensemble import Ensemble
from narrowcast.strategies.hybrid.jumps.history import HistorySettings
from narrowcast.strategies.hybrid.jumps.jump_settings import JumpSettings
from narrowcast.strategies.hybrid.jumps.jumper import Jumper
from narrowcast.strategies.hybrid.jumps.line import FittedCurve
from narrowcast.strategies.hybrid.jumps.network import NetworkSettings, WeightNetwork
from narrowcast.strategies.hybrid.jumps.prepared_weights import PreparedWeights

CPU = torch.device("cpu")
RICH = JumpBudget(planned=1e6)


def settings(**given):
    history = HistorySettings(every=1, most=6, keep="fp32")
    return JumpSettings(**{"history": history, "budget": RICH, **given})


def descent(listed, jumper_of, steps=8):
    """Walk straight towards zero; the loss of a batch is the distance, and a little of its own."""
    access = listed([torch.full((4,), 100.0), torch.full((2, 2), -50.0)])
    jumper = jumper_of(access)
    for step in range(1, steps + 1):
        access.write([w - 0.01 * start for w, start in zip(access.read(), (100, -50), strict=True)])
        jumper.observe(step)

    def losses():
        distance = math.fsum(float(w.abs().sum()) for w in access.weights)
        return [distance * (1 + 0.01 * i) for i in range(8)]

    return access, jumper, losses


def line_jumper(**given):
    return lambda access: Jumper(access, [FittedCurve(1)], settings=settings(**given))


def test_a_jump_that_helps_is_kept(listed):
    _, jumper, losses = descent(listed, line_jumper())
    before = losses()[0]
    proposal = jumper.propose(20, "line")
    verdict = jumper.attempt(losses)
    assert verdict.accepted
    assert verdict.scale == 1.0
    assert losses()[0] == pytest.approx(before - 20 * 6, rel=1e-4)
    assert torch.allclose(proposal.deltas[0], torch.full((4,), -20.0), rtol=1e-4)
    assert len(jumper.history) == 0
    assert jumper.budget.accepted == 1


def test_a_jump_that_overshoots_is_kept_at_a_smaller_scale(listed):
    _, jumper, losses = descent(listed, line_jumper())
    jumper.propose(300, "line")  # 92 steps are left
    verdict = jumper.attempt(losses)
    assert verdict.accepted
    assert verdict.scale == 0.5


def test_a_jump_that_harms_is_taken_back_bit_for_bit(listed):
    access, jumper, losses = descent(listed, line_jumper())
    before = [w.clone() for w in access.weights]
    jumper.propose(20, "line")
    verdict = jumper.attempt(lambda: [-loss for loss in losses()])
    assert not verdict.accepted
    assert verdict.gain < 0
    assert all(map(torch.equal, access.weights, before))
    assert len(jumper.history) == 6


def test_a_loss_that_raises_leaves_the_weights_as_they_were(listed):
    access, jumper, losses = descent(listed, line_jumper())
    before = [w.clone() for w in access.weights]
    answers = iter([losses()])
    jumper.propose(20, "line")
    with pytest.raises(StopIteration):
        jumper.attempt(lambda: next(answers))
    assert all(map(torch.equal, access.weights, before))


def test_what_the_prediction_got_wrong_corrects_the_next(listed):
    # Movements halve at every snapshot, so a line goes too far: by more than a fifth.
    access = listed([torch.ones(4)])
    jumper = Jumper(access, [FittedCurve(1, shrinks=False)], settings=settings())
    for step in range(1, 7):
        access.write([access.weights[0] + 0.5**step])
        jumper.observe(step)
    first = jumper.propose(1, "line")
    jumper.attempt(lambda: [1.0] * 8)
    second = jumper.propose(1, "line")
    assert first.corrections == [0.0]
    assert second.corrections == [-0.2]
    assert torch.allclose(second.deltas[0], 0.8 * first.deltas[0])
    assert jumper.residuals.held[0].layers[0].cosine == pytest.approx(1)
    assert jumper.residuals.held[0].layers[0].scale_error < -0.5


def test_without_correction_predictions_stay_as_they_are(listed):
    _, jumper, _ = descent(listed, line_jumper(correction=None))
    jumper.propose(20, "line")
    jumper.attempt(lambda: [1.0] * 8)
    assert jumper.propose(20, "line").corrections == [0.0, 0.0]
    assert len(jumper.residuals) == 0


def test_without_budget_nothing_is_predicted_or_passed(listed):
    _, jumper, _ = descent(listed, line_jumper(budget=JumpBudget()))
    assert jumper.propose(20, "line") is None
    verdict = jumper.attempt(lambda: pytest.fail("a loss was asked for"))
    assert not verdict.accepted
    assert verdict.why == "it would cost 34 forward passes, and 0.24 are left for jumps"
    assert jumper.budget.spent == 0


def test_whatever_is_tried_the_budget_holds(listed):
    learner = WeightNetwork(NetworkSettings(updates=1, sample=8), device=CPU)
    predictors = [FittedCurve(1), learner]
    budget = JumpBudget(share=0.2)
    access = listed([torch.full((4,), 100.0)])
    jumper = Jumper(access, predictors, settings=settings(budget=budget))
    tried = 0
    for step in range(1, 300):
        access.write([access.weights[0] * 0.99])
        if jumper.observe(step) and len(jumper.history) > 4:
            jumper.propose(2, "line" if step % 2 else "network")
            tried += jumper.attempt(lambda: [float(access.weights[0].sum())] * 8).accepted
        assert jumper.budget.spent <= 0.2 * 3 * step
        assert jumper.budget.taught <= 0.1 * 3 * step
    assert tried > 1
    assert jumper.budget.taught > 0


def test_an_ensemble_costs_what_its_members_do(listed):
    members = [FittedCurve(1), FittedCurve(2), Modes()]
    _, jumper, _ = descent(
        listed, lambda a: Jumper(a, [Ensemble(members, device=CPU)], settings=settings())
    )
    taught = jumper.budget.taught
    assert taught == 8 * sum(member.cost for member in members)
    jumper.propose(2, "ensemble")
    jumper.attempt(lambda: [1.0] * 8)
    assert jumper.budget.spent - taught == settings().attempt_cost(jumper.predictors["ensemble"])


def test_after_rejections_it_stops_and_holds_no_memory(listed):
    _, jumper, _ = descent(listed, line_jumper())
    for _ in range(5):
        jumper.propose(2, "line")
        jumper.attempt(lambda: [1.0] * 8)
    assert not jumper.observe(9)
    assert len(jumper.history) == 0
    assert jumper.propose(2, "line") is None
    assert "5 jumps in a row were rejected" in jumper.attempt(lambda: [1.0] * 8).why


@pytest.mark.parametrize("moments", ["keep", "reset"])
def test_moments_are_reset_where_that_is_asked(listed, moments):
    access, jumper, losses = descent(listed, line_jumper(moments=moments))
    jumper.propose(20, "line")
    jumper.attempt(losses)
    assert access.resets == (moments == "reset")


@pytest.mark.parametrize(
    "policy", ["fp32", "fp16", "bf16,params=bf16,master=split", "fp8-delayed", "aggressive"]
)
def test_a_run_whose_jumps_are_rejected_is_the_run_without_them(prepared, train, policy):
    plain = train(prepared(policy), 12)
    jumping = prepared(policy)
    jumper = Jumper(PreparedWeights(jumping), [FittedCurve(1)], settings=settings())

    def losses():
        with jumping.compute():  # draws random numbers, and moves the batch norm
            jumping.model(torch.randn(4, 16))
        return [1.0] * 8

    for step in range(12):
        train(jumping, 1, first=step)
        if jumper.observe(step + 1) and step > 5:
            jumper.propose(3, "line")
            jumper.attempt(losses)
    assert jumper.budget.rejections == 5
    state = (tensors_in(run.state_dict()) for run in (plain, jumping))
    assert all(torch.equal(a, b) for a, b in zip(*state, strict=True))


def test_a_resumed_jumper_goes_on_bit_for_bit(listed):
    def jumper_of(access):
        learner = WeightNetwork(NetworkSettings(context=2, updates=2, sample=16), device=CPU)
        members = [FittedCurve(2), Modes(2)]
        predictors = [FittedCurve(1), learner, Ensemble(members, device=CPU)]
        return Jumper(access, predictors, settings=settings())

    access, first, _ = descent(listed, jumper_of)
    first.propose(3, "network")
    first.attempt(lambda: [1.0] * 8)
    second = jumper_of(access)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    access.write([w * 0.9 for w in access.read()])
    for name in ("line", "network", "ensemble"):
        found = []
        for jumper in (first, second):
            jumper.observe(9)
            found.append(jumper.propose(3, name))
            jumper.attempt(lambda: [1.0] * 8)
        assert all(map(torch.equal, found[0].deltas, found[1].deltas))
        assert found[0].corrections == found[1].corrections
    assert first.budget == second.budget
    state = (tensors_in(jumper.state_dict()) for jumper in (first, second))
    assert all(torch.equal(a, b) for a, b in zip(*state, strict=True))


def test_room_is_made_around_the_trial_alone(listed):
    inside = []

    @contextlib.contextmanager
    def room():
        inside.append(True)
        yield
        inside.append(False)

    _, jumper, losses = descent(
        listed, lambda access: Jumper(access, [FittedCurve(1)], settings=settings(), room=room)
    )
    jumper.propose(20, "line")
    jumper.attempt(lambda: losses() if inside == [True] else pytest.fail("no room"))
    assert inside == [True, False]


def test_an_attempt_without_a_proposal_is_refused(listed):
    _, jumper, losses = descent(listed, line_jumper())
    jumper.propose(20, "line")
    jumper.attempt(losses)
    with pytest.raises(RecipeError, match=r"call propose\(\) each time"):
        jumper.attempt(losses)


def test_an_unknown_predictor_is_refused(listed):
    _, jumper, _ = descent(listed, line_jumper())
    with pytest.raises(RecipeError, match="'lime' was asked, and there are line"):
        jumper.propose(20, "lime")


def test_another_number_of_losses_is_refused(listed):
    _, jumper, losses = descent(listed, line_jumper())
    jumper.propose(20, "line")
    with pytest.raises(RecipeError, match="8 micro-batches, and 9 losses were given"):
        jumper.attempt(lambda: [*losses(), 1.0])


def test_a_jumper_with_other_predictors_is_refused(listed):
    access, jumper, _ = descent(listed, line_jumper())
    other = Jumper(access, [FittedCurve(2)], settings=settings())
    with pytest.raises(CheckpointError, match="predicted by line, this run's by quadratic"):
        other.load_state_dict(jumper.state_dict())


@pytest.mark.parametrize("wrong", [{"batches": 7}, {"scales": ()}, {"risk": 0.0}])
def test_settings_that_judge_nothing_are_refused(wrong):
    with pytest.raises(RecipeError, match="write batches=8 or more"):
        JumpSettings(**wrong)
