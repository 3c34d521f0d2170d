"""What the report of a decomposition draws, read back and held against what was found."""

import re

import numpy as np
import pytest

from narrowcast.workloads.decompose.report import schema, sections
from narrowcast.workloads.decompose.report.curves import heat_map

FOUND, MASKS = "Results", "Loss by mask"
IMPORTANCES, COMPONENTS = "Causal importances", "Largest components"
DENSITIES, COURSE = "Activation density of components", "Metrics during training"


@pytest.fixture
def drawn(tmp_path):
    def draw(found=None, records=()):
        if found is not None:
            schema.write(tmp_path, found)
        return {section.title: section.html for section in sections(tmp_path, records)}

    return draw


def rows_of(html):
    return [
        [re.sub("<[^>]*>", "", cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)]
        for row in re.findall(r"<tr>(.*?)</tr>", html)
    ]


def painted(html):
    """Read a heat map back: tints by cell, negative ones below 0."""
    found = {}
    paths = re.findall(r'<path d="([^"]+)" style="fill:var\(--(\w+)\);fill-opacity:([\d.]+)"', html)
    for d, colour, opacity in paths:
        sign = {"series": 1, "evaluated": -1}[colour]
        for x, y, wide in re.findall(r"M(\d+) (\d+)h(\d+)v1H\d+z", d):
            for at in range(int(x), int(x) + int(wide)):
                assert (int(y), at) not in found  # no cell is painted twice
                found[int(y), at] = sign * float(opacity)
    return found


def test_the_table_has_what_was_measured_of_each_site_over_all_seeds(drawn, toy):
    head, one, two, *_ = rows_of(drawn(toy)[FOUND])
    assert head[:5] == ["site", "matrix", "components", "alive", "expected"]
    assert one == [
        "linear1", "5 → 2", "20", "5", "5", "0.19 to 0.21", "0 to 2", "0.9998", "0.997 to 0.998"
    ]  # fmt: skip
    assert two[:2] == ["linear2", "2 → 5"]


def test_each_seed_has_its_verdict_and_what_came_from_elsewhere_is_escaped(drawn, toy):
    html = drawn(toy)[FOUND]
    assert "2 of 3 seeds match the ground truth" in html
    assert html.count('<li class="good">') == 2
    assert '<li class="bad">seed 2: identity error 2 in linear1: &lt;b&gt;' in html


def test_a_heat_map_has_the_tint_of_every_cell(toy):
    picture = toy.sites[0].largest[2].learned
    cells, tints = np.array(picture.cells()), painted(heat_map(picture, alt="", most=96))
    strongest = np.abs(cells).max()
    for at, value in np.ndenumerate(cells):
        assert tints.get(at, 0.0) == pytest.approx(value / strongest, abs=0.051)


def test_order_of_shared_components_is_explained_if_a_site_has_them(drawn, toy):
    note = "Components that all features share are ordered by their sum."
    assert note not in drawn(toy)[IMPORTANCES]
    dense = toy.sites[0].model_copy(update={"shape": "dense"})
    assert note in drawn(toy.model_copy(update={"sites": (dense,)}))[IMPORTANCES]


def test_importances_of_a_perfect_seed_are_a_diagonal_of_full_tints(drawn, toy):
    first = drawn(toy)[IMPORTANCES].split("<h3>")[1]
    tints = painted(first)
    assert {at for at, tint in tints.items() if tint == 1} == {(each, each) for each in range(5)}
    assert "5 of 5 rows have a component above 0.9; 15 of 20 columns stay below 0.1" in first


def test_components_stand_beside_what_they_are_in_the_target(drawn, toy):
    html = drawn(toy)[COMPONENTS]
    assert html.count("<figure") == 10
    assert html.count("<svg") == 20
    each = toy.sites[0].largest[3]
    assert f"feature 3: component {each.number}<br>cosine {each.cosine:.4f}" in html


def test_a_component_that_is_always_in_use_is_said_to_be(drawn, toy):
    site = toy.sites[0]
    always = site.largest[0].model_copy(update={"density": 1.0})
    site = site.model_copy(update={"largest": (always,)})
    assert "active 100 %" in drawn(toy.model_copy(update={"sites": (site,)}))[COMPONENTS]


def test_bars_are_as_many_as_bins_that_hold_something(drawn, language):
    first = drawn(language)[DENSITIES].split("<h3>")[1]
    counts = np.array(language.sites[0].densities.counts)
    heights = [float(h) for h in re.findall(r'height="([\d.]+)" style="fill:var', first)]
    assert len(heights) == (counts > 0).sum()
    assert np.array(heights) / max(heights) == pytest.approx(counts / counts.max(), abs=0.01)
    assert "3,100 never active" in first


def test_losses_by_mask_are_the_table_that_people_publish(drawn, language):
    head, target, ci, zero, *pgd = rows_of(drawn(language)[MASKS])
    assert head[0] == "mask"
    assert target == ["target", "2.710", "", "", ""]
    assert ci == ["ci", "2.990", "0.3000", "+0.280", "6.0%"]
    assert zero[-1] == "100.0%"
    assert pgd[1:] == [["20", "0.83"], ["40", "1.35"]]


def test_a_model_of_24_sites_says_what_is_left_out_and_stays_small(drawn, language):
    found = drawn(language)
    assert "Showing the first 6 of 24 sites." in found[COMPONENTS]
    assert IMPORTANCES not in found
    assert "expected" not in found[FOUND]
    assert sum(map(len, found.values())) < 2 * 2**20


def test_curves_go_through_what_evaluations_measured(drawn, evaluations):
    html = drawn(records=evaluations)[COURSE]
    lines = [
        np.array([point.split(",") for point in each.split()], dtype=float)
        for each in re.findall(r'<polyline points="([^"]+)"', html)
    ]
    assert [len(each) for each in lines] == [6, 5, 6, 6, 6]  # one number was not finite
    measured = [record.metrics["l0/linear1"] for record in evaluations]
    heights = lines[0][:, 1]
    assert np.corrcoef(heights, measured)[0, 1] == pytest.approx(-1, abs=1e-4)  # y points down
    assert "linear1 from 5 to 0.833" in html
    # A number that falls by powers of ten falls in a straight line.
    assert np.diff(lines[-1][:, 1]) == pytest.approx(np.diff(lines[-1][:, 1]).mean(), abs=0.11)
    assert ">1e-06</text>" in html


def test_a_run_that_has_not_ended_has_its_curves_only(drawn, evaluations):
    assert list(drawn(records=evaluations)) == [COURSE]
    assert drawn() == {}


@pytest.mark.parametrize("text", ["", "{}", '{"seeds": [NaN]}', "[" * 100_000, "\x00"])
def test_a_damaged_file_is_a_sentence(text, drawn, tmp_path):
    (tmp_path / schema.FILE).write_text(text)
    assert "decomposition.json cannot be read" in drawn()[FOUND]
