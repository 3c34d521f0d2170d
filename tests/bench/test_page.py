"""The page about measuring names everyone there is."""

import re
from importlib import import_module
from pathlib import Path

from narrowcast.bench.measure import memory
from narrowcast.bench.measure.timing import SETTLING_STEPS
from narrowcast.bench.worker import SUBJECTS
from narrowcast.bench.zoo import bars, subject
from narrowcast.bench.zoo.models import ZOO
from narrowcast.bench.zoo.running import CORES_TO_START_AHEAD
from narrowcast.bench.zoo.ways import KINDS, WAYS

PAGE = (Path(__file__).parents[2] / "docs" / "bench.md").read_text(encoding="utf-8")


def test_the_table_of_peers_is_that_of_the_code():
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]*) \|$", PAGE, re.MULTILINE))
    assert list(rows) == list(SUBJECTS)
    for name, cell in rows.items():
        peers = KINDS if name == "models" else import_module(SUBJECTS[name]).BENCH.peers
        assert re.findall(r"`([^`]+)`", cell) == list(peers), name


def test_the_numbers_of_the_page_are_those_of_the_code():
    for text in (
        f"{memory.STATE_BYTES} per parameter",
        f"{memory.ACTIVATION_BYTES} per token, layer",
        f"{memory.LOGIT_BYTES} per token and word",
        f"{memory.CONTEXT_BYTES // 2**20} MiB",
        f"{round(100 * memory.USABLE_SHARE)} %",
        f"begins with {SETTLING_STEPS} untimed steps",
    ):
        assert text in PAGE


def test_the_table_of_models_is_that_of_the_zoo():
    rows = re.findall(r"^\| ([^|]+) \| `([\w.-]+)` \|$", PAGE, re.MULTILINE)
    assert [(name, about) for about, name in rows] == [(n, e.about) for n, e in ZOO.items()]


def test_what_the_page_says_of_models_is_what_is_done():
    assert f"{subject.ROUNDS} rounds of {subject.ROUND_STEPS} steps" in PAGE
    assert f"takes {subject.WARM_UP_STEPS} untimed steps again" in PAGE
    assert f"With {CORES_TO_START_AHEAD} cores or more" in PAGE
    assert f"{bars.NEVER_SLOWER:.2f} × AMP of the same mode" in PAGE
    assert f"ResNet-50 {bars.RESNET_NEVER_SLOWER:.2f} ×" in PAGE
    assert f"{bars.FP8_NEVER_SLOWER:.2f} × our bf16 + split" in PAGE
    assert f"at most {bars.FIRST_STEP:.2f} × that of compiled AMP" in PAGE
    for way in WAYS.values():
        assert way.name in PAGE
