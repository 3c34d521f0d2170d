"""What a model holds and computes itself, beside its modules: `.` names it."""

import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast.errors import ConfigError
from narrowcast.precision.plan.plan import make_plan


class Mixer(nn.Module):
    """Has weights of its own, some of them complex numbers in pairs, and a product of its own."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.randn(16, 16) / 4)
        self.bag = nn.EmbeddingBag(20, 16, mode="sum")
        self.filter = Filter()
        self.head = nn.Linear(16, 16)

    def forward(self, ids, weights):
        x = self.filter(self.bag(ids, per_sample_weights=weights))
        return self.head(x @ self.gain)


class Filter(nn.Module):
    def __init__(self):
        super().__init__()
        self.spectrum = nn.Parameter(torch.randn(9, 2))

    def forward(self, x):
        spectrum = torch.view_as_complex(self.spectrum)
        return torch.fft.irfft(torch.fft.rfft(x.float()) * spectrum, n=16)


IDS = torch.arange(12).view(4, 3)
WEIGHTS = torch.rand(4, 3, generator=torch.Generator().manual_seed(0))


def prepared(policy):
    torch.manual_seed(0)
    model = Mixer()
    return nc.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), policy=policy)


@pytest.mark.parametrize("policy", ["bf16, params=bf16, master=split", "fp16, params=fp16"])
def test_samples_with_weights_and_complex_weights_train_in_16_bits(policy):
    run = prepared(policy)
    assert "complex" in run.plan.module("filter").reason
    assert run.model.filter.spectrum.dtype == torch.float32
    assert run.model.bag.weight.dtype != torch.float32
    losses = []
    for _ in range(20):
        with run.autocast():
            loss = run.model(IDS, WEIGHTS).float().square().mean()
        run.step(loss)
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_a_point_names_the_model_itself_and_nothing_inside_it():
    run = prepared("bf16, params=bf16, master=split; .: fp32, params=fp32")
    assert run.model.gain.dtype == torch.float32
    assert run.model.head.weight.dtype == torch.bfloat16
    assert run.plan.module("").policy.forward == "fp32"
    assert run.plan.module("head").policy.forward == "bf16"


def test_the_products_of_the_model_itself_are_in_its_format_and_those_inside_in_theirs():
    run = prepared("bf16; .: fp32")
    seen = {}
    run.model.head.register_forward_hook(lambda m, x, y: seen.update(x=x[0], y=y))
    with run.autocast():
        run.model(IDS, WEIGHTS)
        mixed = run.model.filter(run.model.bag(IDS, per_sample_weights=WEIGHTS))
    assert torch.equal(seen["x"], mixed @ run.model.gain)  # plain fp32
    assert torch.equal(seen["y"].float(), seen["y"].bfloat16().float())
    run.set_policy("bf16")
    with run.autocast():
        run.model(IDS, WEIGHTS)
    assert not torch.equal(seen["x"], mixed @ run.model.gain)


def test_a_point_stands_for_a_model_without_weights_of_its_own_too(cpu):
    model = nn.Sequential(nn.Linear(16, 16))
    assert make_plan(model, "bf16; .: fp32", hardware=cpu).module("").policy.forward == "fp32"
    assert not any(m.name == "" for m in make_plan(model, "bf16", hardware=cpu).modules)
    with pytest.raises(ConfigError, match="matches no module"):
        make_plan(model, "bf16; ..: fp32", hardware=cpu)
