"""A loop of somebody else's, in plain torch."""

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import narrowcast as nc
from narrowcast.errors import ConfigError


def digits():
    data = load_digits()
    return torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def trained(model, *, watching=None, steps=30):
    x, y = digits()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = []
    for n in range(steps):
        optimizer.zero_grad()
        rows = slice(64 * n % 1500, 64 * n % 1500 + 64)
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        if watching is not None:
            found += watching.step()
        optimizer.step()
    return found


def test_a_healthy_loop_trains_as_without_and_its_tensors_are_known():
    plain, model = network(), network()
    trained(plain)
    with nc.monitor(model, policy="fp8-tensor", every=5) as watching:
        assert trained(model, watching=watching) == []
        seen = watching.statistics
    assert all(map(torch.equal, plain.parameters(), model.parameters()))
    assert [type(m) for m in model] == [nn.Linear, nn.ReLU, nn.Linear]
    assert seen.step == 30
    assert set(zip(seen.module, seen.role, strict=True)) >= {
        ("0", "input"), ("0", "grad_output"), ("2", "grad_weight"), ("2", "output"),
    }  # fmt: skip
    signal = dict(zip(zip(seen.module, seen.role, strict=True), seen.snr_db, strict=True))
    assert (
        signal["0", "input"] is None
    )  # sixteenths up to one have four bits, as e4m3: none is lost
    assert 15 < signal["0", "grad_output"] < 35  # e5m2 has three


def test_what_if_tells_what_each_tensor_would_lose_to_a_format_that_is_not_in_force():
    model = network()
    with torch.no_grad():
        model[2].weight[:, ::2] *= 2.0**-20  # half of it, below what one scale of e4m3 can reach
    watching = nc.monitor(model, policy="fp32", every=1)
    trained(model, watching=watching, steps=1)
    shares = {}
    for name in ("e4m3", "bf16", "mxfp8"):
        lost = watching.what_if(name)
        assert set(lost.format) == {name}
        told = dict(zip(zip(lost.module, lost.role, strict=True), lost.underflow, strict=True))
        assert set(told) >= {("0", "input"), ("0", "grad_weight"), ("2", "grad_output")}
        shares[name] = told["2", "weight"]
    assert shares["e4m3"] == pytest.approx(0.5, abs=0.01)
    assert shares["bf16"] == 0
    assert set(watching.statistics.format) == {"fp32"}  # nothing else is in force now


def test_what_if_before_anything_has_passed_and_for_no_format_is_refused():
    watching = nc.monitor(network())
    with pytest.raises(ConfigError, match="Call it after a step"):
        watching.what_if("e4m3")
    with pytest.raises(ConfigError, match="Did you mean e4m3"):
        watching.what_if("e4m4")


def test_a_layer_whose_values_leave_the_format_is_named():
    model = network()
    with torch.no_grad():
        model[0].weight.mul_(1e6)
    watching = nc.monitor(model, policy="fp16", every=1)
    found = trained(model, watching=watching, steps=1)
    assert ("0", "output", "overflow of fp16") in [(f.module, f.role, f.what) for f in found]
    assert "bf16" in found[0].advice


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16"])
def test_a_nan_in_the_data_is_not_called_an_overflow(policy):
    model, (x, y) = network(), digits()
    x[3, 5] = torch.nan
    watching = nc.monitor(model, policy=policy, every=1)
    F.cross_entropy(model(x[:64]), y[:64]).backward()
    (found,) = watching.step()
    assert (found.module, found.role, found.what) == ("0", "input", "not finite")
    assert found.advice.startswith("check the data")


def test_a_dead_layer_is_found():
    model = network()
    with torch.no_grad():
        model[0].bias.fill_(-1e3)
    watching = nc.monitor(model, every=1)
    found = trained(model, watching=watching, steps=6)
    assert ("2", "dead layer") not in [(f.module, f.what) for f in found]  # it has a bias
    assert ("0", "grad_output", "dead layer") in [(f.module, f.role, f.what) for f in found]


def test_every_must_be_a_number_of_steps():
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        nc.monitor(network(), every=0)


def test_a_model_without_parameters_is_refused():
    with pytest.raises(ConfigError, match="needs a model with parameters"):
        nc.monitor(nn.ReLU())
