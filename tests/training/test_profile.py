import json
from dataclasses import replace

import pytest
import torch

from narrowcast.errors import ConfigError
from narrowcast.hardware.catalog import find_gpu
from narrowcast.hardware.profile import summarise
from narrowcast.training.train_loop import train_loop

ASKED = {"first": 3, "steps": 2}


def test_the_steps_that_are_named_are_traced(ready, tmp_path):
    plain, looked = ready(steps=6), ready(steps=6, profile=ASKED)
    list(train_loop(plain.prepared, plain.task, plain.recipe, folder=tmp_path / "plain"))
    list(train_loop(looked.prepared, looked.task, looked.recipe, folder=tmp_path / "looked"))
    assert not (tmp_path / "plain" / "profile").exists()
    folder = tmp_path / "looked" / "profile"
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert any(event.get("name") == "aten::addmm" for event in events)
    table = {row["operation"]: row for row in json.loads((folder / "operations.json").read_text())}
    # Three linear layers and one that is used twice, forward only, in two steps.
    assert table["aten::addmm"]["calls"] == 2 * 4
    for one, other in zip(
        plain.task.model.parameters(), looked.task.model.parameters(), strict=True
    ):
        assert torch.equal(one, other)


def test_the_summary_attributes_every_microsecond_to_operations_and_modules(ready, tmp_path):
    looked = ready(steps=6, profile=ASKED)
    list(train_loop(looked.prepared, looked.task, looked.recipe, folder=tmp_path))
    summary = json.loads((tmp_path / "profile" / "summary.json").read_text())
    assert summary["steps"] == 2
    rows = {row["name"]: row for row in summary["modules"]}
    linear = [n for n, m in looked.task.model.named_modules() if isinstance(m, torch.nn.Linear)]
    assert set(linear) <= set(rows)
    # The first layer has no gradient of its input, but one of its weight.
    assert all(rows[name]["forward_ms"] > 0 for name in linear)
    assert all(rows[name]["backward_ms"] > 0 for name in linear)
    assert sum(row["share"] for row in rows.values()) == pytest.approx(1, abs=1e-6)
    assert sum(row["ms"] for row in rows.values()) == pytest.approx(summary["ms"])
    assert all(row["roofline"] is None for row in summary["operations"])  # of a CPU
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in looked.task.model.modules())


def test_the_roofline_of_a_product_is_its_time_at_the_peak_rate():
    """Two products and a copy, with rates under which each takes a known time."""
    gpu = replace(find_gpu("h200"), tflops={"fp32": 1e-3}, bandwidth=1.0)
    a, b = torch.ones(64, 128), torch.ones(128, 32)
    with torch.profiler.profile(record_shapes=True, with_flops=True) as profiler:
        for _ in range(2):
            torch.mm(a, b)
        a.clone()
    summary = summarise(profiler, steps=1, device="cpu", gpu=gpu)
    rows = {row["name"]: row for row in summary["operations"]}
    multiply_ms = 2 * (2 * 64 * 128 * 32) / 1e-3 / 1e12 * 1e3
    assert rows["aten::mm"]["roofline"] == pytest.approx(multiply_ms / rows["aten::mm"]["ms"])
    read_ms = 64 * 128 * 4 / 1e9 * 1e3
    assert rows["aten::clone"]["roofline"] == pytest.approx(read_ms / rows["aten::clone"]["ms"])


def test_a_run_that_ends_before_writes_what_it_saw(ready, tmp_path):
    made = ready(steps=3, profile={"first": 2, "steps": 50})
    list(train_loop(made.prepared, made.task, made.recipe, folder=tmp_path))
    assert (tmp_path / "profile" / "trace.json").is_file()


def test_a_trace_without_a_folder_is_refused(ready):
    made = ready(steps=3, profile=ASKED)
    with pytest.raises(ConfigError, match="needs a run folder"):
        train_loop(made.prepared, made.task, made.recipe)
