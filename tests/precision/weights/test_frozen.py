"""Weights that nobody trains stay exactly what the user gave, whatever the policy keeps."""

import copy

import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast.errors import ConfigError

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
POLICIES = ["bf16, params=bf16", "fp16, params=fp16", "fp32, params=bf16", "bf16-pure",
            "fp8-tensor, params=bf16", "bf16, params=bf16, reduce=bf16"]  # fmt: skip
MASTERS = ("fp32", "split", "kahan", "stochastic", "none")


class Mixed(nn.Module):
    """One of each kind of module, for weights to be frozen in."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(10, 16)
        self.linear = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.conv = nn.Conv1d(16, 16, 3, padding=1)
        self.batch_norm = nn.BatchNorm1d(16)
        self.lstm = nn.LSTM(16, 16, batch_first=True)
        self.cell = nn.GRUCell(16, 16)
        self.bilinear = nn.Bilinear(16, 16, 4)

    def forward(self, tokens):
        x = self.norm(self.linear(self.embedding(tokens)))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x + self.batch_norm(self.conv(x.transpose(1, 2))).transpose(1, 2)
        x = self.lstm(x)[0].mean(1)
        return self.bilinear(self.cell(x), x)


def freeze(model, which):
    names = [name for name, _ in model.named_parameters()]
    for i, (name, p) in enumerate(model.named_parameters()):
        frozen = {"weights": name.rpartition(".")[2].startswith(("weight", "in_proj_weight")),
                  "biases": "bias" in name, "first": i < len(names) // 2,
                  "last": i >= len(names) // 2, "every second": i % 2 == 0}[which]  # fmt: skip
        p.requires_grad_(not frozen)
    return model


def batch(device="cpu"):
    return torch.randint(0, 10, (4, 6), generator=torch.Generator().manual_seed(0)).to(device)


# cuDNN would have them side by side, and what is widened or narrowed on the way is not.
@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single:UserWarning")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("which", ["weights", "biases", "first", "last", "every second"])
@pytest.mark.parametrize("policy", POLICIES)
def test_modules_with_some_weights_frozen_compute_and_train(policy, which, device):
    model = freeze(Mixed(), which).to(device)
    plain = copy.deepcopy(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    run = nc.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), policy=policy)
    with run.autocast():
        loss = model(batch(device)).float().square().mean()
    wanted = plain(batch(device)).square().mean()
    # Eight bits of a number, several layers deep.
    assert abs(loss.item() - wanted.item()) < 0.15 * wanted.item() + 1e-3
    assert run.step(loss).applied
    for name, p in model.named_parameters():
        if not p.requires_grad:
            assert p.dtype == torch.float32
            assert torch.equal(p, before[name]), name
    lstm = {p.dtype for p in model.lstm.parameters()}
    assert len(lstm) == 1
    model.eval()
    with torch.no_grad():
        assert model(batch(device)).isfinite().all()
    full = run.fp32_state_dict()
    released = run.release()
    for name, p in released.named_parameters():
        assert p.dtype == torch.float32
        assert torch.equal(p, full[name])
        assert p.requires_grad or torch.equal(p, before[name])


def extremes():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    net[0].requires_grad_(False)
    with torch.no_grad():
        net[0].weight[0, 0] = 1e6
        net[0].weight[0, 1] = 1 + 2**-20
    net.register_parameter(
        "spare", nn.Parameter(torch.tensor([1 / 3]).double(), requires_grad=False)
    )
    return net


@pytest.mark.parametrize("in_optimizer", [True, False])
@pytest.mark.parametrize("policy", ["fp16, params=fp16", "bf16, params=bf16, master=split"])
def test_a_frozen_weight_keeps_every_digit_and_its_dtype(policy, in_optimizer):
    net = extremes()
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    held = net.parameters() if in_optimizer else [p for p in net.parameters() if p.requires_grad]
    run = nc.prepare(net, torch.optim.AdamW(held, lr=0.01), policy=policy)
    assert net[1].weight.dtype in (torch.bfloat16, torch.float16)
    frozen = ["0.weight", "0.bias", "spare"]
    for name in frozen:
        assert torch.equal(dict(net.named_parameters())[name], before[name])
    run.set_policy(nc.plan(net, "bf16, params=bf16, master=kahan", hardware=run.plan.hardware))
    for kept in (run.fp32_state_dict(), dict(run.release().named_parameters())):
        for name, value in before.items():
            assert kept[name].dtype == value.dtype, name
            if name in frozen:
                assert torch.equal(kept[name], value), name


@pytest.mark.parametrize("master", MASTERS)
def test_a_weight_that_the_user_updates_by_hand_follows_in_full(master):
    """A momentum encoder: no gradient, no optimizer, an average of the trained one."""

    def pair():
        torch.manual_seed(0)
        net = nn.ModuleDict({"online": nn.Linear(8, 8), "target": nn.Linear(8, 8)})
        net["target"].requires_grad_(False)
        return net

    net = pair()
    run = nc.prepare(
        net,
        torch.optim.SGD(net["online"].parameters(), lr=1.0),
        policy=f"fp32, params=bf16, master={master}",
    )
    wanted = net["target"].weight.clone()
    for _ in range(20):
        run.step((net["online"].weight * 2**-10).sum())
        with torch.no_grad():
            net["target"].weight.lerp_(net["online"].weight.float(), 2**-10)
            wanted.lerp_(net["online"].weight.float(), 2**-10)
    assert net["target"].weight.dtype == torch.float32
    assert torch.equal(net["target"].weight, wanted)
    assert not torch.equal(wanted, pair()["target"].weight)


def test_a_weight_that_no_optimizer_holds_stays_as_it_came():
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    before = net[0].weight.detach().clone()
    run = nc.prepare(
        net, torch.optim.SGD(net[1].parameters(), lr=0.1), policy="bf16, params=bf16, master=none"
    )
    assert torch.equal(net[0].weight, before)
    assert net[1].weight.dtype == torch.bfloat16
    assert torch.equal(run.fp32_state_dict()["0.weight"], before)


@pytest.mark.parametrize("fused_optimizer", [True, False])
def test_a_weight_thawed_later_trains_in_fp32_as_torch_would(fused_optimizer):
    def made():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
        net[0].requires_grad_(False)
        return net, torch.optim.AdamW(net.parameters(), lr=2**-12)

    net, optimizer = made()
    run = nc.prepare(net, optimizer, policy="bf16, params=bf16", fused_optimizer=fused_optimizer)
    plain, theirs = made()
    for thawed in (False, True, True, True):
        net[0].requires_grad_(thawed)
        plain[0].requires_grad_(thawed)
        for each in (net, plain):
            loss = sum((p * p.new_ones(()) * 0.5).sum() for p in each.parameters())
            if each is net:
                assert run.step(loss).applied
            else:
                theirs.zero_grad()
                loss.backward()
                theirs.step()
    assert net[0].weight.dtype == torch.float32
    assert torch.allclose(net[0].weight, plain[0].weight, rtol=2**-22, atol=0)
    assert fused_optimizer or torch.equal(net[0].weight, plain[0].weight)


def test_a_weight_that_came_frozen_in_16_bits_is_not_trained_in_them():
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    net[0].requires_grad_(False).bfloat16()
    run = nc.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), policy="bf16")
    net[0].requires_grad_(True)
    with run.autocast():
        loss = net(torch.ones(2, 8)).float().sum()
    with pytest.raises(ConfigError, match=r"0.weight was frozen in torch.bfloat16 at prepare\(\)"):
        run.step(loss)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy", POLICIES)
def test_adapters_train_on_a_base_that_came_in_bf16(policy, device):
    class Adapted(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base
            self.down, self.up = nn.Linear(16, 4, bias=False), nn.Linear(4, 16, bias=False)

        def forward(self, x):
            return self.base(x) + self.up(self.down(x))

    torch.manual_seed(0)
    base = nn.Sequential(
        nn.Linear(16, 16), nn.LayerNorm(16), nn.RMSNorm(16), nn.GroupNorm(2, 16), nn.Linear(16, 16)
    )
    base.bfloat16().requires_grad_(False)
    model = Adapted(base).to(device)
    before = {name: p.detach().clone() for name, p in base.named_parameters()}
    optimizer = torch.optim.AdamW([*model.down.parameters(), *model.up.parameters()], lr=0.01)
    run = nc.prepare(model, optimizer, policy=policy)
    for _ in range(3):
        with run.autocast():
            loss = model(torch.ones(4, 16, device=device)).float().square().mean()
        assert run.step(loss).applied
    for name, p in base.named_parameters():
        assert p.dtype == torch.bfloat16
        assert torch.equal(p, before[name])
    assert run.fp32_state_dict()["base.0.weight"].dtype == torch.bfloat16
