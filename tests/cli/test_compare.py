import json
import shutil

import pytest


@pytest.fixture
def trained(narrowcast, tiny, tmp_path):
    """Train the tiny recipe in two policies with two seeds each."""
    folders = []
    for policy in ("fp32", "fp16"):
        for seed in (0, 1):
            out = tmp_path / f"{policy}-{seed}"
            words = (f"precision.policy={policy}", f"seed={seed}", "eval.every=2")
            assert narrowcast("train", tiny, *words, "--out", out, "--quiet").code == 0
            folders.append(out)
    return folders


def test_real_runs_are_compared_by_table_json_and_page(narrowcast, trained, tmp_path):
    ended = narrowcast("compare", *trained, "--html", tmp_path / "page.html")
    assert (ended.code, ended.err) == (0, "")
    assert "precision.policy=fp32" in ended.out
    assert "precision.policy=fp16" in ended.out
    assert "t-interval of the mean over seeds" in ended.out
    assert ended.out.endswith(f"{tmp_path / 'page.html'}\n")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "narrowcast comparison" in page

    found = json.loads(narrowcast("compare", *trained, "--json").out)
    assert (found["metric"], found["at_step"]) == ("loss", 4)
    assert [group["seeds"] for group in found["groups"]] == [[0, 1], [0, 1]]
    first, second = found["groups"]
    assert first["at_step"]["low"] < first["at_step"]["mean"] < first["at_step"]["high"]
    gap = second["at_step"]["mean"] - first["at_step"]["mean"]
    assert second["against"]["mean"] == pytest.approx(gap)
    # fp16 keeps 11 bits of each operand, and the runs share their seeds.
    assert abs(gap) < 0.05
    assert found["differing"] == {"precision.policy": ["fp32", "fp16"]}


def test_json_stays_json_when_a_page_is_written_too(narrowcast, trained, tmp_path):
    ended = narrowcast("compare", *trained[:2], "--json", "--html", tmp_path / "page.html")
    assert json.loads(ended.out + ended.err)["groups"][0]["label"]
    assert (tmp_path / "page.html").is_file()


def test_a_resumed_run_is_compared_like_any_other(narrowcast, trained, tmp_path):
    copy = tmp_path / "longer"
    shutil.copytree(trained[0], copy)
    assert narrowcast("resume", copy, "steps=6", "--quiet").code == 0
    found = json.loads(narrowcast("compare", trained[0], copy, "--json").out)
    assert found["at_step"] == 4
    assert found["differing"] == {"steps": ["4", "6"]}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["compare"], "Missing argument"),
        (["compare", "nowhere"], "two or more different run folders"),
        (["compare", "nowhere", "elsewhere"], "nowhere does not exist"),
    ],
)
def test_what_cannot_be_compared_is_bad_input(words, said, narrowcast):
    ended = narrowcast(*words)
    assert ended.code == 2
    assert said in ended.err
    assert "Traceback" not in ended.err


def test_a_target_and_a_metric_can_be_asked_for(narrowcast, trained):
    words = ("--metric", "perplexity", "--target", "0.5")
    ended = narrowcast("compare", *trained, *words)
    assert "evaluated perplexity at step 4" in ended.out
    assert "not reached" in ended.out
