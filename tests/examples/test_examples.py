import os
import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def run_example(monkeypatch, capsys):
    """Run an example in this process, which saves the seconds torch takes to import."""

    def run(name, *words):
        monkeypatch.setattr(sys, "argv", [name, *words])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adafactor"])
def test_the_drop_in_learns_in_fp16_and_skips_only_the_bad_batch(run_example, optimizer):
    output = run_example("drop_in.py", optimizer)
    assert re.findall(r"step (\d+) skipped", output) == ["31"]
    accuracy, applied, tried = re.search(r"accuracy (.*) after (\d+) of (\d+)", output).groups()
    assert (applied, tried) == ("59", "60")
    assert float(accuracy) > 0.5  # ten classes: chance is 0.1


def test_a_schedule_in_a_loop_of_ones_own_says_every_change_and_learns(run_example):
    output = run_example("schedule.py")
    assert "step 11: 0: fp32 → e4m3/e5m2 delayed" in output
    assert "step 51: 2: e4m3/e5m2 delayed → bf16, weights bf16 with split master" in output
    assert float(re.search(r"accuracy (\S+) after 60 of 60", output).group(1)) > 0.5


def test_every_example_is_short():
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) <= 80, path.name


def test_the_drop_in_fits_forty_lines():
    assert len((EXAMPLES / "drop_in.py").read_text().splitlines()) <= 40


@pytest.mark.usefixtures("forked_python")
def test_a_recipe_is_planned_trained_and_reported_from_python(tmp_path):
    folder = tmp_path / "run"
    words = ["steps=20", "batch_size=2", "model.layers=1", "data.eval_windows=2"]
    command = [sys.executable, str(EXAMPLES / "recipe_in_python.py"), str(folder), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    output = done.stdout
    assert re.search(r"^step 20: loss \d", output, re.M)
    assert re.search(r"^step 20: evaluated \{'loss': \d", output, re.M)
    assert (folder / "report.html").exists()


def test_adapters_beside_a_base_in_e4m3_learn(run_example):
    output = run_example("adapters.py")
    assert re.search(r"^14 layers in e4m3, lowest SNR 3[01]\.\d dB", output, re.M)
    first, *_, last = map(float, re.findall(r"loss (\S+)", output))
    assert last < 0.85 * first


def test_accelerate_loop_learns_and_skips_one_step_per_epoch(run_example):
    output = run_example("accelerate_loop.py")
    assert float(re.findall(r"accuracy (\S+)", output)[-1]) > 0.85
    assert "4 steps skipped" in output


@pytest.mark.filterwarnings("ignore")
def test_trainer_learns_and_saves_what_transformers_loads(run_example):
    output = run_example("trainer.py")
    first, *_, last = map(float, re.findall(r": loss (\S+),", output))
    assert last < 0.75 * first
    assert "40 steps applied, saved as torch.float32" in output


@pytest.mark.filterwarnings("ignore")
def test_sft_trainer_of_trl_learns(run_example):
    output = run_example("trl_sft.py")
    first, *_, last = map(float, re.findall(r": loss (\S+),", output))
    assert last < 0.95 * first


@pytest.mark.usefixtures("forked_python")
def test_fsdp_example_learns_on_two_ranks_and_saves_one_checkpoint(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(EXAMPLES / "fsdp.py")],
            env=os.environ | meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    output, other = (each.communicate(timeout=120)[0] for each in ranks)
    first, *_, last = map(float, re.findall(r": loss (\S+),", output))
    assert last < first < 5.5
    assert "20 steps applied on 2 ranks" in output
    assert not other.strip()
    assert (tmp_path / "checkpoints" / "step-20").is_dir()


def test_lightning_trains_in_fp8_and_resumes(run_example):
    output = run_example("lightning_trainer.py")
    accuracy, applied, tried = re.search(r"accuracy (\S+), (\d+) of (\d+) steps", output).groups()
    assert (applied, tried) == ("59", "60")
    assert float(accuracy) > 0.9
    assert "bit for bit: True" in output


def test_a_table_is_forecast_with_intervals(run_example):
    pytest.importorskip("pandas")
    output = run_example("forecast.py")
    assert re.search(r"^ *load 2024-03-01 00:00:00 +\d\d\.\d +\d\d\.\d +\d\d\.\d$", output, re.M)
    # The noise of the two series has mean absolute values of 0.8 and 1.6.
    errors = [float(value) for value in re.findall(r"mean absolute error (\S+) over 3", output)]
    assert errors == pytest.approx([0.8, 1.6], rel=0.4)
