"""The average of the weights: what it moves towards, on which path, and when it stands still."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import narrowcast as nc
from narrowcast.errors import ConfigError
from narrowcast.kernels.launch import interpreted
from narrowcast.precision.step.saved_state import collect_state
from narrowcast.precision.weights.fused_adamw import FusedAdamW
from narrowcast.precision.weights.master import WeightAverage

DECAY = 0.75
DEVICE = "cpu" if interpreted() else "cuda"
MASTERS = ("fp32", "split", "kahan", "stochastic", "none")
STORED = ["fp32", *(f"fp32, params=bf16, master={master}" for master in MASTERS)]
"""Every way in which a weight is kept; all compute in fp32."""
pytestmark = pytest.mark.interpreted  # one of three paths is the kernel
PATHS = ("kernel", "twin", "torch")


def trained(policy, *, bad=(), steps=6, decay=DECAY):
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = nc.prepare(model, optimizer, policy=policy, ema_decay=decay)
    seen = []
    for step in range(steps):
        x = torch.full((2, 4), float("nan") if step in bad else float(step + 1))
        with run.autocast():
            loss = model(x).float().square().mean()
        run.step(loss)
        seen.append({k: v.clone() for k, v in run.fp32_state_dict().items()})
    return model, run, seen


@pytest.mark.parametrize("bad", [(), (0,), (2, 3), (5,)])
def test_the_average_equals_torchs_over_the_applied_steps_alone(bad):
    torch.manual_seed(0)
    start = nn.Linear(4, 4)
    model, run, seen = trained("fp32", bad=bad)
    averaged = torch.optim.swa_utils.AveragedModel(
        start, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(DECAY)
    )
    averaged.update_parameters(start)
    for step, weights in enumerate(seen):
        if step not in bad:
            start.load_state_dict(weights)
            averaged.update_parameters(start)
    with run.use_ema():
        for mine, theirs in zip(model.parameters(), averaged.module.parameters(), strict=True):
            # Six lerps in fp32, each within an ulp.
            torch.testing.assert_close(mine, theirs, rtol=12 * 2.0**-24, atol=12 * 2.0**-24)


def fail_unless_averaged(model, before):
    assert not torch.equal(model.weight.float(), before["weight"])
    raise ValueError("on purpose")


@pytest.mark.parametrize("policy", ["fp32", "bf16, params=bf16, master=split", "bf16-pure"])
def test_the_weights_are_back_when_the_block_ends_even_by_an_error(policy):
    model, run, _ = trained(policy)
    before = {k: v.clone() for k, v in run.fp32_state_dict().items()}
    with pytest.raises(ValueError, match="on purpose"), run.use_ema():
        fail_unless_averaged(model, before)
    assert all(torch.equal(v, before[k]) for k, v in run.fp32_state_dict().items())


@pytest.mark.parametrize("policy", ["fp32", "bf16, params=bf16, master=split", "bf16-pure"])
def test_what_is_taken_inside_the_block_stays_the_averages(policy):
    model, run, _ = trained(policy)
    before = {name: w.clone() for name, w in model.state_dict().items()}
    places = [p.data_ptr() for p in model.parameters()]
    with run.use_ema():
        taken = model.state_dict()
        held = [p.detach() for p in model.parameters()]
        expected = {name: w.clone() for name, w in taken.items()}
    assert all(torch.equal(taken[name], w) for name, w in expected.items())
    assert all(map(torch.equal, held, expected.values()))
    assert not torch.equal(taken["weight"], before["weight"])
    assert all(torch.equal(model.state_dict()[name], w) for name, w in before.items())
    assert [p.data_ptr() for p in model.parameters()] == places  # captured steps know them


@pytest.mark.parametrize("policy", ["fp32", "bf16, params=bf16, master=split", "bf16-pure"])
def test_what_is_written_inside_the_block_reaches_neither_weights_nor_averages(policy):
    model, run, _ = trained(policy)
    weights = {name: w.clone() for name, w in run.fp32_state_dict().items()}
    kept = [a.clone() for a in run.state_dict()["average"]]
    with run.use_ema(), torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert all(torch.equal(w, weights[name]) for name, w in run.fp32_state_dict().items())
    assert all(map(torch.equal, run.state_dict()["average"], kept))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("policy", ["fp8-delayed", "fp8-tensor", "bf16", "bf16-pure"])
def test_steps_after_the_block_are_those_without_it(policy, mode):
    def steps(*, look):
        model, run, _ = trained(policy, steps=2)
        for step in range(3):
            with run.autocast():
                loss = model(torch.full((2, 4), 1.0 + step)).float().square().mean()
            run.step(loss)
            if look:
                with mode(), run.use_ema(), run.autocast():
                    model(torch.ones(2, 4))
        return run.fp32_state_dict()

    plain, looked = steps(look=False), steps(look=True)
    assert all(torch.equal(plain[name], w) for name, w in looked.items())


@pytest.mark.parametrize("policy", ["fp32", "bf16, params=bf16, master=split"])
def test_averages_by_name_have_every_digit_and_load_into_the_plain_model(policy):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.norm = nn.Embedding(5, 4), nn.BatchNorm1d(4)
            self.head, self.frozen = nn.Linear(4, 5, bias=False), nn.Linear(4, 4)
            self.head.weight = self.embed.weight
            self.frozen.requires_grad_(False)

        def forward(self, ids):
            return self.head(self.frozen(self.norm(self.embed(ids))))

    torch.manual_seed(0)
    model = Tied()
    trained = [p for p in model.parameters() if p.requires_grad]
    expected = [p.detach().clone() for p in trained]
    run = nc.prepare(model, torch.optim.SGD(trained, lr=0.1), policy=policy, ema_decay=DECAY)
    for _ in range(4):
        with run.autocast():
            loss = model(torch.arange(5)).float().square().mean()
        run.step(loss)
        full = run.fp32_state_dict()
        names = [n for n, p in model.named_parameters() if p.requires_grad]
        for average, name in zip(expected, names, strict=True):
            average.add_((full[name].float() - average) * (1 - DECAY))
    taken = run.ema_state_dict()
    with run.use_ema():
        inside = run.ema_state_dict()
    assert all(torch.equal(taken[name], w) for name, w in inside.items())
    plain = Tied()
    plain.load_state_dict(taken)
    for p, average in zip(
        (q for q in plain.parameters() if q.requires_grad), expected, strict=True
    ):
        torch.testing.assert_close(p.detach(), average, rtol=8 * 2.0**-24, atol=8 * 2.0**-24)
    assert torch.equal(plain.norm.running_mean, model.norm.running_mean)
    assert torch.equal(plain.frozen.weight, full["frozen.weight"].float())
    run.step(model(torch.arange(5)).float().sum())
    assert all(torch.equal(taken[name], w) for name, w in inside.items())


def test_averages_by_name_are_refused_where_none_are_kept():
    _, run, _ = trained("fp32", decay=None)
    with pytest.raises(ConfigError, match=r"for example ema_decay=0\.999"):
        run.ema_state_dict()


def test_without_an_average_the_block_changes_nothing():
    model, run, _ = trained("fp32", decay=None)
    before = model.weight.detach().clone()
    with run.use_ema():
        assert torch.equal(model.weight, before)
    assert not run.has_ema


def test_the_average_of_sixteen_bit_weights_moves_by_less_than_they_can():
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-12)
    policy = "fp32, params=bf16, master=split"
    run = nc.prepare(model, optimizer, policy=policy, ema_decay=0.5)
    run.step(-model.weight.float().sum())
    average = run.state_dict()["average"][0]
    assert (average == 1 + 2.0**-13).all()


def on_path(path, policy, *, model=None):
    """A run whose weights are updated in one of the three ways, with weight decay and clipping."""
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(20, 30), nn.LayerNorm(30), nn.Linear(30, 5))
    model.to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    settings = {"clip_norm": 0.5, "ema_decay": DECAY, "fused_optimizer": path != "torch"}
    run = nc.prepare(model, optimizer, policy=policy, **settings)
    if path != "torch":  # on a machine without a GPU the kernel runs in Triton's interpreter
        weights, kernel = run.engine.weights, path == "kernel"
        weights.fused = FusedAdamW(
            optimizer, weights.all, weights.masters, policy=run.plan.policy, kernel=kernel
        )
    return run


def step_of(run, *, factor=1.0, shape=(6, 20)):
    x = torch.linspace(-1, 1, math.prod(shape), device=DEVICE).view(shape)
    with run.autocast():
        loss = F.mse_loss(run.model(x), torch.ones_like(run.model(x)))
    return run.step(loss * factor)


def assert_moved(run, before):
    """The averages went their share of the way to the weights of now, from where they were."""
    full = run.fp32_state_dict()
    for (name, _), then, now in zip(
        run.model.named_parameters(), before, run.state_dict()["average"], strict=True
    ):
        way = (1 - DECAY) * (full[name] - then)
        # A GPU's kernel multiplies and adds at once: a rounding of the way, one of the sum.
        fused = 2.0**-24 * (way.abs() + 2 * now.abs()) * (DEVICE != "cpu")
        assert ((now - (then + way)).abs() <= fused).all()


def averages(run):
    return [average.clone() for average in run.state_dict()["average"]]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("policy", STORED)
def test_the_average_moves_towards_what_is_kept_of_the_weights(path, policy):
    run = on_path(path, policy)
    for step in range(5):
        before = averages(run)
        bad = step in (1, 3)
        assert step_of(run, factor=math.nan if bad else 1.0 + step).applied is not bad
        if bad:
            assert all(map(torch.equal, averages(run), before))
        else:
            assert_moved(run, before)
            assert not torch.equal(averages(run)[0], before[0])


@pytest.mark.parametrize("path", PATHS)
def test_the_average_of_a_weight_without_a_gradient_comes_nearer_to_it(path):
    run = on_path(path, "fp32, params=bf16, master=split")
    step_of(run)
    frozen = run.model[0].weight.requires_grad_(False)
    for _ in range(3):
        before, kept = averages(run), run.fp32_state_dict()["0.weight"].clone()
        step_of(run)
        assert_moved(run, before)
        assert torch.equal(run.fp32_state_dict()["0.weight"], kept)
        assert not torch.equal(averages(run)[0], before[0])
    before = averages(run)
    step_of(run, factor=math.nan)
    assert all(map(torch.equal, averages(run), before))
    frozen.requires_grad_(True)
    step_of(run)
    assert_moved(run, before)


@pytest.mark.parametrize("path", PATHS)
def test_the_averages_stay_where_they_are_in_memory(path):
    """A captured step knows their addresses."""
    run = on_path(path, "fp32, params=bf16, master=split")
    places = [average.data_ptr() for average in collect_state(run.engine)["average"]]
    step_of(run)
    saved = copy.deepcopy(run.state_dict())
    for policy in ("fp32", "fp32, params=bf16, master=kahan", "fp32, params=bf16, master=split"):
        run.set_policy(nc.plan(run.model, policy, hardware=run.plan.hardware))
        before = averages(run)
        step_of(run)
        assert_moved(run, before)
    run.load_state_dict(saved)
    assert all(map(torch.equal, averages(run), saved["average"]))
    step_of(run)
    assert_moved(run, saved["average"])
    assert [average.data_ptr() for average in collect_state(run.engine)["average"]] == places


def test_an_average_lies_in_memory_as_its_weight_whatever_the_policy_becomes():
    """Channels last, too, where digits that were taken apart are put together again."""
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(8, 5))
    model.to(memory_format=torch.channels_last)
    run = on_path("kernel", "fp32, params=bf16, master=split", model=model)
    weight, average = model[0].weight, collect_state(run.engine)["average"][0]
    assert weight.stride() == average.stride()
    step_of(run, shape=(6, 4, 3, 3))
    run.set_policy(nc.plan(run.model, "fp32", hardware=run.plan.hardware))
    assert weight.stride() == average.stride() == (36, 1, 12, 4)
    for _ in range(2):
        before = averages(run)
        step_of(run, shape=(6, 4, 3, 3))
        assert_moved(run, before)


class Operations(TorchDispatchMode):
    """Counts what is asked of torch, but for views."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def test_torchs_own_path_takes_as_few_operations_for_many_weights_as_for_one():
    counts = []
    for number in (1, 40):
        weights = [nn.Parameter(torch.ones(3, device=DEVICE)) for _ in range(number)]
        average = WeightAverage(weights, lambda p: p.detach(), decay=DECAY)
        with Operations() as operations, torch.no_grad():
            average.update(
                range(number), lambda p: p.detach(), finite=torch.tensor(True, device=DEVICE)
            )
        counts.append(operations.count)
    # The share of a step that may be skipped: a cast and a product; then the way, its share, a sum.
    assert counts == [counts[0]] * 2
    assert counts[0] <= 6
