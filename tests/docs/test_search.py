"""Searching the built documentation finds the right page.

The index is the one that mkdocs writes for the browser, and the score is that of lunr, which
Material runs there. A section scores, for each word of its title and of its text that begins with
a word of the question, BM25 (k1 = 1.2, b = 0.75, field lengths relative to the mean) times lunr's
inverse document frequency times the boost of the field. The boosts (title 1000, text 1), the
separator and the stop-word filter come from the index itself. Pages are ranked by their best
section, as Material groups them.
"""

import html
import json
import math
import os
import re
import subprocess
import sys
from collections import Counter

import pytest

K1, B = 1.2, 0.75
STOP_WORDS = {"a", "about", "do", "from", "i", "is", "my", "of", "on", "should", "the", "to"}
QUESTIONS = {
    "migrate from AMP": {"migrate/torch-amp/"},
    "DDP": {"start/your-loop/", "guides/several-gpus/"},
    "FSDP": {"start/your-loop/", "guides/several-gpus/"},
    "fp8": {"start/which-policy/", "guides/fp8/", "troubleshooting/"},
    "which policy": {"start/which-policy/"},
    "NaN loss": {"troubleshooting/"},
    "memory": {"guides/save-memory/"},
    "Trainer": {"migrate/transformers/", "migrate/lightning/"},
}


@pytest.fixture(scope="module")
def index(docs, tmp_path_factory):
    """Build the site, and return its search index."""
    site = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(site)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(command, cwd=docs.ROOT, env=environment, check=True, timeout=150)
    return json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))


def words_in(text, *, separator):
    """Split a title or a text as the browser does."""
    plain = html.unescape(re.sub(r"<[^>]+>", " ", text)).lower()
    return [word for word in re.split(separator, plain) if word and word not in STOP_WORDS]


def ranked_pages(index, question):
    """Return the pages of an index, best first; those that score nothing are left out."""
    config, sections = index["config"], index["docs"]
    fields = {name: config["fields"][name]["boost"] for name in ("title", "text")}
    counts = {
        name: [Counter(words_in(s[name], separator=config["separator"])) for s in sections]
        for name in fields
    }
    asked = words_in(question, separator=config["separator"])
    matches = {
        word
        for name in fields
        for count in counts[name]
        for word in count
        if word.startswith(tuple(asked))
    }
    best = Counter()
    for word in matches:
        holders = sum(any(counts[name][at][word] for name in fields) for at in range(len(sections)))
        rarity = math.log(1 + abs((len(sections) - holders + 0.5) / (holders + 0.5)))
        for name, boost in fields.items():
            mean = sum(map(Counter.total, counts[name])) / len(sections)
            for at, count in enumerate(counts[name]):
                length = K1 * (1 - B + B * count.total() / mean)
                best[at] += boost * rarity * (K1 + 1) * count[word] / (length + count[word])
    pages = Counter()
    for at, score in best.items():
        page = sections[at]["location"].partition("#")[0]
        pages[page] = max(pages[page], score)
    return [page for page, score in pages.most_common() if score > 0]


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_right_page_is_among_the_first_two(index, question):
    assert QUESTIONS[question] & set(ranked_pages(index, question)[:2])


def test_decisions_and_the_list_of_features_are_not_searched(index):
    found = {section["location"].partition("/")[0] for section in index["docs"]}
    assert found.isdisjoint({"decisions", "features"})
