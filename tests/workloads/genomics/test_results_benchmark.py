"""What `benchmarks/genomics.py` sets beside results is what it says, and no test part leaks."""

import csv
import gzip
import json
import math
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("sklearn")
BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
WINDOW = 2048


@pytest.fixture
def studies(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from genomics_studies import baselines, preparing, questions, running

    return baselines, preparing, questions, running


def read(path):
    with gzip.open(path, "rt") as file:
        return list(csv.DictReader(file))


def test_a_chain_has_the_perplexity_that_counting_letter_by_letter_gives(studies):
    baselines, *_ = studies
    chance = np.random.default_rng(0)
    learnt, judged = chance.integers(0, 4, 300), chance.integers(0, 4, WINDOW + 300)
    order, smoothing = 3, 2.0
    tables = {depth: baselines._counted([learnt], depth) for depth in range(order + 1)}

    def chance_of(context, base):
        below = 0.25 if not context else chance_of(context[1:], base)
        seen = [
            learnt[at]
            for at in range(len(context), len(learnt))
            if tuple(learnt[at - len(context) : at]) == context
        ]
        return (seen.count(base) + smoothing * below) / (len(seen) + smoothing)

    known, nats, count = {}, 0.0, 0
    for at in range(len(judged)):
        place = at % WINDOW
        if place:
            key = (tuple(judged[max(at - min(order, place), 0) : at].tolist()), int(judged[at]))
            if key not in known:
                known[key] = chance_of(*key)
            nats, count = nats - math.log(known[key]), count + 1
    expected = math.exp(nats / count)
    found = baselines._perplexity(tables, judged, order, smoothing)
    assert found == pytest.approx(expected, rel=1e-12)


def test_frames_of_the_baseline_are_those_from_a_start_to_a_stop(studies):
    baselines, *_ = studies
    #           ......stop (open before it), then ATG AAA TAA in the same frame, then open.
    sequence = "AAATAACCCATGAAATAACCC"
    frames = baselines._frames_of(sequence)
    assert (0, 6) in frames
    assert (9, 18) in frames
    other = sequence.translate(str.maketrans("ACGT", "TGCA"))[::-1]
    turned = {(len(sequence) - end, len(sequence) - start) for start, end in frames}
    assert turned <= set(baselines._frames(other))


def test_every_exon_is_tested_once_and_apart_from_what_is_learnt(studies, shared, tmp_path):
    _, preparing, *_ = studies
    preparing.prepare(shared("brca1_sge").parent, tmp_path, ["brca1"])
    tested = []
    for fold in range(len(preparing.EXON_FOLDS)):
        parts = {
            part: {int(row["pos"]) for row in read(tmp_path / f"brca1/fold{fold}/{part}.csv.gz")}
            for part in ("train", "validation", "test")
        }
        tested += sorted(parts["test"])
        near = min(abs(a - b) for a in parts["test"] for b in parts["train"] | parts["validation"])
        assert near > 450
    assert len(tested) == len(set(tested))
    rows = [read(tmp_path / f"brca1/fold{fold}/test.csv.gz") for fold in range(5)]
    assert sum(len(each) for each in rows) == 3893
    assert sum(row["label"] == "LOF" for each in rows for row in each) == 823


def test_the_window_of_gb1_holds_all_that_varies(studies, shared, tmp_path):
    _, preparing, *_ = studies
    preparing.prepare(shared("flip_gb1").parent, tmp_path, ["gb1"])
    sizes = {"one_vs_rest": 28, "two_vs_rest": 424, "three_vs_rest": 2990, "low_vs_high": 5089}
    for split, learnt in sizes.items():
        parts = {
            part: read(tmp_path / f"gb1/{split}/{part}.csv.gz")
            for part in ("train", "validation", "test")
        }
        assert len(parts["train"]) + len(parts["validation"]) == learnt
        everything = [row["sequence"] for part in parts.values() for row in part]
        # As many different windows as variants: nothing outside them differs.
        assert len(everything) == len(set(everything)) == 8733


def test_what_is_tested_has_learnt_all_other_folds_of_splice_junctions(studies, shared, tmp_path):
    _, preparing, questions, running = studies
    preparing.prepare(shared("splice_uci").parent, tmp_path, ["splice"])
    tested = 0
    for fold in range(preparing.FOLDS):
        sizes = {
            part: len(read(tmp_path / f"splice/fold{fold}/{part}.csv.gz"))
            for part in ("train", "validation", "rest", "test")
        }
        assert sizes["rest"] == sizes["train"] + sizes["validation"] == 3190 - sizes["test"]
        tested += sizes["test"]
    assert tested == 3190
    (question,) = (each for each in questions.QUESTIONS if each.study == "splice")
    job = running.job_of(
        question, candidate=next(iter(question.candidates)), policy="fp32", seed=0, fold=0,
        data=tmp_path, device="cpu", tested=True,
    )  # fmt: skip
    named = [each.split("/")[-1] for each in job.settings if "splice" in each]
    assert named == ["rest.csv.gz", "test.csv.gz"]


def test_runs_that_choose_are_not_told_where_the_test_lies(studies, tmp_path):
    _, _, questions, running = studies
    for question in questions.QUESTIONS:
        job = running.job_of(
            question, candidate=next(iter(question.candidates)), policy="fp32", seed=0, fold=0,
            data=tmp_path, device="cpu", tested=False,
        )  # fmt: skip
        assert not any("data.test" in each or "/test." in each for each in job.settings)


def test_means_are_over_folds_and_spreads_over_seeds(studies):
    *_, running = studies
    results = [
        {
            "question": "q", "candidate": "c", "policy": "p", "seed": seed, "fold": fold,
            "metric": "mcc", "baseline": False, "parameters": 1, "seconds": 1.0,
            "validation": {"mcc": 0.0}, "test": {"mcc": value},
        }
        for seed, fold, value in ((0, 0, 0.1), (0, 1, 0.3), (1, 0, 0.5), (1, 1, 0.7))
    ]  # fmt: skip
    (row,) = running.summary([*results, {"question": "q", "error": "failed"}])
    assert row["test"] == pytest.approx(0.4)
    assert row["test_sd"] == pytest.approx(np.std([0.2, 0.6], ddof=1))
    assert json.dumps(row)
