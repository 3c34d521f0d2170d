"""`nc.hybrid` in a loop of one's own, on real digits."""

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import narrowcast as nc
from narrowcast.errors import CheckpointError, ConfigError, UnsupportedError
from narrowcast.runs import StrategyRecord

DIGITS = load_digits()
X = torch.tensor(DIGITS.data, dtype=torch.float32) / 16
Y = torch.tensor(DIGITS.target)
STEPS = 120


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))


def batch(step, size=64):
    drawn = torch.randint(0, 1200, (size,), generator=torch.Generator().manual_seed(step))
    return X[drawn], Y[drawn]


def held_out(model):
    with torch.no_grad():
        return F.cross_entropy(model(X[1200:]), Y[1200:]).item()


def begin(**settings):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    return nc.hybrid(model, optimizer, **{"steps": STEPS} | settings)


def train(run, first, last):
    for step in range(first, last):
        x, y = batch(step)
        run.step(lambda x=x, y=y: F.cross_entropy(run.model(x), y))


def test_the_answer_is_what_was_measured_and_loads_into_the_plain_model():
    run = begin(scheduler=CosineAnnealingLR, policy="fp32")
    train(run, 0, STEPS)
    choice = run.select_weights(lambda: held_out(run.model))
    assert choice.scores[choice.name] == min(choice.scores.values()) < 1.0
    plain = network()
    plain.load_state_dict(run.eval_state_dict())
    assert held_out(plain) == pytest.approx(choice.scores[choice.name], rel=1e-6)
    with run.use_eval_weights():
        assert held_out(run.model) == pytest.approx(choice.scores[choice.name], rel=1e-6)


def test_the_schedule_is_planned_beyond_the_run():
    run = begin(scheduler=CosineAnnealingLR, lr_horizon=1.5)
    (schedule,) = run.prepared.schedulers
    assert schedule.T_max == 180


def test_conservative_leaves_the_optimizer_as_it_is():
    model = network()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=4e-3)
    run = nc.hybrid(model, torch.optim.AdamW(model.parameters(), lr=4e-3), steps=STEPS,
                    preset="conservative", policy="fp32")  # fmt: skip
    for step in range(20):
        x, y = batch(step)
        F.cross_entropy(plain(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    train(run, 0, 20)
    assert all(map(torch.equal, run.model.parameters(), plain.parameters()))


VERIFIED = {
    "preset": "aggressive", "jumps": {"budget": 0.5}, "precision": "recommended",
    "phases": {"warmup_steps": 10, "full_steps": 12, "max_predict_steps": 10},
}  # fmt: skip


@pytest.mark.parametrize("left_at", [20, 26, 34])  # in full, predict and correct
def test_a_state_is_taken_up_bit_for_bit(left_at):
    straight, first, second = (begin(**VERIFIED, policy="fp32") for _ in range(3))
    train(straight, 0, 60)
    train(first, 0, left_at)
    phase = first.phase
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert second.phase == phase
    train(second, left_at, 60)
    a, b = straight.eval_state_dict(), second.eval_state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)
    a, b = (run.readouts.weights("average 0.05") for run in (straight, second))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_phases_are_as_long_as_requested_and_have_their_formats():
    run, phases = begin(**VERIFIED, policy="fp32"), []
    for step in range(24):
        phases.append((run.phase, str(run.prepared.plan.policy)))
        before = {name: w.clone() for name, w in run.prepared.fp32_state_dict().items()}
        train(run, step, step + 1)
        if run.phase == phases[-1][0] == "predict":
            after = run.prepared.fp32_state_dict()
            assert all(torch.equal(before[name], after[name]) for name in before)
    assert phases[:22] == [("warmup", "compute=fp32")] * 10 + [("full", "compute=fp32")] * 12
    assert phases[22:] == [("predict", "compute=bf16")] * 2
    assert [r.what for r in run.records if isinstance(r, StrategyRecord)] == [
        "warmup begins", "full begins", "predict begins",
    ]  # fmt: skip


def test_predict_lasts_while_predictions_come_true():
    model = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = nc.hybrid(model, optimizer, steps=200, **VERIFIED, half_lives=(), policy="fp32")
    phases = []
    for step in range(70):
        x = torch.rand(8, 4, generator=torch.Generator().manual_seed(step))
        phases.append(run.phase)
        run.step(lambda x=x: model(x).mean())  # its slope stays, so the line is right
    assert phases == ["warmup"] * 10 + ["full"] * 12 + ["predict"] * 48
    jumps = [r for r in run.records if isinstance(r, StrategyRecord) and r.event == "jump"]
    assert [r.values["accepted"] for r in jumps] == [1] * 6
    # 22 steps of training and 6 predictions of at least 2 steps each, at a slope of a half.
    mean = 0.5 * model.weight.sum().item()
    assert mean < -0.01 * 4 * 0.25 * (22 + 6 * 2) / 2


def test_a_loss_in_place_of_a_function_raises_where_steps_have_no_backward_pass():
    run = begin(**VERIFIED)
    with pytest.raises(ConfigError, match=r"run\.step\(lambda"):
        run.step(torch.zeros(()))
    with pytest.raises(UnsupportedError, match="balanced"):
        run.graphed(lambda x: x)


@pytest.mark.parametrize(
    ("settings", "answer"),
    [
        ({"steps": 0}, "1 or more"),
        ({"ema_decay": 0.99}, "half_lives"),
        ({"preset": "bold"}, "one of conservative, balanced"),
        ({"lr_horizon": 0.5}, "lr_horizon must be a number of 1 or more"),
        ({"half_lives": (-1, 0.05)}, "must be shares of the run, above 0 and up to 1"),
        ({"half_lives": 0.05}, "must be shares of the run"),
        ({"steps": "80"}, "steps must be the number"),
        ({"phases": {"full_steps": 9}}, r'phases that use full_steps.*preset="aggressive"'),
        ({"preset": "aggressive", "phases": {"full": 9}}, "phases.full: "),
        ({"preset": "aggressive", "steps": 120}, r'jumps=\{"budget": 0.092\} or more.*"balanced"'),
        ({"precision": "half"}, "'recommended'.*got 'half'"),
        ({"precision": {"predict": "bf16"}}, "only the aggressive preset has a phase predict"),
    ],
)
def test_what_makes_no_sense_is_refused(settings, answer):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ConfigError, match=answer):
        nc.hybrid(model, optimizer, **{"steps": 10, **settings})


def test_momentum_of_sgd_is_refused_with_the_rate_that_replaces_it():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(UnsupportedError, match="10 times the learning rate"):
        nc.hybrid(model, optimizer, steps=10)


@pytest.mark.parametrize("policy", ["bf16", "bf16, params=bf16, master=split"])
def test_on_a_gpu_steps_with_a_point_ahead_and_averages_wait_for_nothing(
    cuda, host_never_waits, policy
):
    model = nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 10)).to(cuda)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    ahead = nc.Lookahead(begins_after=6)
    run = nc.hybrid(model, optimizer, steps=40, policy=policy, lookahead=ahead,
                    scheduler=CosineAnnealingLR)  # fmt: skip
    assert run.readouts.bank.every == 1
    x, y = X[:64].to(cuda), Y[:64].to(cuda)
    for step in range(12):
        with run.autocast():
            loss = F.cross_entropy(model(x).float(), y)
        run.prepared.sync()
        with host_never_waits() if step > 4 else contextlib.nullcontext():
            run.step(loss)
    assert run.prepared.has_lookahead
    assert set(run.readouts.names) == {"trained", "average 0.015", "average 0.05"}


def batches(size):
    return list(zip(X[1200:].split(size), Y[1200:].split(size), strict=True))


def test_read_outs_are_chosen_on_as_many_batches_as_the_budget_pays_for():
    run = begin(scheduler=CosineAnnealingLR, policy="fp32", readout_budget=0.05)
    train(run, 0, STEPS)
    seen = []

    def loss(batch):
        assert not run.model.training
        assert not torch.is_grad_enabled()
        seen.append(batch)
        return F.cross_entropy(run.model(batch[0]), batch[1])

    choice = run.select_weights(loss, batches=batches(32))
    assert run.model.training
    # A twentieth of 120 steps of three passes, among three.
    assert set(choice.batches.values()) == {6}
    assert len(seen) == 18
    exact = {
        name: F.cross_entropy(_loaded(run, name)(X[1200 : 1200 + 192]), Y[1200 : 1200 + 192]).item()
        for name in choice.scores
    }
    assert choice.scores == pytest.approx(exact, rel=1e-5)
    assert choice.name == min(exact, key=exact.get)
    # What is spent is spent: the next choice has a look with each, and no more.
    assert set(run.select_weights(loss, batches=batches(32)).batches.values()) == {1}


def _loaded(run, name):
    plain = network()
    plain.load_state_dict(run.readouts.weights(name))
    return plain


def test_choosing_by_batches_leaves_the_run_bit_for_bit():
    straight, looked = (begin(policy="fp32", preset="conservative") for _ in range(2))
    train(straight, 0, 40)
    train(looked, 0, 20)
    looked.select_weights(
        lambda b: F.cross_entropy(looked.model(b[0]), b[1]) + 0 * torch.rand(()).item(),
                    batches=batches(64))  # fmt: skip
    train(looked, 20, 40)
    assert all(map(torch.equal, straight.model.parameters(), looked.model.parameters()))


def test_what_was_spent_on_choosing_is_part_of_a_state():
    first, second = (begin(policy="fp32", readout_budget=0.05) for _ in range(2))
    train(first, 0, 60)

    def chosen(run):
        return run.select_weights(
            lambda b: F.cross_entropy(run.model(b[0]), b[1]), batches=batches(64)
        )

    assert set(chosen(first).batches.values()) == {3}
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    train(second, 60, 90)
    assert set(chosen(second).batches.values()) == {1}


def test_a_budget_that_is_no_share_is_refused():
    with pytest.raises(ConfigError, match=r"readout_budget must be a share .* got 0"):
        begin(readout_budget=0)


def test_a_schedule_that_is_made_already_is_refused_with_what_to_give():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    made = CosineAnnealingLR(optimizer, STEPS)
    with pytest.raises(
        ConfigError, match=r"got a CosineAnnealingLR.*scheduler=CosineAnnealingLR, or lambda"
    ):
        nc.hybrid(model, optimizer, steps=STEPS, scheduler=made)


def test_a_state_of_other_averages_is_refused():
    saved = begin(half_lives=(0.02, 0.1)).state_dict()
    with pytest.raises(CheckpointError, match=r"average 0.02, average 0.1, and this run has"):
        begin().load_state_dict(saved)


@pytest.mark.parametrize("preset", ["balanced", "aggressive"])
def test_a_state_in_memory_goes_back_to_where_it_was_taken(preset):
    settings = VERIFIED | {"precision": "policy"} if preset == "aggressive" else {}
    run = begin(policy="bf16, params=bf16, master=split", **settings)
    train(run, 0, 30)
    state, answer = run.state_dict(), run.eval_state_dict()
    train(run, 30, 60)
    straight = run.eval_state_dict()
    run.load_state_dict(state)
    assert all(torch.equal(run.eval_state_dict()[name], answer[name]) for name in answer)
    train(run, 30, 60)
    assert all(torch.equal(run.eval_state_dict()[name], straight[name]) for name in straight)


@pytest.mark.parametrize(
    ("settings", "answer"),
    [
        ({"clip_nrom": 1.0}, r"'clip_nrom' \(did you mean clip_norm\?\)"),
        ({"half_life": [0.1]}, "did you mean half_lives"),
        ({"lr_horizon": 2.0}, "lr_horizon needs a scheduler"),
        ({"predictor": "line"}, "takes its own arguments and those of prepare.*got 'predictor'"),
    ],
)
def test_arguments_that_nothing_would_use_are_named(settings, answer):
    with pytest.raises(ConfigError, match=answer):
        begin(**settings)
