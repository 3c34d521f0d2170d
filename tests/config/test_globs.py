import os

import pytest

from narrowcast.config.files import matching


@pytest.fixture
def tree(tmp_path, monkeypatch):
    for name in ("a.txt", "B.txt", ".c.txt", "x/a.txt", "x/y/a.txt", "x/y/b.md", "[z]/a.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "circle").symlink_to(tmp_path)
    (tmp_path / "nowhere").symlink_to("nothing")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "glob",
    [
        "*", "*.txt", "?.txt", "[ab].txt", "**/*.txt", "x/**/*", "**/y/*", "**/x/**/a.txt",
        "x/../*.txt", "*/*/*", "**/**/a.txt", "[[]z]/a*", "[!a]*", "a.txt/*", "none/*", "**/none-*",
        "**/x/",
    ],
)  # fmt: skip
def test_a_glob_matches_what_pathlib_matches(tree, glob):
    from pathlib import Path

    assert matching(Path(glob)) == sorted(set(Path().glob(glob)))
    assert matching(tree / glob) == sorted(set(tree.glob(glob)))


def test_a_folder_that_may_not_be_read_is_passed_over(tree):
    (tree / "x").chmod(0)
    try:
        found = matching(tree / "**/a.txt")
    finally:
        (tree / "x").chmod(0o755)
    assert tree / "a.txt" in found
    assert os.geteuid() == 0 or tree / "x/a.txt" not in found
