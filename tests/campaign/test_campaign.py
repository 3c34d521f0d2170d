"""A few cases of every kind of the hostile campaign; `benchmarks/campaign.py` has thousands."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CAMPAIGN = Path(__file__).parents[2] / "benchmarks" / "campaign.py"
GROUPS = {
    "what is read": (
        "words",
        "policies",
        "recipe files",
        "recipes that are none",
        "command lines",
        "texts that are none",
        "names of texts",
    ),
    "kills and signals": (
        "killed in a step",
        "killed in a checkpoint",
        "killed in the export",
        "killed in the report",
        "asked to stop",
    ),
    "damage and disks": (
        "damaged, resumed",
        "records damaged, resumed",
        "stray checkpoints",
        "damaged, reported",
        "damaged, compared",
        "no file may grow",
        "disk full",
    ),
    "others": (
        "streams lost in a run",
        "streams lost by an answer",
        "several at once",
        "other data",
        "settings edited",
        "settings given",
        "checkpoint of another run",
        "folder taken away",
    ),
}
CASES = {"what is read": 2, "kills and signals": 1, "damage and disks": 1, "others": 1}
"""Of each kind: less than a minute for all on one core."""
SECONDS = 100
"""Far more than they take: a busy machine tries as many as an idle one."""


@pytest.mark.parametrize("group", GROUPS)
def test_nothing_is_lost_hangs_differs_or_ends_without_a_word(group, tmp_path):
    figures = tmp_path / "figures.json"
    chosen = [word for kind in GROUPS[group] for word in ("--only", kind)]
    words = [*chosen, "--cases", str(CASES[group]), "--workers", "1"]
    bounds = ["--seconds", str(SECONDS), "--json", str(figures)]
    # As a user has it: no kernels on a CPU, rather than those of the interpreter.
    known = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(CAMPAIGN), *words, *bounds, "--seed", "0"],
        capture_output=True,
        text=True,
        env=known,
    )
    found = json.loads(figures.read_text()) if figures.exists() else {}
    assert found.get("failures") == [], done.stdout + done.stderr
    assert {row["kind"] for row in found["rows"] if row["tried"]} >= set(GROUPS[group])
