import json
import signal
import subprocess
import sys

import pytest
import torch


@pytest.mark.parametrize("verb", ["step", "models"])
def test_help_is_printed_without_importing_torch(verb):
    script = (
        "import sys; from narrowcast.cli.entry import run_command; "
        f"assert run_command(['bench', {verb!r}, '--help']) == 0; "
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0
    assert "--together" in done.stdout


@pytest.mark.usefixtures("forked_python")
def test_bench_step_measures_policies_and_peers(narrowcast, tiny, tmp_path):
    written = tmp_path / "figures.json"
    policies = "bf16, params=bf16, master=split | fp17"
    ended = narrowcast(
        "bench", "step", tiny, "steps=2", "--peers", "torch-fp32", "--policies", policies,
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
    assert "no preset 'fp17'" in failures["narrowcast fp17"]
    assert "narrowcast fp17  ConfigError: precision policy: there is no preset" in ended.out


@pytest.mark.usefixtures("forked_python")
def test_json_alone_goes_to_stdout_and_the_rest_to_stderr(narrowcast, tiny):
    ended = narrowcast(
        "bench", "step", tiny, "--repeats", 1, "--steps", 1, "--peers", "none",
        "--policies", "fp32", "--json",
    )  # fmt: skip
    assert ended.code == 0
    assert [row["name"] for row in json.loads(ended.out)["rows"]] == ["narrowcast fp32"]
    assert "quartiles" in ended.err


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["step", "quickstart", "stesp=3"], "Did you mean steps"),
        (["step", "quickstart", "--peers", "torch-fp23"], "Did you mean torch-fp32"),
        (["step", "--json", "lm/gpt-350m"], "Put --json last"),
        (["step", "--json", "no-such-folder/a.json"], "there is no folder 'no-such-folder'"),
        (["step", "quickstart", "--baseline", "nobody"], "no contender is called 'nobody'"),
    ],
)
def test_wrong_options_raise_before_anything_is_measured(narrowcast, words, answer):
    ended = narrowcast("bench", *words)
    assert ended.code == 2
    assert answer in ended.err


def test_an_interrupted_bench_keeps_what_it_has_measured(start, tiny, tmp_path):
    written = tmp_path / "figures.json"
    bench = start(
        "bench", "step", tiny, "--peers", "torch-fp32", "--policies", "fp32", "--repeats", 1000,
        "--steps", 1, "--json", written,
    )  # fmt: skip
    assert any(line.startswith("round 2 of 1000") for line in bench.stdout)
    bench.send_signal(signal.SIGINT)
    rest, error = bench.communicate(timeout=60)
    assert bench.returncode == 130, error
    assert "torch-fp32" in rest.splitlines()[-2] + rest.splitlines()[-1]
    assert error.strip().endswith("the results cover what was measured until then")
    found = json.loads(written.read_text())
    assert found["interrupted"]
    steps = {row["timed_steps"] for row in found["rows"]}
    assert len(found["rows"]) == 2
    assert len(steps) == 1, "a ratio is of the same rounds"
    assert 2 <= steps.pop() < 1000
