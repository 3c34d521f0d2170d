"""What only a GPU can show: that emulated and hardware products agree, and that no step waits."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import narrowcast as nc

pytestmark = pytest.mark.gpu

ROWS, IN, OUT = 300, 512, 768
# The relative error of a sum of K products in fp32 is below K · 2⁻²⁴ of the sum of magnitudes.
FP32_SUM = 768 * 2.0**-24
# Hopper aligns 8-bit products to the largest of a group of 32 and keeps 14 bits of each group.
FP8_SUM = 768 / 32 * 2.0**-14


def products(policy, *, emulate):
    """The output and three gradients of one linear layer."""
    torch.manual_seed(0)
    layer = nn.Linear(IN, OUT).cuda()
    model = nn.Sequential(layer)
    x = torch.randn(ROWS, IN, device="cuda", requires_grad=True)
    # Small enough for the loss scale to leave them inside fp16.
    weights = torch.randn(ROWS, OUT, device="cuda") * 2.0**-10
    planned = nc.plan(
        model, policy, hardware=nc.detect_hardware(), emulate=emulate, skip_slow_fp8=False
    )  # or a plan keeps layers as small as this one in bf16
    hows = {"emulated"} if emulate else {"native"}
    assert {m.how for m in planned.modules} == hows
    run = nc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), policy=planned)
    with run.autocast():
        y = model(x)
    run.backward((y.float() * weights).sum())
    scale = run.stats().scale_history[0][1] if run.stats().scale_history else 65536.0
    scale = scale if planned.policy.needs_loss_scale else 1.0
    magnitudes = (
        x.detach().abs() @ layer.weight.detach().abs().t() + 1,
        weights.abs() @ layer.weight.detach().abs(),
        weights.abs().t() @ x.detach().abs(),
        weights.abs().sum(0),
    )
    found = (y.float(), x.grad / scale, layer.weight.grad / scale, layer.bias.grad / scale)
    return [t.detach().float() for t in found], magnitudes


@pytest.mark.parametrize(
    ("policy", "spacing", "summing"),
    [
        ("tf32", 0.0, FP32_SUM),
        ("bf16", 2.0**-7, FP32_SUM),
        ("fp16", 2.0**-10, FP32_SUM),
        ("fp8-tensor", 2.0**-7, FP8_SUM),
        ("fp8-row", 2.0**-7, FP8_SUM),
        ("fp8-block", 2.0**-7, FP8_SUM),
        ("fp8-delayed", 2.0**-7, FP8_SUM),
    ],
)
def test_emulated_and_hardware_products_agree(policy, spacing, summing):
    native, magnitudes = products(policy, emulate=None)
    emulated, _ = products(policy, emulate=True)
    for a, b, size in zip(native, emulated, magnitudes, strict=True):
        # Sums may differ by their rounding, and so land on neighbouring results.
        excess = ((a - b).abs() - spacing * b.abs()) / size
        assert excess.max() <= summing


@pytest.mark.parametrize("fused_optimizer", [None, False])
@pytest.mark.parametrize(
    "policy",
    ["fp32", "bf16", "fp16", "fp8-tensor", "bf16-pure", "bf16, params=bf16, master=split"],
)
def test_a_step_never_waits_for_the_device_and_a_skip_moves_nothing(
    policy, fused_optimizer, host_never_waits
):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 16)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    settings = {"clip_norm": 1.0, "ema_decay": 0.9, "fused_optimizer": fused_optimizer}
    run = nc.prepare(model, optimizer, policy=policy, scheduler=scheduler, **settings)
    x, y = torch.randn(32, 64, device="cuda"), torch.randint(0, 16, (32,), device="cuda")
    bad = torch.tensor(float("inf"), device="cuda")

    def step(factor=None):
        with run.autocast():
            loss = F.cross_entropy(model(x), y)
        return run.step(loss if factor is None else loss * factor)

    step()
    run.sync()
    with host_never_waits():
        outcomes = [step(), step(bad), step()]
    assert [o.applied for o in outcomes] == [True, False, True]
    assert [o.lr for o in outcomes] == [1e-2 * 0.5, 1e-2 * 0.25, 1e-2 * 0.25]
    assert all(p.isfinite().all() for p in model.parameters())
    steps = {int(state["step"]) for state in optimizer.state.values()}
    assert steps == {3}


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16"])
def test_neither_buffers_nor_clipping_by_hand_make_the_host_wait(policy, host_never_waits):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 16)).cuda()
    run = nc.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), policy=policy)
    x, y = torch.randn(32, 64, device="cuda"), torch.randint(0, 16, (32,), device="cuda")
    bad = torch.tensor(float("inf"), device="cuda")

    def step(factor=None):
        run.zero_grad()
        with run.autocast():
            loss = F.cross_entropy(model(x), y)
        run.backward(loss if factor is None else loss * factor)
        run.unscale()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        return run.step()

    step()
    run.sync()
    with host_never_waits():
        first = step()
        kept = [buffer.clone() for buffer in model.buffers()]
        second = step(bad)
        after = [buffer.clone() for buffer in model.buffers()]
    assert (first.applied, second.applied) == (True, False)
    assert all(map(torch.equal, after, kept))


@pytest.mark.parametrize("policy", ["bf16", "bf16, params=bf16, master=split"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN], ids=lambda c: c.__name__)
def test_a_recurrent_layer_is_in_bf16_and_not_in_fp16(cuda, kind, policy):
    torch.manual_seed(0)
    model = kind(16, 16, num_layers=2, batch_first=True).to(cuda)
    x = torch.randn(4, 6, 16, device=cuda)
    wanted = model(x)[0]
    run = nc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy=policy)
    with run.autocast():
        output = model(x * 1e5)[0]  # beyond fp16
        near = model(x)[0]
    assert near.dtype == torch.bfloat16
    assert output.isfinite().all()
    assert (near.float() - wanted).abs().max() < 0.05
    assert run.step(near.float().square().mean()).applied
