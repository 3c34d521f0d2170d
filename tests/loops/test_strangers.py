"""What people try on the first day, and nobody had thought of."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import narrowcast as nc
from narrowcast.errors import ConfigError

POLICIES = ["fp32", "tf32", "bf16", "fp16", "fp8-tensor", "bf16, params=bf16, master=split"]
X = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))


def prepared(model, policy, *more):
    weights = [*model.parameters(), *more]
    return nc.prepare(model, torch.optim.AdamW(weights, lr=1e-2), policy=policy)


class WritesOver(nn.Module):
    """Writes to what its layers return, as heads with `ReLU(inplace=True)` do."""

    def __init__(self):
        super().__init__()
        self.up, self.relu = nn.Linear(16, 16), nn.ReLU(inplace=True)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.down = nn.Linear(16, 16)

    def forward(self, x):
        h = self.relu(self.up(x))
        mixed = self.attention(h[None], h[None], h[None], need_weights=False)[0]
        mixed += h
        y = self.down(mixed[0])
        y *= 0.5
        y[:, :2] = 0
        return y.masked_fill_(y > 10, 0)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_layer_returns_may_be_written_to(policy):
    torch.manual_seed(0)
    model = WritesOver()
    plain = copy.deepcopy(model)
    run = prepared(model, policy)
    with run.autocast():
        loss = model(X).float().square().mean()
    wanted = plain(X).square().mean()
    assert abs(loss.item() - wanted.item()) < 0.1 * wanted.item()
    assert run.step(loss).applied


@pytest.mark.parametrize("policy", ["bf16", "fp16", "tf32", "fp8-tensor"])
def test_float64_is_left_alone_as_autocast_does(policy):
    run = prepared(nn.Linear(16, 16), policy)
    x, w = X.double(), torch.randn(16, 16, dtype=torch.float64)
    kernel = w.reshape(16, 16, 1)
    with run.autocast():
        found = [x @ w, F.linear(x, w), torch.einsum("ij,jk->ik", x, w), x.t().mm(w)]
        convolved = F.conv1d(x[None].transpose(1, 2), kernel)
    wanted = [x @ w, F.linear(x, w), torch.einsum("ij,jk->ik", x, w), x.t().mm(w)]
    assert all(map(torch.equal, found, wanted))
    assert convolved.dtype == torch.float64
    with run.autocast(), pytest.raises(RuntimeError):
        F.linear(X.long(), w.float())


@pytest.mark.parametrize("policy", POLICIES)
def test_a_weight_beside_the_model_is_saved_and_resumed(policy):
    def fresh():
        torch.manual_seed(0)
        model, temperature = nn.Linear(16, 16), nn.Parameter(torch.zeros(()))
        return prepared(model, policy, temperature), temperature

    def train(run, temperature, steps):
        for _ in range(steps):
            with run.autocast():
                loss = (run.model(X).float() * temperature.exp()).square().mean()
            run.step(loss)

    straight, t = fresh()
    train(straight, t, 3)
    saved = copy.deepcopy(straight.state_dict())
    train(straight, t, 3)
    resumed, other = fresh()
    resumed.load_state_dict(saved)
    train(resumed, other, 3)
    assert torch.equal(t, other)
    assert torch.equal(straight.fp32_state_dict()["weight"], resumed.fp32_state_dict()["weight"])


def test_what_cannot_be_is_said_before_anything_is_changed():
    lazy, optimizer = nn.LazyLinear(4), torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(ConfigError, match="no shape yet"):
        nc.prepare(lazy, optimizer, policy="fp32")
    run = prepared(nn.Linear(16, 16), "fp32")
    with pytest.raises(ConfigError, match=r"not loss.item\(\)"):
        run.step(1.0)


@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_shapes_may_be_dynamic_in_compiled_models(policy):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    run = prepared(model, policy)
    compiled = torch.compile(model, backend="aot_eager", dynamic=True)
    for rows in (16, 7, 5):
        with run.autocast():
            loss = compiled(X[:rows]).float().square().mean()
            eager = model(X[:rows]).float().square().mean()
        assert torch.equal(loss, eager)
        assert run.step(loss).applied
    torch._dynamo.reset()


def test_a_look_at_the_state_of_a_weight_does_not_cost_the_checkpoint():
    run = prepared(nn.Linear(16, 16), "bf16, params=bf16, master=split")
    with run.autocast():
        loss = run.model(X).float().square().mean()
    run.step(loss)
    before = copy.deepcopy(run.state_dict()["optimizer"])
    assert run.optimizer.state[run.model.weight] == {}
    assert len(run.optimizer.state_dict()["state"]) == 2
    assert run.state_dict()["optimizer"][0]["weights"] == before[0]["weights"]


def test_a_weight_frozen_by_way_of_the_optimizer_is_refused():
    run = prepared(nn.Linear(16, 16), "bf16, params=bf16, master=split")
    for p in run.optimizer.param_groups[0]["params"]:
        p.requires_grad_(False)
    with run.autocast():
        loss = run.model(X).float().square().mean()
    with pytest.raises(ConfigError, match="the weight of the model"):
        run.step(loss)
