import io
import json
import resource
import subprocess
import sys

import pytest
import torch
from rich.console import Console

from narrowcast.cli.entry import run_command
from narrowcast.cli.view.plan_view import print_plan
from narrowcast.hardware import detect_hardware
from narrowcast.runner.assemble import planned
from narrowcast.workloads import build_task, load_recipe


def test_the_table_gives_every_module_a_reason(narrowcast):
    ended = narrowcast("plan", "quickstart", "precision.policy=fp8-row", "device=cpu")
    assert (ended.code, ended.err) == (0, "planning …\n")
    assert "no CPU has e4m3 products" in ended.out
    assert "kept fp32: normalisation" in ended.out
    assert "kept fp32: embedding lookup, no products" in ended.out
    assert "products outside modules (attention, matmul): bf16" in ended.out


def test_blocks_that_are_alike_share_a_row_unless_all_are_asked_for(narrowcast, tiny):
    folded = narrowcast("plan", tiny).out
    assert "blocks.{0–2}.attn.qkv ×3" in folded
    every = narrowcast("plan", tiny, "--all").out
    assert "×3" not in every
    assert all(f"blocks.{n}.attn.qkv " in every for n in range(3))


def test_a_block_with_an_exception_is_not_folded_away(narrowcast, tiny):
    ended = narrowcast("plan", tiny, "precision.overrides={blocks.1.attn.qkv: fp32}")
    row = next(line for line in ended.out.splitlines() if line.startswith("blocks.1.attn.qkv "))
    assert "fp32 (exception)" in row


def test_json_counts_the_bytes_of_the_model_that_is_built(narrowcast, tiny):
    ended = narrowcast("plan", tiny, "--json", "optimizer.name=sgd", "optimizer.momentum=0.9")
    found = json.loads(ended.out)
    recipe = load_recipe(tiny).recipe
    model = build_task(recipe, device=torch.device("cpu")).model
    stored = sum(p.numel() * p.element_size() for p in model.parameters())
    assert found["bytes"] == {"params": stored, "grads": stored, "master": 0, "moments": stored}
    assert found["hardware"].endswith("(cpu)")


def test_a_model_larger_than_memory_is_planned_without_allocating_it():
    command = [sys.executable, "-m", "narrowcast", "plan", "lm/gpt-2.8b", "device=cpu"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode in (0, 3), ended.stderr  # 3: it does not fit into this machine
    assert "2.83 B parameters" in ended.stdout
    # Its weights alone take 10.5 GiB. Kilobytes, except on a Mac.
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * unit
    assert peak < 4 * 2**30


def test_a_terminal_that_is_ascii_gets_question_marks(tiny, monkeypatch):
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding="ascii"))
    assert run_command(["plan", tiny]) == 0
    assert b"blocks.{0?2}.attn.qkv ?3" in output.getvalue()


@pytest.mark.parametrize("width", [80, 100, 160])
def test_a_terminal_is_not_overrun_and_sees_every_reason(tiny, width):
    (only,) = planned(
        load_recipe("quickstart", ["precision.policy=fp8-row"]).recipe, detect_hardware("cpu")
    )
    console = Console(file=io.StringIO(), width=width, markup=False, highlight=False)
    print_plan(console, only, title="quickstart", every=False)
    shown = console.file.getvalue()
    assert all(len(line) <= width for line in shown.splitlines())
    assert "…" not in shown
    for reason in ("no CPU has e4m3 products", "kept fp32: normalisation"):
        assert reason in shown


SCHEDULE = "precision.schedule=[{policy: fp32, until: 25%}, {policy: fp8-row, until: 3}, {}]"


def test_every_phase_of_a_schedule_is_shown(narrowcast, tiny):
    shown = narrowcast("plan", tiny, SCHEDULE).out
    assert "phase 1   fp32, until step 1 (25%); " in shown
    assert "phase 2   fp8-row, until step 3; " in shown
    assert "phase 3   fp16, until the end; " in shown
    assert "tiny, phase 3 of 3  compute=fp16" in shown
    assert "no CPU has e4m3 products" in shown


def test_json_has_the_phases_where_there_are_any(narrowcast, tiny):
    described = json.loads(narrowcast("plan", tiny, SCHEDULE, "--json").out)
    assert described["policy"] == "compute=fp32"
    assert [phase["policy"] for phase in described["phases"]] == ["fp32", "fp8-row", "fp16"]
    assert "phases" not in json.loads(narrowcast("plan", tiny, "--json").out)


def test_a_phase_that_cannot_be_is_refused_with_its_number(narrowcast, tiny):
    wrong = "precision.schedule=[{policy: fp23, until: 1}, {policy: bf61}]"
    ended = narrowcast("plan", tiny, wrong)
    assert ended.code == 2
    assert "phase 1 of precision.schedule: precision policy: there is no preset 'fp23'" in ended.err
    assert "phase 2 of precision.schedule: precision policy: there is no preset 'bf61'" in ended.err
    wrong = "precision.schedule=[{policy: fp32, until: 1}, {policy: bf16, overrides: {nix: fp32}}]"
    ended = narrowcast("plan", tiny, wrong)
    assert "phase 2 of precision.schedule: precision exception `nix: fp32`" in ended.err


@pytest.mark.parametrize("words", [(), (SCHEDULE,)])
def test_json_is_the_file_that_a_run_of_the_recipe_keeps(words, narrowcast, tiny, tmp_path):
    folder = tmp_path / "run"
    assert narrowcast("train", tiny, *words, "--out", str(folder)).code == 0
    planned = json.loads(narrowcast("plan", tiny, *words, "--json").out)
    assert planned.pop("predicted")["memory"]["allocated"] > 0
    for each in [planned, *planned.get("phases", [])]:
        each.get("memory", {}).pop("predicted", None)
    assert planned == json.loads((folder / "plan.json").read_text())


def test_a_piece_that_the_model_does_not_have_is_refused_by_its_name(narrowcast, tiny):
    ended = narrowcast("plan", tiny, "precision.fuse=[loss]")
    assert ended.code == 3
    assert "fuse=loss cannot be used: this model has no matching module" in ended.err


def test_ranks_on_a_named_gpu_are_planned_without_one(narrowcast, tiny):
    words = ["parallel.ranks=16", "parallel.strategy=fsdp", "hardware=h200"]
    ended = narrowcast("plan", tiny, *words)
    assert "on NVIDIA H200" in ended.out
    assert "16, fsdp; predicted:" in ended.out
    assert "GB/s in a machine, 50 between: data sheet" in " ".join(ended.out.split())
    whole = json.loads(narrowcast("plan", tiny, "hardware=h200", "--json").out)
    assert "parallel" not in whole
    row = json.loads(narrowcast("plan", tiny, *words, "--json").out)["parallel"]
    assert row["bytes"]["moments"] == -(-whole["bytes"]["moments"] // 16)
    assert row["predicted"]


def test_the_row_of_a_task_is_told_with_who_has_set_what(narrowcast, tiny):
    words = ("precision.task=generation", "clip_norm=1.5", "device=cpu")
    lines = narrowcast("plan", tiny, *words).out.splitlines()
    said = {line.split(" ")[0]: line for line in lines[:6]}
    assert said["task"].startswith("task      generation, small (")
    assert "no fp16: most CPUs" in said["why"]
    assert said["sets"].startswith("sets      precision.loss_scale.growth_interval=500")
    assert "clip_norm=1.5 (command line)" in said["not"]
    assert "precision.policy=fp16 (tiny.yaml)" in said["not"]
    row = json.loads(narrowcast("plan", tiny, *words, "--json").out)["task"]
    assert (row["task"], row["size"], row["hardware"]) == ("generation", "small", "cpu")
    assert row["settings"]["clip_norm"] == {"value": 1.5, "origin": "command line"}
    assert row["left_out"] == ["offload of optimizer: cpu has no separate memory"]


def test_without_a_task_no_row_is_told(narrowcast, tiny):
    assert "task" not in json.loads(narrowcast("plan", tiny, "--json").out)
    assert not narrowcast("plan", tiny).out.startswith("task")
