"""The page about measuring names everyone there is."""

import re
from importlib import import_module
from pathlib import Path

from narrowcast.bench.measure import memory
from narrowcast.bench.measure.timing import SETTLING_STEPS
from narrowcast.bench.worker import SUBJECTS

PAGE = (Path(__file__).parents[2] / "docs" / "bench.md").read_text(encoding="utf-8")


def test_the_table_of_peers_is_that_of_the_code():
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE, re.MULTILINE))
    assert list(rows) == list(SUBJECTS)
    for name, cell in rows.items():
        peers = import_module(SUBJECTS[name]).BENCH.peers
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
