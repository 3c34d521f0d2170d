"""`eval.patience` from the first word to the last: train, resume, compare, report."""

import json
import shutil

import pytest

from narrowcast.runs import EvalRecord, RunFolder

TOLD = "ended early at step 8 of 20: loss had not improved for 3 evaluations"
# Weights that do not move do not improve: evaluated at 2, and no better at 4, 6 and 8.
WORDS = ("steps=20", "optimizer.lr=0", "eval.every=2", "eval.patience=3")


@pytest.fixture
def ended(narrowcast, tiny, tmp_path):
    out = tmp_path / "run"
    return out, narrowcast("train", tiny, *WORDS, "--out", out)


def test_a_run_that_stops_improving_ends_well_and_says_so_everywhere(narrowcast, ended, tmp_path):
    out, said = ended
    assert said.code == 0
    assert TOLD.capitalize() in " ".join(said.out.split())
    assert f"narrowcast resume {out} eval.patience=0" in said.out
    assert json.loads((out / "finished.json").read_text())["ended_early"] == TOLD
    assert TOLD in (out / "report.html").read_text()
    other = shutil.copytree(out, tmp_path / "other")
    compared = narrowcast("compare", out, other)
    assert TOLD in " ".join(compared.out.split())


def test_resume_says_that_it_is_finished_until_it_is_given_patience(narrowcast, ended):
    out, _ = ended
    again = narrowcast("resume", out)
    assert (again.code, f"has finished: it {TOLD}" in again.out) == (0, True)
    # More steps would change nothing: it is not for want of them that the run has ended.
    assert "has finished: it ended early" in narrowcast("resume", out, "steps=40").out
    assert narrowcast("resume", out, "eval.patience=0", "steps=10").code == 0
    assert "has finished its 10 steps" in narrowcast("resume", out).out
    assert "ended_early" not in json.loads((out / "finished.json").read_text())


def test_a_resumed_run_ends_early_all_the_same(resumed_halfway, tiny):
    resumed = resumed_halfway(tiny, *WORDS, every=2)
    assert json.loads((resumed / "finished.json").read_text())["ended_early"] == TOLD


def test_a_run_that_ends_with_its_best_weights_says_of_which_step(narrowcast, tiny, tmp_path):
    out = tmp_path / "run"
    said = narrowcast("train", tiny, *WORDS, "eval.keep_best=true", "--out", out)
    assert said.code == 0
    assert "from step 2, the best evaluation: loss" in said.out
    assert "weights are those of step 2, the best evaluation" in (out / "report.html").read_text()
    assert json.loads((out / "finished.json").read_text())["exported"]["step"] == 2
    assert "has finished: it ended early" in narrowcast("resume", out).out
    # The last weights are asked for now, and exported without a step.
    assert narrowcast("resume", out, "eval.keep_best=false").code == 0
    assert "exported" not in json.loads((out / "finished.json").read_text())


def test_a_resumed_run_ends_with_the_same_best(resumed_halfway, tiny):
    words = ("steps=20", "eval.every=2", "eval.keep_best=true", "optimizer.lr=1")
    resumed = resumed_halfway(tiny, *words, every=4)
    said = json.loads((resumed / "finished.json").read_text())
    # At such a rate any may be the best, and on another machine another.
    with RunFolder.open(resumed) as run:
        judged = {r.step: r.metrics["loss"] for r in run.records() if isinstance(r, EvalRecord)}
    assert len(judged) == 10
    assert said["exported"]["step"] == min(judged, key=judged.__getitem__)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["eval.patience=3"], "eval.patience=3: patience needs evaluations during training"),
        (
            ["eval.every=2", "eval.min_delta=0.1"],
            "eval.min_delta=0.1: min_delta has no effect without patience",
        ),
        (["eval.every=2", "eval.patience=-1"], "must be at least 0"),
    ],
)
def test_patience_that_nothing_could_come_of_is_refused(narrowcast, tiny, words, message):
    said = narrowcast("plan", tiny, *words)
    assert said.code == 2
    assert message in said.err
