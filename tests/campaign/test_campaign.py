"""One case of every kind of attack; `benchmarks/campaign.py` has thousands."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CAMPAIGN = Path(__file__).parents[2] / "benchmarks" / "campaign.py"
CAMPAIGN_SECONDS = 600
"""Far more than one case of each kind takes: a busy machine tries as many as an idle one."""


@pytest.mark.timeout(2 * CAMPAIGN_SECONDS)
def test_commands_survive_one_attack_of_every_kind(tmp_path):
    figures = tmp_path / "figures.json"
    bounds = ["--cases", "1", "--seconds", str(CAMPAIGN_SECONDS), "--seed", "0"]
    # As a user has it: no kernels on a CPU, rather than those of the interpreter.
    known = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(CAMPAIGN), *bounds, "--workers", "1", "--json", str(figures)],
        capture_output=True,
        text=True,
        env=known,
    )
    result = json.loads(figures.read_text()) if figures.exists() else {}
    assert result.get("failures") == [], done.stdout + done.stderr
    assert all(row["tried"] for row in result["rows"])
