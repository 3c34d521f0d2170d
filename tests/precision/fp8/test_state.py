"""When a weight kept in fp8 is made anew, and where."""

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import narrowcast as nc
from narrowcast.hardware import Hardware, Support, detect_hardware
from narrowcast.kernels.launch import interpreted
from narrowcast.numerics import E4M3, scale_for
from narrowcast.precision.fp8.linear import Fp8Linear
from narrowcast.precision.fp8.state import Fp8Model

DEVICE = "cpu" if interpreted() else "cuda"
POLICIES = ["fp8-tensor", "fp8-delayed"]
pytestmark = pytest.mark.usefixtures("fp8_products")


def hardware():
    """On a CPU, one that claims to have fp8 products, which torch 2.13 has, only slowly."""
    if DEVICE == "cuda":
        return detect_hardware("cuda")
    native = Support(how="native", reason="claimed")
    names = ("fp32", "bf16", "e4m3", "e5m2")
    products = dict.fromkeys(names, native)
    return Hardware(device="cpu", name="a CPU", memory_bytes=2**30, products=products)


def prepared(policy, *, frozen=False, optimizer=torch.optim.AdamW, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16)).to(DEVICE)
    model[0].weight.requires_grad_(not frozen)
    trained = [p for p in model.parameters() if p.requires_grad]
    plan = nc.plan(model, policy, hardware=hardware(), skip_slow_fp8=False)
    run = nc.prepare(model, optimizer(trained, lr=0.05), policy=plan, **settings)
    assert isinstance(model[0], Fp8Linear)
    return run


def x(seed=0):
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def forward(run, seed=0):
    with run.autocast():
        return run.model(x(seed))


def step(run, seed=0, *, factor=1.0):
    return run.step(F.mse_loss(forward(run, seed).float(), x(seed)[:, :16]) * factor)


def kept(layer):
    """The weight as it is kept, in fp32, from both layouts."""
    made = layer.nc_weight
    assert torch.equal(made.rowwise.view(torch.uint8), made.columnwise.view(torch.uint8).t())
    return made.rowwise.float() * made.scale_inv


def is_current(layer):
    """Whether what is kept is the weight itself, rounded by torch with the scale that is kept."""
    inverse = layer.nc_weight.scale_inv
    rounded = (layer.weight.detach().float() / inverse).clamp(-448, 448).to(torch.float8_e4m3fn)
    return torch.equal(kept(layer), rounded.float() * inverse)


def places(layer):
    return [t.data_ptr() for t in layer.nc_weight]


def by_copy(run):
    with torch.no_grad():
        run.model[0].weight.copy_(run.model[0].weight * -1.5)


def by_step(run):
    assert step(run).applied


def by_loading(run):
    run.model.load_state_dict({k: v * 3 for k, v in run.model.state_dict().items()})


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("change", [by_copy, by_step, by_loading])
def test_a_weight_that_changed_is_made_anew_in_the_same_memory(policy, change):
    run = prepared(policy)
    layer = run.model[0]
    forward(run)
    before, where = kept(layer).clone(), places(layer)
    assert is_current(layer)
    change(run)
    forward(run)
    assert is_current(layer)
    assert not torch.equal(kept(layer), before)
    assert places(layer) == where


@pytest.mark.parametrize("policy", POLICIES)
def test_a_weight_that_did_not_change_is_not_touched(policy):
    run = prepared(policy)
    layer = run.model[0]
    forward(run)
    layer.nc_weight.rowwise.view(torch.uint8).fill_(0x38)  # whoever writes it again would undo this
    forward(run, seed=1)
    with torch.no_grad():
        run.model(x(2))
    assert (layer.nc_weight.rowwise.float() == 1).all()
    by_copy(run)
    forward(run)
    assert is_current(layer)


@pytest.mark.parametrize("policy", POLICIES)
def test_one_of_several_micro_batches_makes_the_fp8_weight_and_so_does_the_next_step(policy):
    run = prepared(policy)
    for _ in range(3):
        for seed in range(2):
            loss = forward(run, seed).float().square().mean()
            run.backward(loss / 2)
            assert is_current(run.model[0])
        run.step()


def test_a_scale_for_itself_follows_the_weight_and_one_from_the_past_comes_after_the_step():
    own, delayed = prepared("fp8-tensor"), prepared("fp8-delayed")
    for run in (own, delayed):
        forward(run)
        with torch.no_grad():
            run.model[0].weight.mul_(64.0)
        forward(run)
    wanted = 1 / scale_for(own.model[0].weight, E4M3).item()
    assert own.model[0].nc_weight.scale_inv.item() == wanted
    assert delayed.model[0].nc_weight.scale_inv.item() == wanted / 64
    step(delayed)
    forward(delayed)
    assert delayed.model[0].nc_weight.scale_inv.item() == wanted
    assert is_current(delayed.model[0])


@pytest.mark.parametrize("policy", POLICIES)
def test_a_frozen_weight_is_made_once(policy):
    run = prepared(policy, frozen=True)
    layer = run.model[0]
    forward(run)
    assert is_current(layer)
    layer.nc_weight.rowwise.view(torch.uint8).fill_(0x38)
    for seed in range(3):
        assert step(run, seed).applied
    forward(run)
    assert (layer.nc_weight.rowwise.float() == 1).all()


@pytest.mark.parametrize("frozen_first", [False, True])
def test_a_weight_that_is_frozen_or_thawed_on_the_way_stays_what_it_is(frozen_first):
    """A frozen one has a scale of its own; a trained one has that of the past, which moves."""
    run = prepared("fp8-delayed")
    layer = run.model[0]
    layer.weight.requires_grad_(not frozen_first)
    with torch.no_grad():
        layer.weight.mul_(2.0**8)
    step(run)
    with torch.no_grad():
        layer.weight.mul_(2.0**-8)
    layer.weight.requires_grad_(frozen_first)
    for seed in range(20):
        step(run, seed)
        forward(run)
        assert is_current(layer)
    # Kept to 3 bits of its largest value, whatever the past was.
    error = (kept(layer) - layer.weight.detach()).abs().max()
    assert error <= 2.0**-4 * layer.weight.detach().abs().max()


def test_a_skipped_step_leaves_weights_and_scales_alone():
    run = prepared("fp8-delayed")
    step(run)
    forward(run)
    before, inverse = kept(run.model[0]).clone(), run.model[0].nc_weight.scale_inv.item()
    assert not step(run, factor=float("inf")).applied
    forward(run)
    assert torch.equal(kept(run.model[0]), before)
    assert run.model[0].nc_weight.scale_inv.item() == inverse


@pytest.mark.parametrize("policy", POLICIES)
def test_a_resumed_run_goes_on_bit_for_bit(policy):
    straight, first, second = (prepared(policy) for _ in range(3))
    for seed in range(8):
        step(straight, seed)
    for seed in range(4):
        step(first, seed)
    step(second, 77, factor=3.0)  # it need not be fresh
    second.load_state_dict(first.state_dict())
    for seed in range(4, 8):
        step(second, seed)
    theirs = straight.fp32_state_dict()
    assert all(torch.equal(theirs[name], value) for name, value in second.fp32_state_dict().items())


def test_two_layouts_of_a_byte_each_are_counted_and_a_model_without_fp8_has_none():
    run = prepared("fp8-tensor")
    assert Fp8Model(run.model).bytes() == {}  # none made yet
    forward(run)
    assert Fp8Model(run.model).bytes() == {"fp8": 2 * (32 * 48 + 48 * 16)}
    plain = Fp8Model(nn.Linear(4, 4))
    plain.refresh()
    plain.advance(torch.tensor(True), loss_growth=None)
    assert (plain.bytes(), plain.state_dict()) == ({}, None)


def test_gradients_do_not_saturate_when_the_loss_scale_grows_or_backs_off():
    """A power of two more or less changes no digit: every step has the same norm."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))
    run = nc.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        policy="fp8-delayed, output=fp16",
        loss_scale=nc.LossScale(init_scale=2.0**10, growth_interval=1),
    )
    x, norms, scales = torch.randn(64, 32), [], []
    for step in range(8):
        with run.autocast():
            loss = model(x).float().square().mean()
        outcome = run.step(loss * (torch.inf if step == 4 else 1.0))
        if outcome.applied:
            norms.append(outcome.grad_norm)
            scales.append(outcome.loss_scale)
    assert scales == [2.0**n for n in (10, 11, 12, 13, 13, 14, 15)]
    assert set(norms) == {norms[0]}


def test_scales_of_a_first_step_that_was_skipped_are_taken_back():
    run, straight = prepared("fp8-delayed"), prepared("fp8-delayed")
    assert not step(run, factor=float("inf")).applied
    assert not step(run, factor=2.0**100).applied
    for seed in range(3):
        step(run, seed)
        step(straight, seed)
    theirs = straight.fp32_state_dict()
    assert all(torch.equal(theirs[name], value) for name, value in run.fp32_state_dict().items())


def test_going_back_to_before_the_first_step_makes_the_weight_with_a_scale_of_its_own():
    run, fresh = prepared("fp8-delayed"), prepared("fp8-delayed")
    state = copy.deepcopy(fresh.state_dict())
    step(run)
    run.load_state_dict(state)
    assert torch.equal(forward(run), forward(fresh))
    assert is_current(run.model[0])


def test_an_evaluation_of_averaged_weights_leaves_no_trace_in_the_histories():
    run, straight = (prepared("fp8-delayed", ema_decay=0.5) for _ in range(2))
    for each in (run, straight):
        step(each)
        for average in each.state_dict()["average"]:
            average.mul_(100)  # far from the weights
    with run.use_ema(), torch.no_grad():
        forward(run)
        assert is_current(run.model[0])
    with torch.no_grad():
        forward(run)
    assert is_current(run.model[0])
    for each in (run, straight):
        step(each)
    mine, theirs = run.state_dict()["amax"], straight.state_dict()["amax"]
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_weight_first_made_in_inference_mode_can_be_trained(policy):
    run = prepared(policy)
    with torch.inference_mode():
        forward(run)
    assert step(run).applied
    with torch.inference_mode():
        forward(run)
    assert step(run).applied
    forward(run)
    assert is_current(run.model[0])


@pytest.mark.parametrize("policy", ["fp8-tensor", "fp8-delayed", "fp8-row"])
def test_a_batch_without_rows_has_gradients_of_zero(policy):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 16)).to(DEVICE)
    plan = nc.plan(model, policy, hardware=hardware(), skip_slow_fp8=False)
    run = nc.prepare(model, torch.optim.AdamW(model.parameters()), policy=plan)
    with run.autocast():
        output = model(x()[:0])
    assert output.shape == (0, 16)
    run.backward(output.float().sum())
    assert all(not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("emulate", [False, True])
def test_an_evaluation_before_the_first_step_decides_no_scale(emulate):
    runs = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 16)).to(DEVICE)
        plan = nc.plan(
            model, "fp8-delayed", hardware=hardware(), skip_slow_fp8=False, emulate=emulate
        )
        runs.append(nc.prepare(model, torch.optim.AdamW(model.parameters()), policy=plan))
    run, straight = runs
    with torch.no_grad(), run.autocast():
        run.model(x() * 2.0**20)
    for each in runs:
        step(each)
    mine, theirs = run.state_dict()["amax"], straight.state_dict()["amax"]
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    theirs = straight.fp32_state_dict()
    assert all(torch.equal(theirs[name], value) for name, value in run.fp32_state_dict().items())


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("bad", [(), (0, 1), (3, 4)])
def test_passes_aside_leave_the_course_of_a_run_as_it_is(policy, bad):
    """Fp8 weights, the scales they were made with, and what was noted of them on the way."""
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(16, 32, generator=generator).to(DEVICE) for _ in range(7)]
    ends = []
    for looks in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16)).to(DEVICE)
        plan = nc.plan(model, policy, hardware=hardware(), skip_slow_fp8=False)
        run = nc.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05), policy=plan)
        for step, x in enumerate(drawn):
            given = x * float("nan") if step in bad else x
            for aside in (True, False) if looks else (False,):
                with run.engine.isolated() if aside else contextlib.nullcontext():
                    with run.autocast():
                        loss = F.mse_loss(run.model(given * 3 if aside else given), given[:, :16])
                    run.backward(loss)
            assert run.step().applied is (step not in bad)
            if looks:
                with run.engine.isolated(), run.autocast():
                    run.model(given)
        ends.append([run.state_dict()["amax"], *run.fp32_state_dict().values()])
    (histories, *weights), (other_histories, *other_weights) = ends
    assert (histories is None) is (policy != "fp8-delayed")
    for name in histories or {}:
        assert torch.equal(histories[name], other_histories[name])
    assert all(torch.equal(a, b) for a, b in zip(weights, other_weights, strict=True))


class Branching(nn.Module):
    """Two layers, of which the second is used only when asked for."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.always, self.late = nn.Linear(32, 32), nn.Linear(32, 32)
        self.uses_late = False

    def forward(self, x):
        x = self.always(x)
        return self.late(x) if self.uses_late else x


@pytest.mark.parametrize("native", [True, False])
def test_a_layer_first_used_in_a_skipped_step_takes_its_scale_from_the_next(native):
    def trained(*, skips):
        model = Branching().to(DEVICE)
        device, emulate = (hardware(), None) if native else (detect_hardware(DEVICE), True)
        plan = nc.plan(model, "fp8-delayed", hardware=device, skip_slow_fp8=False, emulate=emulate)
        run = nc.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05), policy=plan)
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0)).to(DEVICE)
        for number in range(4):
            model.uses_late = number >= 2
            if number == 2 and skips:
                with run.autocast():
                    loss = model(x).float().square().mean() * 2.0**100
                assert not run.step(loss).applied
            with run.autocast():
                loss = model(x).float().square().mean()
            assert run.step(loss).applied
        return run.fp32_state_dict()

    straight = trained(skips=False)
    for name, value in trained(skips=True).items():
        assert torch.equal(value, straight[name]), name


@pytest.mark.parametrize("policy", POLICIES)
def test_a_backward_pass_through_a_weight_that_has_moved_on_is_refused_as_torch_does(policy):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16)).to(DEVICE)
    plan = nc.plan(model, policy, hardware=hardware(), skip_slow_fp8=False)
    run = nc.prepare(model, torch.optim.AdamW(model.parameters()), policy=plan)
    before = forward(run).float().sum()
    with torch.no_grad():
        model[2].weight.mul_(2)
    forward(run)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        before.backward()


@pytest.mark.parametrize("policy", POLICIES)
def test_weights_exchanged_through_data_for_an_evaluation_are_not_trained_with(policy):
    run = prepared(policy)
    step(run)
    expected = forward(run).clone()
    before = kept(run.model[0]).clone()
    run.model.eval()
    for p in run.model.parameters():
        p.data.neg_()
    with torch.no_grad():
        forward(run)
    assert torch.equal(kept(run.model[0]), -before)
    for p in run.model.parameters():
        p.data.neg_()
    run.model.train()
    assert torch.equal(forward(run), expected)
