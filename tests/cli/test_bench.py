import json
import math
import signal
import subprocess
import sys

import pytest
import torch

from narrowcast.bench import health
from narrowcast.bench.contenders import baseline_of
from narrowcast.bench.worker import subject_of

VERBS = ("step", "optimizer", "products", "health", "quality")
SMALL = ("--repeats", 1)


@pytest.mark.parametrize("verb", VERBS)
def test_help_is_given_without_torch(verb):
    script = (
        "import sys; from narrowcast.cli.entry import exit_code_of; "
        f"assert exit_code_of(['bench', {verb!r}, '--help']) == 0; "
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0
    assert "--policies" in done.stdout


def test_a_step_is_measured_with_policies_and_peers_side_by_side(narrowcast, tiny, tmp_path):
    written = tmp_path / "figures.json"
    policies = "fp32 | bf16, params=bf16, master=split | fp17"
    peers = "torch-fp32,accelerate-fp32"
    ended = narrowcast(
        "bench", "step", tiny, "steps=2", "--peers", peers, "--policies", policies,
        "--repeats", 2, "--steps", 2, "--json", written,
    )  # fmt: skip
    assert (ended.code, ended.err) == (0, "")
    found = json.loads(written.read_text())
    rows = {row["name"]: row for row in found["rows"]}
    assert rows["torch-fp32"]["speed"] == 1.0
    mine = rows["narrowcast bf16, params=bf16, master=split"]
    assert mine["timed_steps"] == 4
    assert mine["speed"] == pytest.approx(rows["torch-fp32"]["median_ms"] / mine["median_ms"])
    assert mine["tokens_per_second"] == pytest.approx(2 * 16 / mine["median_ms"] * 1000)
    assert mine["peak_bytes"] > 0
    assert mine["first_step_seconds"] > 0
    assert found["environment"]["torch"] == torch.__version__
    assert found["overrides"] == ["steps=2"]
    failures = {row["name"]: row["why"] for row in found["failures"]}
    assert "no preset is named 'fp17'" in failures["narrowcast fp17"]
    assert "narrowcast fp17  RecipeError: precision policy: no preset" in ended.out
    # Whether it is installed or not, it has a row that says so.
    assert ("accelerate-fp32" in rows) != ("accelerate-fp32" in failures)


def test_json_alone_goes_to_stdout_and_the_rest_to_stderr(narrowcast, tiny):
    ended = narrowcast(
        "bench", "optimizer", tiny, *SMALL, "--peers", "torch-fused,device-copy",
        "--policies", "fp32", "--json",
    )  # fmt: skip
    assert ended.code == 0
    rows = {row["name"]: row for row in json.loads(ended.out)["rows"]}
    assert set(rows) == {"torch-fused", "device-copy", "narrowcast fp32"}
    assert rows["device-copy"]["bytes_per_second"] > 0
    assert "of copy" in ended.err


def test_products_are_measured_for_every_shape(narrowcast, tiny):
    ended = narrowcast(
        "bench", "products", tiny, *SMALL, "--steps", 1, "--peers", "torch-fp32,raw-fp8-row",
        "--policies", "none", "--shapes", "8x16x32,8x32x16", "--json",
    )  # fmt: skip
    assert ended.code == 0
    found = json.loads(ended.out)
    assert [row["case"] for row in found["rows"]] == ["8×16×32", "8×32×16"]
    assert found["failures"][0]["why"] == "UnsupportedError: fp8 products need a GPU"


def test_watching_is_compared_with_a_step_that_only_guards(tiny):
    """In this process: a worker for each of the eight is eight imports of torch."""
    contenders = health.BENCH.contenders(peers="none", policies="fp32", device_type="cpu")
    assert len(contenders) == 8
    assert baseline_of(contenders, None).name == "narrowcast fp32 (guard alone)"
    for contender in contenders:
        job = {"bench": "health", "recipe": tiny, "overrides": []}
        timed = subject_of({**job, "contender": contender.to_json()})
        assert timed.ready()["first_step_seconds"]["step"] > 0
        measured = timed.measure({"steps": 1}, tell=print)
        assert math.isfinite(measured["loss"]), contender.name


def test_quality_compares_losses_of_the_same_seeds(narrowcast, tiny):
    ended = narrowcast(
        "bench", "quality", tiny, "steps=12", "--policies", "fp32 | bf16", "--seeds", 2,
        "--together", 2, "--json",
    )  # fmt: skip
    assert ended.code == 0
    found = json.loads(ended.out)
    reference, narrow = found["rows"]
    assert reference["evaluated_relative"] == 0.0
    assert narrow["seeds"] == [0, 1]
    # bf16 has 8 bits, and an untrained model's loss hardly moves in 12 steps.
    assert abs(narrow["evaluated_relative"]) < 2**-7
    assert len(found["curves"]) == 4
    assert "times and peaks cannot be compared" in ended.err


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["step", "quickstart", "stesp=3"], "did you mean steps"),
        (["step", "quickstart", "--peers", "torch-fp23"], "did you mean torch-fp32"),
        (["step", "--json", "lm/gpt-350m"], "put --json last"),
        (["step", "--json", "no-such-folder/a.json"], "there is no folder 'no-such-folder'"),
        (["step", "quickstart", "--baseline", "nobody"], "no contender is called 'nobody'"),
        (["health", "quickstart", "--baseline", "nobody"], "no contender is called 'nobody'"),
        (["products", "quickstart", "--shapes", "8x16"], "is no shape"),
        (["optimizer", "quickstart", "optimizer.name=adam"], "all contenders here are AdamW"),
        (["quality", "lm/gpt-124m"], "nothing can be learnt from random tokens"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(narrowcast, words, answer):
    ended = narrowcast("bench", *words)
    assert ended.code == 2
    assert answer in ended.err


@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGINT])
def test_a_bench_that_is_ended_early_keeps_what_it_has_measured(start, tiny, tmp_path, which):
    written = tmp_path / "figures.json"
    bench = start(
        "bench", "step", tiny, "--peers", "torch-fp32", "--policies", "fp32", "--repeats", 1000,
        "--steps", 1, "--json", written,
    )  # fmt: skip
    assert any(line.startswith("round 2 of 1000") for line in bench.stdout)
    bench.send_signal(which)
    rest, error = bench.communicate(timeout=60)
    assert bench.returncode == 130, error
    assert "torch-fp32" in rest.splitlines()[-2] + rest.splitlines()[-1]
    assert error.strip().endswith("its figures are of what was measured by then")
    found = json.loads(written.read_text())
    assert found["interrupted"]
    steps = {row["timed_steps"] for row in found["rows"]}
    assert len(found["rows"]) == 2
    assert len(steps) == 1, "a ratio is of the same rounds"
    assert 2 <= steps.pop() < 1000
