"""What is kept of a judgement stays small, whatever is judged."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from sklearn import metrics as sk

from narrowcast.workloads.genomics.results import SHOWN_CLASSES, Judged, write_judged
from narrowcast.workloads.genomics.targets import EveryLetter, Labels, OneClass, Value

RNG = np.random.default_rng(0)


@pytest.fixture
def told(tmp_path):
    def write(target, truth, predicted):
        parts = SimpleNamespace(target=target, unit="base", kept=SimpleNamespace(tokenizer="byte"))
        judged = Judged(measured={"loss": float("nan")}, truth=truth, predicted=predicted)
        write_judged(tmp_path, parts, {"validation": judged}, {})
        text = (tmp_path / "judged.json").read_text()
        assert len(text) < 2**18
        return json.loads(text)["validation"]

    return write


def test_of_many_classes_the_rare_ones_are_one_row(told):
    truth = RNG.zipf(1.3, 5000) % 1000
    chances = RNG.random((5000, 1000))
    found = told(OneClass(classes=tuple(map(str, range(1000)))), list(truth), list(chances))
    counts, names = np.array(found["confusion"]["counts"]), found["confusion"]["classes"]
    assert counts.shape == (SHOWN_CLASSES, SHOWN_CLASSES) == (len(names), len(names))
    assert counts.sum() == 5000
    whole = sk.confusion_matrix(truth, chances.argmax(1), labels=range(1000))
    kept = [int(name) for name in names[:-1]]
    assert counts[:-1, :-1].tolist() == whole[np.ix_(kept, kept)].tolist()
    assert counts[:-1].sum(1).tolist() == whole[kept].sum(1).tolist()
    assert found["measured"]["loss"] == "nan"


def test_curves_are_of_the_most_frequent_classes_and_areas_of_all(told):
    truth = (RNG.random((400, 30)) < np.linspace(0.05, 0.6, 30)).astype(np.float32)
    chances = RNG.random((400, 30))
    names = tuple(f"c{n}" for n in range(30))
    found = told(Labels(classes=names), list(truth), list(chances))["curves"]
    areas = [sk.average_precision_score(truth[:, n], chances[:, n]) for n in range(30)]
    frequent = sorted(np.argsort(-truth.sum(0), kind="stable")[:8])
    assert list(found["classes"]) == [names[n] for n in frequent]
    assert [each["area"] for each in found["classes"].values()] == pytest.approx(
        [areas[n] for n in frequent]
    )
    rest = [areas[n] for n in range(30) if n not in frequent]
    assert found["others"] == {"classes": 22, "area": pytest.approx(np.mean(rest))}


def test_a_single_class_is_counted_without_a_warning(told):
    found = told(OneClass(classes=("a", "b")), [np.int64(1)] * 4, [np.array([0.2, 0.8])] * 4)
    assert found["confusion"] == {"classes": ["b"], "counts": [[4]]}


def test_tracks_are_runs_of_the_rows_with_most_classes(told):
    plain, varied = np.zeros(10_000, dtype=np.int64), np.repeat([1, 0, 2], 5)
    found = told(EveryLetter(classes=("a", "b", "c")), [plain, varied], [plain, varied])
    rows = found["tracks"]["rows"]
    assert [row["truth"] for row in rows] == [[[0, 2000]], [[1, 5], [0, 5], [2, 5]]]


def test_a_cloud_has_no_more_points_than_can_be_seen(told):
    values = list(RNG.normal(size=9000).astype(np.float32))
    found = told(Value(), values, values)
    assert len(found["points"]) == 2000
    assert found["points"][0][0] == pytest.approx(values[0], rel=1e-5)
