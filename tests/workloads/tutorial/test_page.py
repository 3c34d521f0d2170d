"""The page that teaches shows the workload as it is."""

from pathlib import Path

import pytest

from narrowcast.workloads import tutorial

FOLDER = Path(tutorial.__file__).parent
PAGE = Path(__file__).parents[3] / "docs" / "workloads" / "your-own.md"
SHOWN = [*FOLDER.glob("*.py"), FOLDER / "recipes" / "tutorial.yaml"]


@pytest.mark.parametrize("file", SHOWN, ids=lambda file: file.name)
def test_the_page_shows_every_file_as_it_is(file):
    assert f"\n{file.read_text(encoding='utf-8')}```\n" in PAGE.read_text(encoding="utf-8")


def test_it_is_short_enough_to_be_read():
    lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in FOLDER.glob("*.py"))
    assert lines < 150
