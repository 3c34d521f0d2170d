import json
import re
from importlib.resources import files

import pytest

from narrowcast.errors import CheckpointError
from narrowcast.report.compare.comparison import compare
from narrowcast.report.compare.page import write_comparison
from narrowcast.runs import EvalRecord


@pytest.fixture
def runs(make_run, step):
    def make(policies, seeds=(0, 1)):
        found = []
        for policy in policies:
            for seed in seeds:
                records = [step(n, loss=3.0 / n + seed / 10) for n in range(1, 7)]
                records += [EvalRecord(step=n, metrics={"loss": 3.0 / n + seed}) for n in (2, 4, 6)]
                number = f"r{seed}-{policies.index(policy)}"
                changes = {"precision.policy": policy}
                found.append(make_run(records, steps=6, folder=number, seed=seed, **changes))
        return [str(path) for path in found]

    return make


def figures_of(page):
    text = page.read_text(encoding="utf-8")
    return json.loads(re.search(r'id="figures">(.*?)</script>', text)[1])


def test_the_page_has_a_chart_over_steps_and_one_over_seconds(runs, tmp_path):
    page = write_comparison(compare(runs(["bf16", "fp32"])), tmp_path / "page.html")
    figures = figures_of(page)
    assert list(figures) == ["bystep", "byseconds"]
    assert figures["bystep"]["layout"]["meta"] != figures["byseconds"]["layout"]["meta"]
    lines = [trace for trace in figures["byseconds"]["data"] if trace["showlegend"]]
    assert [trace["name"] for trace in lines] == ["precision.policy=bf16", "precision.policy=fp32"]
    assert len(figures["byseconds"]["data"]) == 4


def test_the_band_is_the_interval_of_the_mean(runs, tmp_path):
    comparison = compare(runs(["bf16"]))
    band, line = figures_of(write_comparison(comparison, tmp_path / "p.html"))["bystep"]["data"]
    at_end = comparison.groups[0].at_step
    assert line["y"][-1] == pytest.approx(at_end.mean, rel=1e-5)
    assert band["y"][2] == pytest.approx(at_end.high, rel=1e-5)
    assert band["y"][3] == pytest.approx(at_end.low, rel=1e-5)


def test_a_repeated_seed_does_not_narrow_the_band(make_run, step, tmp_path):
    folders = []
    for name, seed, loss in (("a", 0, 1.0), ("b", 0, 1.2), ("c", 1, 2.0)):
        records = [step(1), EvalRecord(step=1, metrics={"loss": loss})]
        folders.append(str(make_run(records, steps=1, folder=name, seed=seed)))
    comparison = compare(folders)
    band, line = figures_of(write_comparison(comparison, tmp_path / "p.html"))["bystep"]["data"]
    assert line["y"] == [1.55]
    assert band["y"][0] == pytest.approx(comparison.groups[0].at_step.high, rel=1e-5)


@pytest.mark.parametrize(("target", "lines"), [(1.0, 2), (1e9, 1)])
def test_the_target_is_drawn_where_the_curves_are(target, lines, runs, tmp_path):
    page = write_comparison(compare(runs(["bf16"]), target=target), tmp_path / "page.html")
    assert len(figures_of(page)["byseconds"]["layout"]["shapes"]) == lines


def test_every_colour_is_in_the_style_sheet(runs, tmp_path):
    names = [f"policy{i}" for i in range(10)]
    page = write_comparison(compare(runs(names)), tmp_path / "page.html")
    used = set(re.findall(r'"@([a-z0-9]+)"', json.dumps(figures_of(page))))
    style = files("narrowcast.report").joinpath("templates", "style.css").read_text()
    assert used <= set(re.findall(r"--([a-z0-9-]+):", style))
    assert {f"group{i}" for i in range(8)} <= used


def test_what_the_runs_wrote_cannot_become_part_of_the_page(runs, tmp_path):
    hostile = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    text = write_comparison(compare(runs([hostile, "x"])), tmp_path / "p.html").read_text()
    plain = write_comparison(compare(runs(["y", "z"], (2, 3))), tmp_path / "q.html").read_text()
    assert text.count("<script") == plain.count("<script") == 4
    assert "<img" not in text


def test_the_same_runs_give_the_same_bytes_without_an_outside_address(runs, tmp_path):
    comparison = compare(runs(["bf16", "fp32"]))
    first = write_comparison(comparison, tmp_path / "a.html").read_bytes()
    assert write_comparison(comparison, tmp_path / "b.html").read_bytes() == first
    assert b"://" not in first


def test_a_page_that_cannot_be_written_is_an_error_of_ours(runs, tmp_path):
    with pytest.raises(CheckpointError, match="cannot write"):
        write_comparison(compare(runs(["bf16"])), tmp_path / "missing" / "page.html")
