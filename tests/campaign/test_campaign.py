"""One case of most kinds of attack; `benchmarks/campaign.py` has thousands of all kinds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CAMPAIGN = Path(__file__).parents[2] / "benchmarks" / "campaign.py"
KINDS = (
    "words", "policies", "recipe files", "recipes that are none", "command lines",
    "texts that are none", "names of texts", "killed in a step", "killed in a checkpoint",
    "killed in the export", "killed in the report", "asked to stop", "damaged, resumed",
    "records damaged, resumed", "stray checkpoints", "damaged, reported", "damaged, compared",
    "no file may grow", "disk full", "streams lost in a run", "streams lost by an answer",
    "several at once", "other data", "settings edited", "settings given",
    "checkpoint of another run", "folder taken away",
)  # fmt: skip
CAMPAIGN_SECONDS = 600
"""Far more than one case of each kind takes: a busy machine tries as many as an idle one."""


@pytest.mark.timeout(2 * CAMPAIGN_SECONDS)
def test_commands_survive_one_attack_of_each_kind(tmp_path):
    figures = tmp_path / "figures.json"
    kinds = [word for kind in KINDS for word in ("--only", kind)]
    bounds = ["--cases", "1", "--seconds", str(CAMPAIGN_SECONDS), "--seed", "0"]
    # As a user has it: no kernels on a CPU, rather than those of the interpreter.
    known = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(CAMPAIGN), *kinds, *bounds, "--workers", "1", "--json", str(figures)],
        capture_output=True,
        text=True,
        env=known,
    )
    result = json.loads(figures.read_text()) if figures.exists() else {}
    assert result.get("failures") == [], done.stdout + done.stderr
    assert {row["kind"] for row in result["rows"] if row["tried"]} >= set(KINDS)
