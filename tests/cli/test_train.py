import json
import os
import pty
import re
import resource
import signal
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.fork_server import ForkedPopen

from narrowcast.runs import EvalRecord, RunFolder, StepRecord


def files(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_profiled_run_ends_with_its_tables_and_the_rate_it_reached(narrowcast, tiny, tmp_path):
    ended = narrowcast(
        "train", tiny, "steps=6", "profile=true", "profile.first=2", "--out", tmp_path / "run"
    )
    assert (ended.code, ended.err) == (0, "")
    after = ended.out.partition("profile ")[2].splitlines()
    assert after[0].endswith("of host time per step, over 5 profiled steps")
    assert any(line.startswith("aten::") for line in after)
    assert any(line.startswith("blocks.") for line in after)
    assert re.fullmatch(
        r"achieved  .* GFLOP/s of model FLOPs in the median step; the peak rate of .* is not known",
        after[-1],
    )
    plain = narrowcast("train", tiny, "steps=2", "--out", tmp_path / "plain")
    assert "achieved" not in plain.out


def test_a_run_leaves_everything_that_the_design_names(narrowcast, tiny, tmp_path):
    out = tmp_path / "run"
    ended = narrowcast("train", tiny, "steps=3", "--out", out)
    assert (ended.code, ended.err) == (0, "")
    assert (out / "recipe.yaml").read_text() == Path(tiny).read_text()
    resolved = json.loads((out / "resolved.json").read_text())
    assert resolved["steps"] == {"value": 3, "origin": "command line"}
    assert resolved["batch_size"] == {"value": 2, "origin": "tiny.yaml"}
    assert len(json.loads((out / "environment.json").read_text())["sessions"]) == 1
    assert json.loads((out / "plan.json").read_text())["policy"] == "compute=fp16"
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-000003"]
    assert "blocks.0.attn.qkv.weight" in load_file(out / "model.safetensors")
    assert (out / "report.html").read_text().startswith("<!doctype html>")
    with RunFolder.open(out) as run:
        records = run.records()
    assert [r.step for r in records if isinstance(r, StepRecord)] == [1, 2, 3]
    evaluated = next(r for r in records if isinstance(r, EvalRecord))
    assert f"loss {evaluated.metrics['loss']:.3f}" in ended.out
    assert str(out / "report.html") in ended.out


def test_a_second_run_of_a_name_goes_beside_the_first(narrowcast, tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert narrowcast("train", tiny, "steps=1").code == 0
    first = files(tmp_path / "runs")
    ended = narrowcast("train", tiny, "steps=1")
    assert ended.code == 0
    assert "runs/tiny-2 (runs/tiny is taken)" in ended.out
    assert files(tmp_path / "runs/tiny") == first
    assert (tmp_path / "runs/tiny-2/report.html").exists()


def test_a_folder_that_holds_a_run_is_refused_and_left_alone(narrowcast, tiny, tmp_path):
    out = tmp_path / "run"
    narrowcast("train", tiny, "steps=1", "--out", out)
    before = files(out)
    ended = narrowcast("train", tiny, "steps=2", "--out", out)
    assert ended.code == 2
    assert "already has a run. Choose another --out" in ended.err
    assert files(out) == before


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["stesp=3"], 2, "no such setting. Did you mean steps"),
        (["precision.policy=fp17"], 2, "no preset 'fp17' (did you mean fp16?)"),
        (["precision.policy=fp8-row", "precision.emulate=false"], 3, "but emulate=false was set"),
        (["precision.overrides={nosuch.*: fp32}"], 2, "nosuch.*: fp32 matches no module"),
        (["precision.loss_scale.scale_groups=[nosuch]"], 2, "'nosuch' matches no module"),
        (["precision.loss_scale.growth_factor=3"], 2, "must be a power of two. Write 2"),
        (["batch_size=30000"], 2, "must be at most the number of training samples"),
        (["data.text=nowhere.txt"], 2, "nowhere.txt"),
        (["device=cuda:99"], 3, "device=cuda:99"),
        (
            ["model.width=100000", "model.layers=50"],
            3,
            "Weights, gradients and optimizer state need",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_there_is_a_folder(
    narrowcast, tiny, tmp_path, words, code, message
):
    ended = narrowcast("train", tiny, *words, "--out", tmp_path / "run")
    assert ended.code == code
    assert message in ended.err.replace("`", "")
    assert "Traceback" not in ended.err
    assert not (tmp_path / "run").exists()


def test_a_recipe_that_is_not_there_is_bad_input(narrowcast):
    ended = narrowcast("train", "quikstart")
    assert ended.code == 2
    assert "Did you mean quickstart" in ended.err


def test_a_run_that_only_overflows_ends_with_4_and_says_where_to_look(narrowcast, tiny, tmp_path):
    scale = [f"precision.loss_scale.{key}=1e30" for key in ("init_scale", "min_scale", "max_scale")]
    words = [
        *scale,
        "precision.loss_scale.max_skipped_steps=3",
        "steps=9",
        "--out",
        tmp_path / "run",
    ]
    ended = narrowcast("train", tiny, *words)
    assert ended.code == 4
    assert "3 steps in a row" in ended.err
    assert f"Report: {tmp_path / 'run' / 'report.html'}" in ended.err
    assert (tmp_path / "run" / "report.html").exists()
    assert "step 1 skipped: " in ended.out


def test_quiet_prints_nothing(narrowcast, tiny, tmp_path):
    ended = narrowcast("train", tiny, "--quiet", "--out", tmp_path / "run")
    assert (ended.code, ended.out, ended.err) == (0, "", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_with_130_saved_and_resumable(
    start, narrowcast, tiny, tmp_path, number
):
    out = tmp_path / "run"
    with start("train", tiny, "steps=100000", "--out", out) as process:
        wait_for_step(out, 3)
        other = narrowcast("resume", out)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"Resume with: narrowcast resume {out}" in err
    assert "Traceback" not in err
    assert (out / "report.html").exists()
    with RunFolder.open(out) as run:
        last = run.records()[-1]
    assert (out / "checkpoints" / f"step-{last.step:06d}").is_dir()
    # While it ran, the folder was its own.
    assert other.code == 2
    assert "Another process is writing to" in other.err


def test_a_full_disk_is_said_and_the_run_can_go_on_once_there_is_room(
    finish, narrowcast, tiny, tmp_path
):
    out = tmp_path / "run"

    def allow_small_files_only() -> None:
        # A limit on the size of a file stops a write as a full disk does.
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**15, 2**15))

    ended = finish("train", tiny, "--out", out, preexec_fn=allow_small_files_only)
    assert ended.code == 2
    assert "Cannot write" in ended.err
    assert "Traceback" not in ended.err
    assert list((out / "checkpoints").iterdir()) == []
    assert not (out / "model.safetensors").exists()
    assert narrowcast("resume", out).code == 0
    assert (out / "model.safetensors").exists()


def test_a_terminal_gets_a_bar_without_colours_where_none_are_wanted(tiny, tmp_path):
    words = ["train", tiny, "--out", tmp_path / "run"]
    environment = {"TERM": "xterm-256color", "COLUMNS": "100", "NO_COLOR": "1"}
    shown = on_a_terminal(words, environment)
    assert "━" in shown
    assert "4/4" in shown
    assert "scale 65,536" in shown
    assert not re.search(r"\x1b\[[0-9;]*(3[0-9]|9[0-7])[0-9;]*m", shown)


def on_a_terminal(words: list[object], environment: dict[str, str]) -> str:
    """Run a command on a terminal of its own, and return every character it was sent."""
    command = [sys.executable, "-m", "narrowcast", *map(str, words)]
    terminal, other_side = pty.openpty()
    process = ForkedPopen(
        command,
        stdin=other_side,
        stdout=other_side,
        stderr=other_side,
        env=os.environ | environment,
        start_new_session=True,
    )
    os.close(other_side)
    sent = bytearray()
    with os.fdopen(terminal, "rb", buffering=0) as file:
        while True:
            try:
                chunk = file.read(65536)
            except OSError:  # how Linux says that the other side has gone
                break
            if not chunk:
                break
            sent += chunk
    assert process.wait(timeout=60) == 0
    return sent.decode()


def wait_for_step(folder: Path, step: int) -> None:
    """Wait until a run has recorded a step."""
    records = folder / "records.jsonl"
    for _ in range(6000):
        if records.exists() and f'"step": {step},'.encode() in records.read_bytes():
            return
        time.sleep(0.01)
    raise AssertionError(f"no step {step} in a minute")


def test_a_run_that_came_to_nothing_ends_with_4_and_says_so_first(narrowcast, tiny, tmp_path):
    out = tmp_path / "run"
    words = ("steps=12", "optimizer.lr=1e6", "lr_schedule.warmup=0", "precision.policy=bf16")
    ended = narrowcast("train", tiny, *words, "--out", out)
    assert ended.code == 4
    said = "narrowcast: The run has diverged: "
    assert ended.err.startswith(said)
    summary = ended.out[ended.out.rindex("diverged  12 steps in ") :]
    assert "\ndone" not in ended.out
    assert "weights " not in summary
    assert not (out / "model.safetensors").exists()
    assert "was not written" in ended.err
    page = (out / "report.html").read_text()
    assert '<span class="badge bad">Diverged</span>' in page
    assert re.search(r"<h1>tiny diverged in bf16", page)

    again = narrowcast("resume", out)
    assert (again.code, again.err) == (4, ended.err)
    assert not (out / "model.safetensors").exists()


def test_the_formats_line_names_the_policy_of_the_first_phase(narrowcast, tmp_path):
    words = ["strategy=hybrid", "strategy.policies.warmup=fp32", "strategy.policies.full=fp16"]
    ended = narrowcast("train", "tutorial", "steps=4", *words, "--out", tmp_path / "run")
    assert ended.code == 0, ended.err
    (line,) = [line for line in ended.out.splitlines() if line.startswith("formats")]
    assert line.split()[1:3] == ["fp32", "(compute=fp32);"]
    lines = [line for line in ended.out.splitlines() if "(predicted)" in line]
    phases = [line.split(";")[0].split() for line in lines]
    assert phases == [["warmup", "fp32"], ["full", "fp16"]]
