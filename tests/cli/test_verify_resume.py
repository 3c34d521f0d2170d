import tempfile
from pathlib import Path

import pytest


@pytest.mark.usefixtures("forked_python")
def test_a_recipe_that_changes_its_policy_resumes_bit_for_bit_and_leaves_nothing(
    narrowcast, tiny, tmp_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    phases = "[{policy: fp32, until: 30%}, {policy: fp8-delayed, until: 60%}, {policy: bf16}]"
    ended = narrowcast("verify-resume", tiny, "steps=40", f"precision.schedule={phases}")
    assert (ended.code, ended.err) == (0, "")
    assert "equal, bit for bit: killed after step" in ended.out
    # Python's multiprocessing removes its own folder when the interpreter ends.
    left = [path.name for path in tmp_path.iterdir() if not path.name.startswith("pymp-")]
    assert left == [Path(tiny).name]


def test_a_bad_setting_is_refused_before_anything_runs(narrowcast, tiny):
    ended = narrowcast("verify-resume", tiny, "stesp=3")
    assert ended.code == 2
    assert "Did you mean steps" in ended.err


@pytest.mark.parametrize("again", ["blocks", "selective"])
def test_a_run_whose_blocks_are_computed_again_resumes_bit_for_bit(resumed_halfway, tiny, again):
    words = [
        "precision.policy=fp8-delayed",
        f"memory.activation_checkpointing={again}",
        "model.layers=2",
    ]
    resumed_halfway(tiny, *words, every=1)


@pytest.mark.usefixtures("forked_python")
def test_what_a_machine_without_a_gpu_cannot_offload_is_refused(narrowcast, tiny):
    ended = narrowcast("verify-resume", tiny, "memory.offload=[optimizer]", "device=cpu")
    assert ended.code == 3
    assert "Leave memory.offload out" in ended.err
