"""What a report draws of networks and ablations, read back from the drawing."""

import json
import re
from html.parser import HTMLParser

import pytest

from narrowcast.errors import ConfigError
from narrowcast.runs import strict_json
from narrowcast.workloads.sft.ica import FunctionalNetworks, Layout, Provenance, save_networks
from narrowcast.workloads.sft.ica import page as drawing
from narrowcast.workloads.sft.ica.page import page, sections
from narrowcast.workloads.sft.ica.study.ablation import (
    Ablation,
    Interval,
    KeepOnlyResult,
    Lesion,
    Level,
    Versus,
)
from narrowcast.workloads.sft.ica.text import table

NETWORKS = FunctionalNetworks(
    networks={0: {0: (0, 50), 2: (99,)}, 1: {0: (50,), 1: (3,)}},
    layout=Layout(layers=(0, 1, 2), width=100, depth=3),
    provenance=Provenance(model="a <b> model", findings=("5 < 6",)),
)


def level(loss):
    return Level(loss=loss, accuracy=0.5)


def an_ablation(*, lesion=3.0, difference=(0.9, 0.8, 1.0), at_least=0):
    value, low, high = difference
    equal = Versus(
        channels=4,
        masks=tuple(level(2.0 + n / 100) for n in range(39)),
        difference=Interval(value=value, low=low, high=high),
        at_least=at_least,
        at_most=39 - at_least,
    )
    cost = Interval(value=lesion - 2, low=lesion - 2.1, high=lesion - 1.9)
    one = {"channels": 3, "level": level(lesion), "cost": cost, "equal": equal}
    return Ablation(
        model="m",
        data="d",
        networks="n",
        documents=9,
        tokens=900,
        seed=0,
        channels=300,
        whole=level(2.0),
        lesion=Lesion(components=(0, 1), **one),
        share=0.15,
        larger=equal,
        each=(Lesion(components=(0,), **one), Lesion(components=(1,), **one)),
        preserve=tuple(
            KeepOnlyResult(components=k, channels=10 * k, level=level(9.0 - k), cost=cost)
            for k in (1, 2)
        ),
    )


def marks_of(svg):
    """Return where the map has marks: layer and channel of each, by path."""
    found = []
    for path in re.findall(r'<path d="([^"]*)"', svg):
        places = re.findall(r"M([\d.]+) ([\d.]+)h", path)
        found.append([(float(x), float(y)) for x, y in places])
    return found


def test_the_map_has_a_mark_for_every_channel_at_its_place():
    inner = drawing.WIDTH - drawing.LEFT - drawing.RIGHT
    for component, marks in enumerate(marks_of(drawing.channel_map(NETWORKS))):
        expected = [(n, c) for n, some in NETWORKS.networks[component].items() for c in some]
        read = [
            (round((y - drawing.TOP - 0.5) / 16), round((x - drawing.LEFT) / inner * 100))
            for x, y in marks
        ]
        assert read == expected


def test_the_overlap_of_two_networks_is_written_in_its_cell():
    # One of four channels is common to both.
    assert drawing.overlap(NETWORKS).count(">0.25<") == 2


def test_a_bar_reaches_as_far_as_its_number():
    svg = drawing.ablation_bars(an_ablation())
    zero = float(re.search(r'<line x1="([\d.]+)"[^>]*style="stroke:var\(--line\)', svg)[1])
    bars = re.findall(r'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', svg)
    ends = re.findall(r'<line x1="([\d.]+)" y1="19.0" x2="([\d.]+)" y2="19.0"', svg)
    (x, width), (low, high) = map(float, bars[0]), map(float, ends[0])
    assert x == pytest.approx(zero, abs=0.2)
    # The interval is 0.9 to 1.1 of a bar of 1.0.
    assert (low - zero) / width == pytest.approx(0.9, abs=0.01)
    assert (high - zero) / width == pytest.approx(1.1, abs=0.01)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "These networks matter more than random ones of the same size: "),
        (
            {"difference": (0.1, -0.1, 0.3)},
            "These networks do not differ significantly from random",
        ),
        ({"at_least": 1}, "These networks do not differ significantly from random ones"),
        ({"difference": (-0.5, -0.6, -0.4), "at_least": 39}, "These networks matter less than "),
        (
            {"difference": (-0.5, -0.6, -0.4), "at_least": 38},
            "These networks do not differ significantly from random ones",
        ),
    ],
)
def test_the_verdict_is_what_the_interval_and_the_rank_say(changes, said):
    assert an_ablation(**changes).verdict().startswith(said)


def test_a_folder_without_networks_has_no_section(tmp_path):
    assert sections(tmp_path) == []


def test_sections_are_a_pure_function_of_the_folder_and_hold_no_markup_of_the_data(tmp_path):
    save_networks(NETWORKS, tmp_path / "networks.json")
    (tmp_path / "ablation.json").write_text(strict_json.dumps(an_ablation().to_json()))
    measured = {"mode": "lesion", "masked": {"loss": 3.0}, "lifted": {"loss": 2.5}}
    (tmp_path / "masked.json").write_text(json.dumps(measured))
    found = sections(tmp_path)
    assert found == sections(tmp_path)
    titles = [each.title for each in found]
    assert titles == [
        "Functional networks",
        "Evaluation with and without masks",
        "Ablation of each network",
    ]
    text = "".join(each.html for each in found)
    assert "a &lt;b&gt; model" in text
    assert "<b>" not in text
    assert "2.5000" in text


def test_a_page_is_whole_and_names_no_address(tmp_path):
    save_networks(NETWORKS, tmp_path / "networks.json")
    text = page("<Title>", sections(tmp_path))
    reader = HTMLParser()
    reader.feed(text)
    reader.close()
    assert "&lt;Title&gt;" in text
    assert not re.search(r"https?:|url\(|<script", text)


def test_a_damaged_file_is_an_error_with_its_name(tmp_path):
    (tmp_path / "networks.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"networks\.json: the file must have .* got nothing"):
        sections(tmp_path)


def test_columns_of_numbers_stand_at_the_right():
    assert table(["a", "n"], [["x", "1"], ["yy", "10"]]) == ["a    n", "x    1", "yy  10"]
