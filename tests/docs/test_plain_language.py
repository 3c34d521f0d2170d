"""Sentences of the documentation are short."""

import re
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MEDIAN_WORDS, LONG_WORDS = 18, 32
"""Limits per page: of the median sentence, and of the 90th percentile."""
FOLDERS = (
    "docs/start", "docs/migrate", "docs/guides", "docs/concepts", "docs/workloads",
    "docs/benchmarks",
)  # fmt: skip
SINGLE_PAGES = ("README.md", "CONTRIBUTING.md", "docs/troubleshooting.md", "docs/architecture.md")
"""Pages outside of the folders."""
PAGES = [page for name in FOLDERS for page in sorted((ROOT / name).rglob("*.md"))]
PAGES += [ROOT / name for name in SINGLE_PAGES]


def sentences(text):
    """Return the sentences of Markdown, without fences, tables, headings, comments and images."""
    text = re.sub(r"(?s)\A---\n.*?\n---\n", "", text)
    text = re.sub(r"(?ms)^( *)```.*?^\1```$|<!--.*?-->", "", text)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`\n]+`", "CODE", text)
    prose = [line for line in text.splitlines() if not re.match(r"\s*(#|\||:::)", line)]
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", "\n".join(prose)):
        plain = re.sub(r"^\s*(?:[-*]|\d+\.) ", "", " ".join(block.split())).replace("**", "")
        yield from (s for s in re.split(r"(?<=[.!?])\s+", plain) if re.search(r"\w", s))


def lengths(text):
    """Return the number of words of each sentence; code in backticks is one word."""
    return [len(re.findall(r"\S*\w\S*", sentence)) for sentence in sentences(text)]


def test_code_tables_and_headings_are_not_sentences():
    prose = (
        "# A title\n\nOne two. Three `a.b. c` four:\n\n- Five six\n1. **Seven.** Eight nine ten.\n"
    )
    others = "\n| a | b |\n|---|---|\n\n```python\nx = 1\n```\n"
    assert lengths(prose + others) == [2, 3, 2, 1, 3]


def test_a_long_sentence_is_as_long_as_it_is():
    assert lengths("word " * 40 + "; and\nmore: (words).") == [43]


@pytest.mark.parametrize("measured", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_sentences_are_short(measured):
    words = lengths(measured.read_text(encoding="utf-8"))
    assert len(words) > 5
    assert statistics.median(words) <= MEDIAN_WORDS
    assert statistics.quantiles(words, n=10)[-1] <= LONG_WORDS


def test_readme_fits_150_lines():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
