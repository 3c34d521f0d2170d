import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.fork_server import ForkedPopen

from narrowcast.config.sections import DataSection, Recipe, Section
from narrowcast.errors import UnsupportedError
from narrowcast.training.checkpoints.verify import difference_between, verify_resume

PROGRAM = (sys.executable, str(Path(__file__).parents[1] / "sine_program.py"))
RECIPE = Recipe(workload="sine", steps=100, batch_size=8, data=DataSection(), model=Section())


@pytest.fixture(scope="module")
def verified(tmp_path_factory):
    """A check that has been made, and the folder with its two runs."""
    folder = tmp_path_factory.mktemp("verified")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", ForkedPopen)
        return verify_resume(RECIPE, [], folder=folder, command=PROGRAM), folder


def test_a_run_killed_at_a_seeded_step_and_resumed_is_the_straight_run(verified):
    check, _ = verified
    assert check.difference is None
    assert check.equal
    assert 20 <= check.killed_after < check.steps == 100
    # Saved every 20 steps; the last save may have come after the last record, or not at all.
    assert check.killed_after - 21 <= check.resumed_from <= check.killed_after + 1
    assert check.resumed_from % 20 == 0


def test_a_difference_in_the_exported_weights_is_named(verified, tmp_path):
    changed = shutil.copytree(verified[1] / "resumed", tmp_path / "changed")
    weights = changed / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    found = difference_between(verified[1] / "straight", changed)
    assert found is not None
    assert found.startswith("model.safetensors/")


def test_a_record_too_few_is_named(verified, tmp_path):
    changed = shutil.copytree(verified[1] / "resumed", tmp_path / "changed")
    records = changed / "records.jsonl"
    records.write_text("".join(records.read_text().splitlines(keepends=True)[:-1]))
    found = difference_between(verified[1] / "straight", changed)
    assert found is not None
    assert found.startswith("records: 1")


def test_a_step_with_another_loss_is_named(verified, tmp_path):
    changed = shutil.copytree(verified[1] / "resumed", tmp_path / "changed")
    records = changed / "records.jsonl"
    lines = records.read_text().splitlines(keepends=True)
    place = max(n for n, line in enumerate(lines) if '"kind": "step"' in line)
    step = json.loads(lines[place])
    lines[place] = json.dumps(step | {"loss": step["loss"] + 1e-6}) + "\n"
    records.write_text("".join(lines))
    difference = difference_between(verified[1] / "straight", changed)
    assert difference is not None
    assert difference.startswith(f"records, line {place + 1}")
    assert '"kind": "step"' in difference


@pytest.mark.usefixtures("forked_python")
def test_a_run_that_fails_says_what_its_process_said(tmp_path):
    with pytest.raises(UnsupportedError, match=r"exit code 3: this policy needs another machine"):
        verify_resume(RECIPE, ["broken"], folder=tmp_path, command=PROGRAM)
