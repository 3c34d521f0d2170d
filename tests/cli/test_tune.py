import json

import narrowcast as nc


def test_a_tuned_policy_file_trains(narrowcast, tiny, tmp_path):
    target = tmp_path / "p.yaml"
    ended = narrowcast(
        "tune", tiny, "hardware=h200", "--budget", "loss=1%", "-o", str(target),
        "--batches", "1", "--check-steps", "2",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    assert "A preset is best: bf16." in ended.out
    assert f"precision.policy=@{target}" in ended.out
    page = target.with_suffix(".html").read_text()
    assert "fp8 gains no time" in page
    assert "http" not in page.split("<body>")[1].split("<script")[0]
    trained = narrowcast(
        "train", tiny, "steps=2", f"precision.policy=@{target}", "--out", str(tmp_path / "run")
    )
    assert trained.code == 0, trained.err
    resolved = json.loads((tmp_path / "run" / "resolved.json").read_text())
    assert resolved["precision.policy"]["value"] == "bf16"


def test_a_cpu_says_that_no_time_can_be_gained(narrowcast, tiny):
    ended = narrowcast("tune", tiny, "device=cpu", "--json", "--batches", "1")
    result = json.loads(ended.out)
    assert result["preset"] == "fp32"
    assert "Write hardware=h200" in result["notes"][0]
    assert result["check"] is None


def test_the_budget_may_follow_as_separate_terms(narrowcast, tiny):
    ended = narrowcast("tune", tiny, "--budget", "loss=1%", "memory=1KiB", "--batches", "1")
    assert ended.code == 2
    assert "a step needs at least" in ended.err
    assert "Write memory=" in ended.err


def test_mistakes_are_found_before_anything_is_measured(narrowcast, tiny, tmp_path):
    for arguments, message in {
        ("--budget", "loss=1"): "cannot be read. Write e.g. loss=0.5%",
        ("hardware=h2000",): "hardware must be one of v100",
        ("-o", str(tmp_path / "none" / "p.yaml")): "there is no folder",
        ("-o", "p.txt"): "must name a .yaml file",
        ("--budget", "time=80%", "device=cpu"): "needs the rates of a GPU",
        ("parallel.ranks=2",): "Leave parallel.ranks out",
        ("sed=1",): "Did you mean seed?",
    }.items():
        ended = narrowcast("tune", tiny, *arguments)
        assert ended.code == 2
        assert message in ended.err
        assert "measuring" not in ended.err


def test_a_policy_file_that_is_wrong_says_where(narrowcast, tiny, tmp_path):
    path = tmp_path / "p.yaml"
    for text, message in {
        "policy: bf17": "no preset 'bf17'",
        "polcy: bf16": "must have a policy",
        "policy: bf16\nexception: {}": "no such key in a policy file: exception",
        "policy: bf16\nexceptions: [a]": "exceptions must be one `glob: format` per line",
        "policy: {": "p.yaml:1",
    }.items():
        path.write_text(text)
        ended = narrowcast("plan", tiny, f"precision.policy=@{path}")
        assert ended.code == 2, text
        assert message in ended.err
    ended = narrowcast("plan", tiny, "precision.policy=@missing.yaml")
    assert "missing.yaml: no such policy file" in ended.err


def test_a_policy_file_may_hold_text_or_exceptions(tmp_path):
    path = tmp_path / "p.yaml"
    path.write_text('policy: bf16\nexceptions:\n  "*.norm": fp32  # why\n')
    assert nc.policy(f"@{path}") == nc.policy("bf16; *.norm: fp32")
    path.write_text("bf16, params=bf16")
    assert nc.policy(f"@{path}") == nc.policy("bf16, params=bf16")
