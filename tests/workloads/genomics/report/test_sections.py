"""What the report of a genomic run draws, read back and held against what was judged."""

import json
import re
import shutil
from html.parser import HTMLParser

import numpy as np
import pytest
from scipy import stats

from narrowcast.runs.report_drawing import Scale
from narrowcast.workloads.genomics.report.pictures import correlation
from narrowcast.workloads.genomics.report.sections import sections


@pytest.fixture
def copied(finished, tmp_path):
    """A copy of a finished run, whose files may be changed."""

    def copy(name, **changes):
        folder = tmp_path / name
        shutil.copytree(finished(name), folder)
        if changes:
            told = json.loads((folder / "judged.json").read_text())
            told["validation"].update(changes)
            (folder / "judged.json").write_text(json.dumps(told))
        return folder

    return copy


def drawn(folder):
    return {section.title: section.html for section in sections(folder, [])}


def judged(folder, part="validation"):
    return json.loads((folder / "judged.json").read_text())[part]


class _Table(HTMLParser):
    def __init__(self):
        super().__init__()
        self.rows, self.cell = [], False

    def handle_starttag(self, tag, attrs):
        if tag == "tr":
            self.rows.append([])
        self.cell = tag in ("td", "th")
        if self.cell:
            self.rows[-1].append("")

    def handle_data(self, data):
        if self.cell:
            self.rows[-1][-1] += data

    def handle_endtag(self, tag):
        self.cell = self.cell and tag not in ("td", "th")


def table(html):
    reader = _Table()
    reader.feed(html)
    return reader.rows


def test_measures_of_both_sets_are_those_that_were_judged(finished):
    folder = finished("pairs")
    head, *rows = table(drawn(folder)["Metrics"])
    assert head == ["metric", "validation, 8 rows", "test, 19 rows"]
    assert rows[0] == [
        "MCC",
        *(f"{judged(folder, part)['measured']['mcc']:.4f}" for part in ("validation", "test")),
    ]


def test_the_table_of_confusions_has_the_counts_and_their_sums(finished):
    folder = finished("values"), finished("pairs")
    assert "Confusion matrix" not in drawn(folder[0])
    html = drawn(folder[1])["Confusion matrix"]
    first = table(html.partition("</table>")[0])
    told = judged(folder[1])["confusion"]
    assert first[0] == ["true \\ predicted", *told["classes"], "total"]
    counts = [[int(cell) for cell in row[1:]] for row in first[1:]]
    assert [row[:-1] for row in counts] == told["counts"]
    assert [row[-1] for row in counts] == [sum(row) for row in told["counts"]]
    assert "<b>benign" not in html


def test_a_curve_goes_through_its_points_and_the_legend_has_its_area(finished):
    folder = finished("pairs")
    html = drawn(folder)["Precision-recall curve"].partition("<h3>Test")[0]
    curves = judged(folder)["curves"]["classes"]
    lines = re.findall(r'<polyline points="([^"]+)"', html)
    assert len(lines) == len(curves)
    for line, (name, curve) in zip(lines, curves.items(), strict=True):
        at = np.array([pair.split(",") for pair in line.split()], dtype=float)
        points = np.array(curve["points"])
        # Both axes are linear, precision upwards; places are written to a tenth.
        assert stats.linregress(points[:, 0], at[:, 0]).slope > 0
        scale = (at[:, 0].max() - at[:, 0].min()) / np.ptp(points[:, 0])
        assert at[:, 0] - at[:, 0].min() == pytest.approx(scale * points[:, 0], abs=0.11)
        assert f"{curve['area']:.3f}</li>" in html
        assert name.replace("<", "&lt;").replace(">", "&gt;") in html


def test_the_cloud_has_a_dot_for_each_prediction_and_spearman(finished):
    folder = finished("values")
    html = drawn(folder)["Predicted and true values"]
    told = judged(folder)
    places = np.array(re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', html), dtype=float)
    points = np.array(told["points"])
    assert len(places) == len(points)
    # Dots move to the right with the truth, and upwards with what was predicted.
    assert stats.pearsonr(places[:, 0], points[:, 0]).statistic == pytest.approx(1, abs=1e-4)
    expected = stats.spearmanr(points[:, 0], points[:, 1]).statistic
    assert f"Spearman {expected:.3f}" in html


def test_tracks_are_as_long_as_the_runs_of_classes(finished):
    folder = finished("letters")
    html = drawn(folder)["Annotation tracks"]
    told = judged(folder)["tracks"]
    bars = [float(width) for width in re.findall(r'<rect [^>]*width="([\d.]+)"', html)]
    runs = [length for row in told["rows"] for key in ("truth", "found") for _, length in row[key]]
    assert len(bars) == len(runs) > 100
    share = (960 - 8 - 76) / 50  # of the width of the drawing, for 50 letters
    assert bars == pytest.approx([share * length for length in runs], abs=0.11)
    assert "strong" in html
    found = [[kind for kind, n in row["found"] for _ in range(n)] for row in told["rows"]]
    truth = [[kind for kind, n in row["truth"] for _ in range(n)] for row in told["rows"]]
    right = np.mean(np.array(found[0]) == np.array(truth[0]))
    assert f"{right:.0%} predicted correctly" in html


def test_bars_of_letters_are_as_high_as_what_they_add(finished):
    folder = finished("pairs")
    html = drawn(folder)["In-silico mutagenesis"]
    variants = judged(folder, "test")["saliency"]
    picture = re.findall(r"<svg.*?</svg>", html)[0]
    heights = [float(h) for h in re.findall(r'height="([\d.]+)" style="fill:var\(--group', picture)]
    adds = np.abs(variants[0]["adds"])
    assert heights == pytest.approx(56 * adds / adds.max(), abs=0.051)
    letters = re.findall(r">([ACGTN])</text>", picture)
    spelt = [*variants[0]["alternative"]]
    at = next(
        n for n, (a, b) in enumerate(zip(variants[0]["reference"], spelt, strict=True)) if a != b
    )
    spelt.insert(at + 1, variants[0]["reference"][at])
    assert letters == spelt


def test_samples_are_shown_with_their_spectrum(finished):
    folder = finished("base")
    html = drawn(folder)["Generated sequences"]
    told = judged(folder)["written"]
    spectrum = told["spectrum"]
    expected = np.corrcoef(spectrum["held_out"], spectrum["written"])[0, 1]
    assert f"Correlation of 3-mer frequencies: {expected:.3f}." in html
    for sample in told["samples"]:
        text = sample["written"]
        assert f"{sample['prompt']}</span>{text}</pre>" in html
        strong = (text.count("G") + text.count("C")) / len(text)
        assert f"{sample['name']}, GC {strong:.1%}" in html


def test_correlation_is_that_of_numpy():
    one, two = np.random.default_rng(0).normal(size=(2, 30))
    assert correlation(one, two) == pytest.approx(np.corrcoef(one, two)[0, 1])
    assert correlation([1.0, 1.0], [1.0, 2.0]) == 0


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-3.2, 8e5), (1e-9, 3e-9), (5, 5)])
def test_ticks_are_few_round_and_inside(low, high):
    scale = Scale(low, high, 0, 100)
    ticks = scale.ticks()
    assert 1 <= len(ticks) <= 12
    assert all(scale.low - 1e-12 <= value <= scale.high * (1 + 1e-12) for value, _ in ticks)
    assert len({label for _, label in ticks}) == len(ticks)


def test_a_run_that_has_not_ended_has_no_pictures(copied):
    folder = copied("pairs")
    (folder / "judged.json").unlink()
    assert list(drawn(folder)) == ["Model and data"]


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"validation": 3}', '{"validation": {}}', "NaN"])
def test_a_damaged_file_is_a_sentence(copied, text):
    folder = copied("pairs")
    (folder / "judged.json").write_text(text)
    assert "judged.json" in drawn(folder)["Metrics"]


@pytest.mark.parametrize(
    ("name", "changes", "title"),
    [
        ("pairs", {"confusion": {"classes": ["a"], "counts": [[1], [2]]}},
         "Confusion matrix"),
        ("pairs", {"curves": {"classes": {"a": {}}, "others": None}}, "Precision-recall curve"),
        ("values", {"points": [[1], [2]]}, "Predicted and true values"),
        ("letters", {"tracks": {"rows": [{"truth": [[9, 10**12]], "found": [[0, 1]]}]}},
         "Annotation tracks"),
        ("base", {"written": {"samples": [], "spectrum": {"k": "x"}}}, "Generated sequences"),
    ],
)  # fmt: skip
def test_a_damaged_part_is_a_sentence_and_the_rest_is_drawn(copied, name, changes, title):
    found = drawn(copied(name, **changes))
    assert "judged.json is damaged" in found[title]
    assert "<table" in found["Metrics"]


def test_values_that_are_not_finite_are_said_to_be(copied):
    folder = copied("values", points=[[1.0, "nan"], [2.0, "inf"]])
    assert "not finite" in drawn(folder)["Predicted and true values"]


def test_a_folder_without_anything_is_no_traceback(tmp_path):
    assert drawn(tmp_path) == {}
