"""The lookahead point against its recursion in fp64, in every way in which a run is trained."""

import copy
import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import narrowcast as nc
from narrowcast.errors import CheckpointError, ConfigError, UnsupportedError
from narrowcast.precision.plan.memory import MemoryPlan
from narrowcast.precision.step.saved_state import collect_state
from narrowcast.precision.weights import master
from narrowcast.precision.weights.lookahead import LookaheadPoint


def ahead(**settings):
    """Return a point beside the optimizer's own momentum: the recursion, and nothing else."""
    return nc.Lookahead(momentum=None, **settings)


SPLIT, FP32 = "fp32, params=bf16, master=split", "fp32, params=bf16, master=fp32"
OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
}
STEPS = 300
_GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(128, 8, generator=_GENERATOR)
Y = (X @ torch.randn(8, 3, generator=_GENERATOR)).sin()


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


def loss_of(model, step=0):
    rows = slice(step % 4, None, 4)
    return (model(X[rows]).float() - Y[rows]).square().mean()


def prepared(policy="fp32", *, kind="AdamW", settings=None, model=None, **options):
    model = network() if model is None else model
    trained = [p for p in model.parameters() if p.requires_grad]
    lookahead = ahead() if settings is None else settings
    optimizer = OPTIMIZERS[kind](trained)
    return nc.prepare(model, optimizer, policy=policy, lookahead=lookahead, **options)


def trained(run, steps, *, bad=()):
    for step in steps:
        with run.autocast():
            loss = loss_of(run.model, step)
        outcome = run.step(loss * math.nan if step in bad else loss)
        assert outcome.applied is (step not in bad)
    return run


def bits_of(run):
    """Weights with every digit, and leads."""
    weights = [run.engine.weights.full(p).clone() for p in run.engine.weights.all]
    return weights, [lead.clone() for lead in run.state_dict()["lookahead"]["leads"]]


def same_bits(run, other):
    return all(
        torch.equal(a, b)
        for ours, theirs in zip(bits_of(run), bits_of(other), strict=True)
        for a, b in zip(ours, theirs, strict=True)
    )


def in_fp64(kind, settings):
    """The recursion as it is written down, by plain torch; y and x, by name."""
    model = network().double()
    y = dict(model.named_parameters())
    z = {name: nn.Parameter(p.detach().clone()) for name, p in y.items()}
    x = {name: p.detach().clone() for name, p in y.items()}
    optimizer = OPTIMIZERS[kind](list(z.values()))
    for step in range(STEPS):
        rows = slice(step % 4, None, 4)
        loss = (model(X[rows].double()) - Y[rows].double()).square().mean()
        gradients = torch.autograd.grad(loss, list(y.values()))
        for p, gradient in zip(z.values(), gradients, strict=True):
            p.grad = gradient
        optimizer.step()
        with torch.no_grad():
            for name, p in y.items():
                x[name] += settings.rate * (z[name] - x[name])
                p.copy_(settings.interpolation * x[name] + (1 - settings.interpolation) * z[name])
    return {name: p.detach() for name, p in y.items()}, x


@pytest.mark.parametrize("settings", [ahead(), ahead(interpolation=1.0, rate=0.2)])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_any_optimizer_trains_as_the_recursion_in_fp64(kind, settings):
    y, x = in_fp64(kind, settings)
    run = trained(prepared(kind=kind, settings=settings), range(STEPS))
    # Five numbers are rounded in a step, each to 2⁻²⁴ of a weight: z, the update, x, e' and y'.
    allowed = STEPS * 5 * 2.0**-24 * max(p.abs().max() for p in x.values())
    for name, answer in run.eval_state_dict().items():
        assert answer.dtype == torch.float32
        assert (answer - x[name]).abs().max() < allowed
        assert (run.fp32_state_dict()[name] - y[name]).abs().max() < allowed
    assert (
        max((x[name] - y[name]).abs().max() for name in x) > 10 * allowed
        or settings.interpolation == 1
    )


def test_the_fused_optimizer_trains_as_the_recursion_in_fp64():
    y, x = in_fp64("AdamW", ahead())
    run = trained(prepared(fused_optimizer=True), range(STEPS))
    assert "fused" in run.update_path
    allowed = STEPS * 5 * 2.0**-24 * max(p.abs().max() for p in x.values())
    for name, answer in run.eval_state_dict().items():
        assert (answer - x[name]).abs().max() < allowed
        assert (run.fp32_state_dict()[name] - y[name]).abs().max() < allowed


@given(
    gradients=st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=30),
    interpolation=st.floats(0.1, 1),
    rate=st.floats(0.01, 1),
)
def test_the_answer_is_the_average_of_where_the_optimizer_was(gradients, interpolation, rate):
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    settings = ahead(interpolation=interpolation, rate=rate)
    run = nc.prepare(model, optimizer, policy="fp32", lookahead=settings)
    z = x = largest = 1.0
    for gradient in gradients:
        run.step(model.weight.sum() * gradient)
        z -= gradient
        x += rate * (z - x)
        largest = max(largest, abs(z), abs(x), abs(z - x) / interpolation)
        lead = run.engine.weights.lookahead.lead(0)
        # z and y are rounded once in a step, and what is wrong with z stays; x takes of each step
        # what is wrong with e', which is 1 / interpolation times as much there.
        allowed = 4 * (len(gradients) + 1 / interpolation) * 2.0**-24 * largest
        assert abs(model.weight.item() + lead.item() - z) <= allowed
        assert abs(run.eval_state_dict()["weight"].item() - x) <= allowed
        assert abs(model.weight.item() - (interpolation * x + (1 - interpolation) * z)) <= allowed


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_with_a_rate_of_one_it_is_plain_training_bit_for_bit(kind):
    run = trained(prepared(kind=kind, settings=ahead(rate=1.0)), range(20))
    model = network()
    plain = nc.prepare(model, OPTIMIZERS[kind](model.parameters()), policy="fp32")
    trained(plain, range(20))
    for name, weight in plain.fp32_state_dict().items():
        assert torch.equal(run.fp32_state_dict()[name], weight)
        assert torch.equal(run.eval_state_dict()[name], weight)


def test_with_hardly_a_pull_the_answer_is_the_average_that_ema_decay_keeps():
    interpolation = 2.0**-20
    run = trained(prepared(settings=ahead(interpolation=interpolation, rate=0.1)), range(20))
    model = network()
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    plain = trained(nc.prepare(model, optimizer, policy="fp32", ema_decay=0.9), range(20))
    for name, average in plain.ema_state_dict().items():
        # Of its way to z a gradient is taken 2⁻²⁰ short, and twenty updates of lr are a way.
        assert (run.eval_state_dict()[name] - average).abs().max() < 20 * 1e-2 * 20 * interpolation


@pytest.mark.parametrize("storage", ["fp32", "bf16"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("policy", ["fp32", "fp16", SPLIT, FP32, "bf16, params=bf16, master=split"])
def test_a_skipped_step_leaves_weights_and_leads_bit_for_bit(policy, fused, storage):
    settings = ahead(storage=storage)
    run = trained(prepared(policy, fused_optimizer=fused, settings=settings), range(4))
    before, moments = bits_of(run), copy.deepcopy(run.state_dict()["optimizer"])
    trained(run, range(4, 6), bad=(4, 5))
    for then, now in zip(before, bits_of(run), strict=True):
        assert all(map(torch.equal, then, now))
    assert str(moments) == str(run.state_dict()["optimizer"])
    trained(run, range(6, 8))
    assert not torch.equal(bits_of(run)[0][0], before[0][0])


@pytest.mark.parametrize("storage", ["fp32", "bf16"])
@pytest.mark.parametrize("fused", [False, True])
def test_split_and_fp32_master_weights_are_trained_to_the_same_bits(fused, storage, monkeypatch):
    monkeypatch.setattr(master, "BUCKET", 100)  # so that there are several
    settings = ahead(storage=storage)
    runs = [
        trained(prepared(policy, fused_optimizer=fused, settings=settings), range(30))
        for policy in (SPLIT, FP32)
    ]
    assert same_bits(*runs)
    for name, answer in runs[0].eval_state_dict().items():
        assert torch.equal(answer, runs[1].eval_state_dict()[name])


def test_leads_in_fp16_are_those_of_true_gradients_once_the_loss_scale_has_given_way():
    wide = trained(prepared(kind="SGD"), [0])
    scale = nc.LossScale(init_scale=2.0**24, max_scale=2.0**24)
    run = prepared("fp16", kind="SGD", loss_scale=scale)
    start, leads = bits_of(run)
    while run.steps_applied == 0:
        assert all(map(torch.equal, start, bits_of(run)[0]))
        assert not any(lead.any() for lead in leads)
        with run.autocast():
            loss = loss_of(run.model)
        run.step(loss)
        leads = bits_of(run)[1]
    assert run.stats().skipped > 0
    for narrow, lead in zip(leads, bits_of(wide)[1], strict=True):
        # Sums of at most 32 products, each wrong by a few roundings to 11 digits.
        assert (narrow - lead).abs().max() < 2.0**-7 * lead.abs().max()


def test_accumulated_gradients_are_those_of_one_batch():
    whole, halves = prepared(kind="SGD"), prepared(kind="SGD")
    for step in range(10):
        x, y = X[step * 8 : step * 8 + 8], Y[step * 8 : step * 8 + 8]
        whole.step((whole.model(x) - y).square().mean())
        for part in (slice(0, 4), slice(4, 8)):
            halves.backward((halves.model(x[part]) - y[part]).square().mean() / 2)
        halves.step()
    for a, b in zip(bits_of(whole)[0], bits_of(halves)[0], strict=True):
        # Sums in another order, in fp32: of gradients of the order of one, which momentum makes
        # ten of, and of weights of that order.
        allowed = 10 * (10 * 1e-2 * 2.0**-21 + 4 * 2.0**-24)
        torch.testing.assert_close(a, b, rtol=0, atol=allowed)
    assert not torch.equal(*(run.eval_state_dict()["0.weight"] for run in (whole, prepared())))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("policy", ["fp32", SPLIT])
def test_a_weight_without_a_gradient_stays_and_so_does_its_lead(policy, fused):
    run = trained(prepared(policy, fused_optimizer=fused), range(3))
    run.model[0].weight.requires_grad_(False)
    before = bits_of(run)
    trained(run, range(3, 6))
    for then, now in zip(before, bits_of(run), strict=True):
        assert torch.equal(then[0], now[0])
        assert not torch.equal(then[1], now[1])


@pytest.mark.parametrize("fused", [False, True])
def test_a_frozen_weight_has_a_lead_once_it_is_thawed(fused):
    model = network()
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    model[0].requires_grad_(False)
    run = nc.prepare(
        model,
        optimizer,
        policy="fp32",
        lookahead=ahead(),
        fused_optimizer=fused,
    )
    trained(run, range(3))
    assert [lead is None for lead in run.state_dict()["lookahead"]["leads"]] == [True, True, 0, 0]
    assert torch.equal(run.eval_state_dict()["0.weight"], network()[0].weight)
    assert run.stats().bytes["lookahead"] == 4 * (16 * 3 + 3)
    early = copy.deepcopy(run.state_dict())
    model[0].requires_grad_(True)
    trained(run, range(3, 6))
    assert run.state_dict()["lookahead"]["leads"][0].abs().max() > 0
    assert not torch.equal(run.eval_state_dict()["0.weight"], run.fp32_state_dict()["0.weight"])
    later = copy.deepcopy(run.state_dict())
    run.load_state_dict(early)
    assert torch.equal(run.eval_state_dict()["0.weight"], run.fp32_state_dict()["0.weight"])
    run.load_state_dict(later)
    assert torch.equal(run.state_dict()["lookahead"]["leads"][0], later["lookahead"]["leads"][0])


@pytest.mark.parametrize("storage", ["fp32", "bf16"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("policy", ["fp32", "fp16", SPLIT])
def test_a_run_goes_on_bit_for_bit_from_its_state(policy, fused, storage, same_state):
    settings = ahead(storage=storage)

    def begun():
        return prepared(policy, fused_optimizer=fused, settings=settings, ema_decay=0.9)

    straight = trained(begun(), range(5))
    saved = copy.deepcopy(straight.state_dict())
    trained(straight, range(5, 10))
    resumed = begun()
    places = [lead.data_ptr() for lead in collect_state(resumed.engine)["lookahead"]["leads"]]
    resumed.load_state_dict(saved)
    trained(resumed, range(5, 10))
    assert same_state(straight.state_dict(), resumed.state_dict())
    # A captured step knows where they are.
    assert places == [
        lead.data_ptr() for lead in collect_state(resumed.engine)["lookahead"]["leads"]
    ]


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (None, "lookahead is a dict of 4 in the checkpoint and nothing here"),
        (ahead(interpolation=0.8), "interpolation is 0.9 in the checkpoint and 0.8 here"),
        (ahead(rate=0.1), "rate is 0.05 in the checkpoint and 0.1 here"),
        (
            ahead(storage="bf16"),
            "storage is fp32 in the checkpoint and bf16 here",
        ),
    ],
)
def test_a_state_of_other_settings_is_refused_and_changes_nothing(other, difference):
    saved = trained(prepared(), range(3)).state_dict()
    model = network()
    run = nc.prepare(model, OPTIMIZERS["AdamW"](model.parameters()), lookahead=other, policy="fp32")
    before = copy.deepcopy(run.fp32_state_dict())
    with pytest.raises(CheckpointError, match=difference):
        run.load_state_dict(saved)
    assert all(torch.equal(w, before[name]) for name, w in run.fp32_state_dict().items())


@pytest.mark.parametrize("fused", [False, True])
def test_a_run_whose_policy_changes_keeps_its_three_points_to_the_bit(fused):
    run = trained(prepared(fused_optimizer=fused), range(5))
    places = [lead.data_ptr() for lead in collect_state(run.engine)["lookahead"]["leads"]]
    for policy in (SPLIT, FP32, "fp32"):
        before, answer = bits_of(run), run.eval_state_dict()
        run.set_policy(policy)
        for then, now in zip(before, bits_of(run), strict=True):
            assert all(map(torch.equal, then, now))
        assert all(torch.equal(answer[name], w) for name, w in run.eval_state_dict().items())
        trained(run, range(5, 8))
    assert places == [lead.data_ptr() for lead in collect_state(run.engine)["lookahead"]["leads"]]
    with pytest.raises(UnsupportedError, match="master=split"):
        run.set_policy("fp32, params=bf16, master=kahan")


def test_moments_on_the_host_change_no_bit():
    def begun(*, offloaded):
        model = network()
        plan = nc.plan(model, SPLIT, hardware=nc.detect_hardware("cpu"))
        if offloaded:
            memory = MemoryPlan(requested=nc.Memory(offload=["optimizer"]), on_host=0)
            plan = dataclasses.replace(plan, memory=memory)
        return trained(prepared(plan, model=model, fused_optimizer=True), range(10))

    assert same_bits(begun(offloaded=False), begun(offloaded=True))


def answered(run):
    with run.use_eval_weights(), torch.no_grad(), run.autocast():
        return loss_of(run.model).item()


@pytest.mark.parametrize("moments", ["bf16", "int8"])
def test_answers_of_narrow_moments_are_nearly_those_of_wide_ones(moments):
    narrow = trained(prepared(f"{SPLIT}, moments={moments}"), range(100))
    wide = trained(prepared(SPLIT), range(100))
    way = loss_of(network()).item() - answered(wide)
    assert way > 0.1
    # Rounded by chance, to 8 digits or to some 5 %: errors that cancel over a hundred steps.
    assert abs(answered(narrow) - answered(wide)) < 0.05 * way


def test_several_optimizers_move_their_own_weights_of_one_point():
    model = network()
    parts = [
        torch.optim.AdamW(model[0].parameters(), lr=1e-2),
        torch.optim.SGD(model[2].parameters(), lr=1e-2),
    ]
    run = nc.prepare(model, parts, policy="fp32", lookahead=ahead())
    trained(run, range(10))
    answer, full = run.eval_state_dict(), run.fp32_state_dict()
    assert not any(torch.equal(answer[name], full[name]) for name in full)


def test_the_average_of_the_weights_is_that_of_where_gradients_are_taken():
    run = prepared(ema_decay=0.5)
    expected = [w.clone() for w in bits_of(run)[0]]
    for step in range(5):
        trained(run, [step])
        expected = [(a + w) / 2 for a, w in zip(expected, bits_of(run)[0], strict=True)]
    for average, wanted in zip(run.state_dict()["average"], expected, strict=True):
        torch.testing.assert_close(average, wanted, rtol=5 * 2.0**-23, atol=5 * 2.0**-24)


@pytest.mark.parametrize("policy", ["fp32", SPLIT])
def test_updates_that_move_nothing_count_as_lost_though_weights_move(policy):
    run = trained(prepared(policy, kind="SGD", lost_updates_every=1), range(10))
    for group in run.optimizer.param_groups:
        group.update(lr=1e-30)
    before = bits_of(run)[0]
    with run.autocast():
        outcome = run.step(loss_of(run.model))
    assert outcome.lost_updates == 1
    assert not torch.equal(bits_of(run)[0][0], before[0])


def test_a_prepared_model_says_that_it_looks_ahead():
    run = prepared(settings=ahead(storage="bf16"))
    assert "  lookahead   interpolation 0.9, rate 0.05, leads in bf16" in repr(run).splitlines()


def test_leads_lie_in_memory_as_their_weights():
    weight = nn.Parameter(torch.zeros(4, 3, 5, 5).to(memory_format=torch.channels_last))
    point = LookaheadPoint([weight], ahead(storage="bf16"))
    assert point.lead(0).stride() == weight.stride()
    assert point.lead(0).dtype == torch.bfloat16
    assert point.bytes() == 2 * weight.numel()


def test_a_lead_in_bf16_leaves_the_optimizer_every_digit():
    """Given gradients, where it is does not depend on how leads are rounded."""

    def ends(storage):
        model = nn.Module()
        model.weight = nn.Parameter(torch.linspace(1, 2, 100))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        run = nc.prepare(model, optimizer, policy="fp32", lookahead=ahead(storage=storage))
        for step in range(100):
            run.step((model.weight * torch.linspace(0, step, 100).sin()).sum())
        weight, lead = model.weight.detach(), run.engine.weights.lookahead.lead(0).float()
        return weight + lead, run.eval_state_dict()["weight"], lead

    (z, x, lead), (rounded_z, rounded_x, _) = ends("fp32"), ends("bf16")
    # Two roundings of fp32 a step, and no more.
    assert (z - rounded_z).abs().max() <= 100 * 2 * 2.0**-24 * 2
    # 2⁻⁹ of a way in each step, of which 0.95 are left by the next: at most twenty times that.
    assert (x - rounded_x).abs().max() <= 20 * 2.0**-9 * lead.abs().max() / 0.9 * 2
    assert not torch.equal(x, rounded_x)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"interpolation": 0.0}, "ema_decay=0.95 in place of lookahead"),
        ({"interpolation": 1.5}, "above 0 and up to 1"),
        ({"interpolation": math.nan}, "above 0 and up to 1"),
        ({"rate": 0.0}, "value is 0.05"),
        ({"rate": 1.01}, "value is 0.05"),
        ({"storage": "fp16"}, "fp32 or bf16"),
    ],
)
def test_senseless_settings_are_refused(settings, told):
    with pytest.raises(ConfigError, match=told):
        ahead(**settings)


def test_what_are_no_settings_is_refused():
    with pytest.raises(ConfigError, match=r"lookahead must be an nc\.Lookahead or None"):
        prepared(settings=True)


@pytest.mark.parametrize("kind", ["none", "kahan", "stochastic"])
def test_weights_that_lose_digits_are_refused_and_stay_as_they_were(kind):
    model = network()
    with pytest.raises(UnsupportedError, match=rf"master={kind}\. Write master=split"):
        prepared(f"fp32, params=bf16, master={kind}", model=model)
    assert model[0].weight.dtype == torch.float32


def test_an_optimizer_with_points_of_its_own_is_refused():
    schedulefree = pytest.importorskip("schedulefree")
    model = network()
    optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=1e-3)
    with pytest.raises(UnsupportedError, match="swaps its own weights"):
        nc.prepare(model, optimizer, policy="fp32", lookahead=ahead())


class Slow(torch.optim.Optimizer):
    """Steps another optimizer, and draws its weights back now and then."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__(inner.param_groups, {})

    def step(self, closure=None):
        self.inner.step(closure)


def test_an_optimizer_around_another_is_refused():
    model = network()
    optimizer = Slow(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(UnsupportedError, match="Pass the SGD inside it"):
        nc.prepare(model, optimizer, policy="fp32", lookahead=ahead())


def test_it_begins_when_it_is_time_and_takes_the_momentum_over():
    later = nc.Lookahead(begins_after=3)
    models = [nn.Linear(5, 2) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, betas=(0.8, 0.99)) for m in models]
    plain = nc.prepare(models[0], optimizers[0], policy="fp32")
    run = nc.prepare(models[1], optimizers[1], policy="fp32", lookahead=later)
    for step in range(6):
        x = torch.randn(7, 5, generator=torch.Generator().manual_seed(step))
        for each in (plain, run):
            with each.autocast():
                loss = each.model(x).square().mean()
            each.step(loss)
        same = all(map(torch.equal, models[0].parameters(), models[1].parameters()))
        assert same == (step < 3)
        assert optimizers[1].param_groups[0]["betas"] == (0.8 if step < 3 else 0.0, 0.99)
    run.release()
    assert optimizers[1].param_groups[0]["betas"] == (0.8, 0.99)


def test_momentum_that_is_no_average_is_refused_with_the_rate_that_replaces_it():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.75)
    with pytest.raises(UnsupportedError, match="momentum=0 and 4 times the learning rate"):
        nc.prepare(model, optimizer, policy="fp32", lookahead=nc.Lookahead())


@pytest.mark.parametrize("settings", [{"momentum": 1.0}, {"momentum": -0.1}, {"begins_after": -1}])
def test_a_momentum_or_a_beginning_that_cannot_be_is_refused(settings):
    (name,) = settings
    with pytest.raises(ConfigError, match=name):
        nc.Lookahead(**settings)
