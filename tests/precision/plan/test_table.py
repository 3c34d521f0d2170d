"""A plan as people see it: printed, in a REPL, in a notebook."""

import xml.etree.ElementTree as ET

import pytest
from torch import nn

import narrowcast as nc
from narrowcast.hardware import Hardware
from narrowcast.report.layers import layers

HEAD = ["module", "kind", "products", "weights", "how", "parameters", "reason"]
ANY_CPU = Hardware(device="cpu", name="any <CPU>", memory_bytes=2**30)


def model():
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)) for _ in range(4)]
    return nn.ModuleDict({"blocks": nn.ModuleList(blocks), "head": nn.Linear(64, 10)})


@pytest.fixture
def plan():
    return nc.plan(model(), "fp8-tensor; head: fp32", hardware=ANY_CPU)


def test_a_plan_is_the_same_table_whichever_way_it_is_looked_at(plan):
    lines = str(plan).splitlines()
    assert repr(plan) == str(plan)
    assert lines[0] == "fp8-tensor; head: fp32 on any <CPU> (cpu)"
    assert lines[2].split() == HEAD
    assert lines[3].startswith(
        "blocks.{0–3}.0 ×4  linear         e4m3 e5m2 e5m2  fp32     emulated"
    )
    assert lines[-2] == "in all   9 modules, 17,802 parameters"
    assert len(repr(plan)) < 1500


def test_its_rows_are_those_that_the_command_prints(plan):
    rows = layers(plan.to_json()["modules"])
    printed = str(plan).splitlines()[3:6]
    assert [line.split()[0] for line in printed] == [row.label for row in rows]
    for line, row in zip(printed, rows, strict=True):
        assert line.endswith(row.reason)
        assert f" {row.how} " in line
        assert f"{row.parameters:,}" in line


def test_a_notebook_is_shown_the_same_cells_escaped_and_in_its_own_colours(plan):
    html = plan._repr_html_()
    root = ET.fromstring(html)  # well-formed, whatever the names are
    cells = [[cell.text for cell in row] for row in root.iter("tr")]
    assert cells[0] == HEAD
    assert cells[1][:3] == ["blocks.{0–3}.0 ×4", "linear", "e4m3 e5m2 e5m2"]
    assert "any &lt;CPU&gt;" in html
    assert "#" not in html  # no colour of our own, which a dark page would hide


def test_a_policy_and_a_loss_scale_say_themselves():
    policy = nc.policy("fp16; head: bf16")
    assert repr(policy) == "narrowcast.policy('compute=fp16; head: bf16')"
    assert str(nc.LossScale(init_scale=1024.0)) == (
        "1024 at first, from 1 to 262144; times 2 after 2000 finite steps, "
        "times 0.5 after an overflow"
    )
    assert str(nc.LossScale(init_scale=8.0, dynamic=False)) == "8, static"
