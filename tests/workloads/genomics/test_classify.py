"""`genomics/classify`: its data, its choices, its results beside baselines, and predictions."""

import csv
import json
import random

import pytest
from click.testing import CliRunner

import narrowcast as nc
from narrowcast.cli.entry import narrowcast as command
from narrowcast.errors import ConfigError
from narrowcast.genomics import SequenceClassification
from narrowcast.runs import EvalRecord
from narrowcast.workloads.genomics.network_info import read_network_info

SMALL = (
    "epochs=null", "steps=30", "batch_size=32", "model.width=16", "model.layers=1",
    "eval.every=0", "health.every=0", "device=cpu", "precision.task=null",
    "precision.policy=fp32",
)  # fmt: skip
SITE = "TTGACATA"


def table(path, count, *, seed=0, length=40, value=False):
    """Sequences of two classes by a site, or with its number as the value."""
    rng, rows = random.Random(seed), []
    for number in range(count):
        text, at = "".join(rng.choices("ACGT", k=length)), rng.randrange(length - len(SITE))
        if number % 2:
            text = text[:at] + SITE + text[at + len(SITE) :]
        rows.append((text, number % 2 + 0.5 if value else ("other", "site")[number % 2]))
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("sequence", "label"), *rows])
    return rows


def trained(folder, *words):
    records = list(nc.train("genomics/classify", [*SMALL, *words], out=folder))
    (judged,) = [record.metrics for record in records if isinstance(record, EvalRecord)]
    return judged, json.loads((folder / "judged.json").read_text())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    home = tmp_path_factory.mktemp("classify")
    rows = table(home / "rows.csv", 600)
    judged, sets = trained(home / "run", f"data.path={home}/rows.csv")
    return home, rows, judged, sets


def test_one_file_is_split_in_three(run):
    _, rows, _, sets = run
    counts = {name: each["rows"] for name, each in sets.items()}
    assert counts["test"] == pytest.approx(len(rows) * 0.1, abs=1)
    assert counts["validation"] == pytest.approx(len(rows) * 0.09, abs=1)


def test_what_is_judged_at_the_end_is_what_was_judged_before(run):
    *_, judged, sets = run
    assert sets["validation"]["measured"] == pytest.approx(judged)


def test_a_result_stands_beside_its_baselines(run):
    home, _, _, sets = run
    comparison = sets["test"]["comparison"]
    names = list(comparison["rows"])
    assert names[:2] == ["network and linear model", "network alone"]
    assert names[2].startswith("k-mers up to")
    assert names[3] == "letters by position"
    assert comparison["best"] == names[2]
    assert comparison["gain"] == pytest.approx(comparison["value"] - comparison["baseline"])
    page = (home / "run/report.html").read_text()
    assert "Baselines" in page
    assert "letters by position" in page


def test_predictions_are_those_that_were_tested(run):
    home, rows, *_ = run
    done = CliRunner().invoke(
        command, ["genomics", "predict", f"{home}/run", f"{home}/rows.csv", "--device", "cpu"]
    )
    assert done.exit_code == 0, done.output
    predicted = [row["class"] for row in csv.DictReader(done.stdout.splitlines())]
    right = sum(a == label for a, (_, label) in zip(predicted, rows, strict=True))
    assert right / len(rows) > 0.8
    info, _ = read_network_info(f"{home}/run")
    assert info.linear is not None
    assert info.config.backbone == "motif"
    assert info.mix != (1.0, 0.0)


def test_equal_sequences_are_not_on_both_sides(tmp_path):
    rows = table(tmp_path / "train.csv", 200)
    with (tmp_path / "test.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("sequence", "label"), *rows[:40]])
    words = [f"data.path={tmp_path}/train.csv", f"data.test={tmp_path}/test.csv", "steps=1"]
    run = SequenceClassification(out=tmp_path / "run")
    run.settings |= dict(word.split("=", 1) for word in (*SMALL, *words))
    run.fine_tune()
    notes = json.loads((tmp_path / "run/task.json").read_text())["notes"]
    assert any(note.startswith("sequences:") and note.endswith("40 test") for note in notes)
    assert any("are also in the test data" in note for note in notes)


@pytest.mark.parametrize("baseline", ["none", "compared"])
def test_a_network_can_predict_alone(baseline, tmp_path):
    table(tmp_path / "rows.csv", 120, value=True)
    words = ("objective.target=value", f"objective.baseline={baseline}", "steps=3")
    _, sets = trained(tmp_path / "run", f"data.path={tmp_path}/rows.csv", *words)
    assert ("comparison" in sets["test"]) is (baseline == "compared")
    assert not (tmp_path / "run/linear.safetensors").exists()
    info, _ = read_network_info(str(tmp_path / "run"))
    assert (info.linear, info.mix) == (None, (1.0, 0.0))


@pytest.mark.parametrize(
    ("recipe", "words", "match"),
    [
        ("classify", ["data.tokenizer=kmer", "data.mutate=0"], "data.tokenizer must be byte"),
        ("classify", ["data.mutate=0.5", "data.tokenizer=kmer"], "Write tokenizer=byte"),
        ("classify", ["model.patching=static"], "model.patching is not supported"),
        ("annotation", ["model.backbone=motif"], "no state per letter"),
        ("variant_effect", ["model.backbone=auto"], "only for classify"),
        ("variant_effect", ["data.mutate=auto"], "only for classify"),
        ("variant_effect", ["objective.baseline=compared"], "only classify has a baseline"),
        ("variant_effect", ["data.test_share=0.1"], "data.test_share is only for classify"),
    ],
)
def test_a_setting_of_another_task_raises(recipe, words, match):
    with pytest.raises(ConfigError, match=match):
        nc.train(f"genomics/{recipe}", ["device=cpu", *words])
