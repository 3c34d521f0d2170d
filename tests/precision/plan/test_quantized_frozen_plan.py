"""What a plan says of weights that are kept in e4m3."""

import dataclasses
import json

import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast.hardware import Speeds
from narrowcast.precision.plan.plan import with_losses
from narrowcast.report.layers import layers

# By tokens, inputs and outputs of 1024 and 4096: fp8 takes longer than bf16 where all are small and
# half its time where all are large; widening costs a tenth everywhere.
SPEEDS = Speeds(
    gpu="NVIDIA H200",
    torch="2.13.0",
    date="2026-01-31",
    tokens=(1024, 4096),
    inputs=(1024, 4096),
    outputs=(1024, 4096),
    seconds={
        "bf16": (7.0,) * 8,
        "frozen-bf16": (1.0,) * 8,
        "frozen-wide": (1.1,) * 8,
        "frozen-row": (2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5),
    },
)


def kept(width=64, *, products="auto", layers=1):
    torch.manual_seed(0)
    names = {f"layer{i}": nn.Linear(width, width, bias=False) for i in range(layers)}
    model = nn.ModuleDict({"base": nn.ModuleDict(names), "adapter": nn.Linear(width, 16)})
    model.base.requires_grad_(False)
    nc.quantize_frozen(model, products=products)
    return model


def planned(model, policy, hardware, **options):
    return nc.plan(model, policy, hardware=hardware, **options).module("base.layer0")


@pytest.mark.parametrize(
    ("policy", "products", "forward", "widened"),
    [
        ("bf16", "auto", "bf16", True),
        ("fp32", "auto", "fp32", True),
        ("fp8-row", "auto", "e4m3", False),
        ("fp8-tensor", "auto", "e4m3", False),
        ("fp8-row", "wide", "bf16", True),
        ("bf16", "fp8", "e4m3", False),
        ("compute=mxfp8", "auto", "bf16", True),
    ],
)
def test_products_are_those_of_the_policy_unless_others_are_asked_for(
    policy, products, forward, widened, h200
):
    found = planned(kept(products=products), policy, h200)
    assert found.policy.forward == forward
    assert found.policy.scaling == ("none" if widened else "row")
    assert found.frozen.widened == widened
    assert ("cast to" in found.reason) == widened
    assert "stored in e4m3 with row scales" in found.reason


def test_bytes_are_a_byte_a_weight_and_four_a_scale(h200):
    for policy in ("bf16", "fp8-row"):
        found = planned(kept(), policy, h200)
        assert found.parameters == 64 * 64
        assert found.bytes == {
            "params": 64 * 64,
            "grads": 0,
            "master": 0,
            "moments": 0,
            "scales": 256,
        }


def test_the_plan_as_data_says_what_was_lost(h200):
    model = kept()
    data = json.loads(json.dumps(planned(model, "bf16", h200).to_json()))
    assert data["params"] == "e4m3"
    weight = model.base.layer0.quantized.snr_db
    assert data["quantized"] == {"format": "e4m3", "snr_db": weight, "widened": True}
    assert 30 < weight < 33


def test_alike_layers_share_a_row_with_the_range_of_what_they_lost(h200):
    torch.manual_seed(0)
    blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(4)).requires_grad_(False)
    blocks[2].weight.data *= 10.0 ** torch.randint(-4, 4, (64, 64))
    model = nn.ModuleDict({"blocks": blocks, "adapter": nn.Linear(64, 16)})
    found = nc.quantize_frozen(model).values()
    (row,) = [r for r in str(nc.plan(model, "bf16", hardware=h200)).splitlines() if "blocks" in r]
    assert row.startswith("blocks.{0–3} ×4")
    assert row.endswith(f"{min(found):.1f}–{max(found):.1f} dB")


@pytest.mark.parametrize(
    ("width", "rows", "forward", "word"),
    [
        (4096, 4096, "e4m3", "2.00 × a bf16 weight at 4096×4096×4096"),
        (1024, 1024, "bf16", "fp8 gains nothing: 0.50 × a bf16 weight at 1024×1024×1024"),
        (1024, 1024, "bf16", "0.91 × a bf16 weight at 1024×1024×1024"),  # widened
    ],
)
def test_fp8_is_used_where_it_gains_as_measured(width, rows, forward, word, h200):
    with torch.device("meta"):
        model = kept(width)
    hardware = dataclasses.replace(h200, speeds=SPEEDS)
    found = planned(model, "fp8-row", hardware, gemm_rows=rows)
    assert found.policy.forward == forward
    assert word in found.reason


def test_fp8_that_was_asked_for_of_the_base_stays_where_it_gains_nothing(h200):
    hardware = dataclasses.replace(h200, speeds=SPEEDS)
    with torch.device("meta"):
        model = kept(1024, products="fp8")
    assert planned(model, "bf16", hardware, gemm_rows=1024).policy.forward == "e4m3"


def test_sides_that_tensor_cores_refuse_are_widened(h200):
    found = planned(kept(40), "fp8-row", h200)
    assert found.policy.forward == "bf16"
    assert "its sides are not multiples of 16" in found.reason


def test_a_speed_that_nobody_measured_is_said_to_be_so(h200):
    assert "speed not measured here" in planned(kept(), "bf16", h200).reason


def test_a_plan_from_shapes_is_told_what_the_model_has_lost(h200):
    with torch.device("meta"):
        shapes = kept()
    plan = nc.plan(shapes, "bf16", hardware=h200)
    assert plan.module("base.layer0").frozen.snr_db is None
    model = kept()
    found = with_losses(plan, model)
    assert found.module("base.layer0").frozen.snr_db == model.base.layer0.quantized.snr_db
    rows = [row for row in layers(found.to_json()["modules"]) if row.params == "e4m3"]
    assert [row.reason.endswith(" dB") for row in rows] == [True]
    plain = nc.plan(nn.Linear(4, 4), "bf16", hardware=h200)
    assert with_losses(plain, nn.Linear(4, 4)) is plain
