"""Weights tied through memory, and not by being one parameter."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD

import narrowcast as nc
from narrowcast.errors import UnsupportedError

X = torch.randn(16, 12, generator=torch.Generator().manual_seed(1))


class Autoencoder(nn.Module):
    """Whose decoder is its encoder, transposed."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.decoder = nn.Linear(12, 8), nn.Linear(8, 12)
        if how == "a view":
            self.decoder.weight = nn.Parameter(self.encoder.weight.t())
        elif how == "data":
            self.decoder.weight.data = self.encoder.weight.data.t()
        elif how == "some of it":
            self.decoder.weight.data = self.encoder.weight.data.view(-1)[:96].view(12, 8)

    def forward(self, x):
        return self.decoder(torch.tanh(self.encoder(x)))


def losses(model, step):
    found = []
    for _ in range(4):
        loss = F.mse_loss(model(X), X)
        step(loss)
        found.append(loss.item())
    return found


@pytest.mark.parametrize("how", ["a view", "data", "some of it"])
@pytest.mark.parametrize("policy", ["bf16, params=bf16", "bf16-pure", "fp16, params=fp16"])
def test_16_bits_of_their_own_are_refused(how, policy):
    model = Autoencoder(how)
    with pytest.raises(UnsupportedError, match=r"decoder.weight shares memory with encoder.w"):
        nc.prepare(model, SGD(model.parameters(), 0.5), policy=policy)


@pytest.mark.parametrize(
    "policy", ["fp32", "bf16, params=bf16; encoder: params=fp32; decoder: params=fp32"]
)
def test_in_fp32_they_stay_tied_and_learn_what_torch_teaches_them(policy):
    plain, model = Autoencoder("a view"), Autoencoder("a view")
    optimizer = SGD(plain.parameters(), 0.5)

    def step(loss):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    expected = losses(plain, step)
    run = nc.prepare(model, SGD(model.parameters(), 0.5), policy=policy)
    found = losses(model, run.step)
    assert found == pytest.approx(expected, rel=1e-6 if policy == "fp32" else 0.02)
    assert torch.equal(model.decoder.weight, model.encoder.weight.t())


def test_neighbours_in_one_piece_of_memory_are_not_tied():
    whole = torch.randn(2, 5, 12)
    model = nn.ModuleList(nn.Linear(12, 5, bias=False) for _ in range(2))
    for layer, part in zip(model, whole, strict=True):
        layer.weight.data = part
    run = nc.prepare(model, SGD(model.parameters(), 0.5), policy="bf16, params=bf16")
    assert all(layer.weight.dtype == torch.bfloat16 for layer in model)
    run.release()


def test_one_parameter_in_two_modules_is_one():
    model = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12))
    model[1].weight = model[0].weight
    nc.prepare(model, SGD(model.parameters(), 0.5), policy="bf16, params=bf16")
    assert model[1].weight is model[0].weight


@pytest.mark.parametrize("kind", ["frozen", "buffer"])
def test_what_is_not_trained_counts_too(kind):
    model = Autoencoder("a view")
    if kind == "frozen":
        model.decoder.weight.requires_grad_(False)
    else:
        del model.decoder.weight
        model.decoder.register_buffer("weight", model.encoder.weight.detach().t())
    trained = [p for p in model.parameters() if p.requires_grad]
    with pytest.raises(UnsupportedError, match=r"decoder.weight shares memory with encoder.w"):
        nc.prepare(model, SGD(trained, 0.5), policy="bf16, params=bf16")


def test_columns_of_one_matrix_are_not_tied():
    whole = torch.randn(5, 12)
    model = nn.ModuleList(nn.Linear(6, 5, bias=False) for _ in range(2))
    model[0].weight.data, model[1].weight.data = whole[:, :6], whole[:, 6:]
    nc.prepare(model, SGD(model.parameters(), 0.5), policy="bf16, params=bf16")
    expected = whole.to(torch.bfloat16)
    assert torch.equal(torch.cat([layer.weight for layer in model], dim=1), expected)


def test_columns_that_two_have_in_common_are():
    whole = torch.randn(5, 12)
    model = nn.ModuleList(nn.Linear(7, 5, bias=False) for _ in range(2))
    model[0].weight.data, model[1].weight.data = whole[:, :7], whole[:, 5:]
    with pytest.raises(UnsupportedError, match=r"1.weight shares memory with 0.weight"):
        nc.prepare(model, SGD(model.parameters(), 0.5), policy="bf16, params=bf16")
