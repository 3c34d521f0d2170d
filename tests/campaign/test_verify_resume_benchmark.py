"""One case of `benchmarks/verify_resume.py`, which checks every shipped recipe."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "verify_resume.py"


def test_a_killed_run_with_jumps_and_formats_by_phase_resumes_bit_for_bit(tmp_path):
    figures = tmp_path / "figures.json"
    words = ["--recipes", "tutorial", "--ways", "aggressive, formats by phase"]
    ended = subprocess.run(
        [sys.executable, BENCHMARK, *words, "--json", figures],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(figures.read_text())
    (case,) = found["cases"]
    assert case["verdict"] == "equal"
    assert case["jumps"] > 0
    assert case["killed_after"] >= case["resumed_from"] > 0
    assert {"commit", "cpu", "torch"} <= found["environment"].keys()
