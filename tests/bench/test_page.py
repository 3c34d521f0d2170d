"""The page about measuring agrees with the code."""

import re
from pathlib import Path

from narrowcast.bench import rounds
from narrowcast.bench.contenders import PEERS
from narrowcast.bench.step import SETTLING_STEPS
from narrowcast.bench.zoo import subject
from narrowcast.bench.zoo.models import ZOO
from narrowcast.bench.zoo.ways import KINDS, WAYS

PAGE = (Path(__file__).parents[2] / "docs/benchmarks/measuring.md").read_text(encoding="utf-8")


def test_the_page_lists_the_peers_and_ways_of_the_code():
    listed = dict(re.findall(r"^\| `(step|models)` \| ([^|]*) \|$", PAGE, re.MULTILINE))
    for name, known in {"step": PEERS, "models": KINDS}.items():
        assert re.findall(r"`([^`]+)`", listed[name]) == list(known), name


def test_the_numbers_of_the_page_are_those_of_the_code():
    for text in (
        f"{round(100 * (rounds.PEAK_MARGIN - 1))} % more than the peak of the first",
        f"{rounds.CONTEXT_BYTES // 2**20} MiB",
        f"{round(100 * rounds.USABLE_SHARE)} % of the free memory",
        f"begins with {SETTLING_STEPS} untimed steps",
    ):
        assert text in PAGE


def test_the_table_of_models_is_that_of_the_zoo():
    rows = re.findall(r"^\| ([^|]+) \| `([\w.-]+)` \|$", PAGE, re.MULTILINE)
    assert [(name, about) for about, name in rows] == [(n, e.about) for n, e in ZOO.items()]


def test_what_the_page_says_of_models_is_what_is_done():
    assert f"{subject.ROUNDS} rounds of {subject.ROUND_STEPS} steps" in PAGE
    assert f"takes {subject.WARM_UP_STEPS} untimed steps" in PAGE
    for way in WAYS.values():
        assert way.name in PAGE
