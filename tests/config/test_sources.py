import os
from pathlib import Path

import pytest

from narrowcast.config import sources
from narrowcast.config.registry import recipes_in
from narrowcast.errors import ConfigError


def read_source(source):
    """Read it, where the shipped recipes are those of the fixture."""
    files = recipes_in(Path.cwd().parent / "shipped")
    named = dict(sorted(files.items(), key=lambda item: item[0].count("/")))
    return sources.read_source(source, named)


@pytest.fixture
def recipes(tmp_path, monkeypatch):
    """A folder of shipped recipes that holds what the tests say, and a working folder."""
    folder = tmp_path / "shipped"
    (folder / "lm").mkdir(parents=True)
    (folder / "quickstart.yaml").write_text("workload: toy\ndescription: small\n")
    (folder / "lm" / "gpt-1.3b.yaml").write_text("workload: toy\ndescription: large\n")
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return work


def test_a_shipped_recipe_is_found_by_its_name(recipes):
    found = read_source("lm/gpt-1.3b")
    assert (found.name, found.origin) == ("lm/gpt-1.3b", "lm/gpt-1.3b.yaml")
    assert found.text == "workload: toy\ndescription: large\n"


def test_a_file_is_found_by_its_path_and_called_after_its_last_part(recipes):
    (recipes / "my.run.yaml").write_text("steps: 3\n")
    found = read_source("./my.run.yaml")
    assert (found.name, found.origin, found.shown) == ("my.run", "my.run.yaml", "./my.run.yaml")


def test_a_file_may_have_any_suffix_or_none(recipes):
    (recipes / "settings").write_text("steps: 3\n")
    assert read_source("settings").text == "steps: 3\n"


def test_a_file_called_like_a_shipped_recipe_is_reached_through_its_path(recipes):
    (recipes / "quickstart").write_text("steps: 3\n")
    assert "small" in read_source("quickstart").text
    assert read_source("./quickstart").text == "steps: 3\n"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("quickstrt", "quickstrt: no such recipe. Did you mean quickstart?"),
        ("quickstart.yaml", "quickstart.yaml: no such file. Did you mean quickstart?"),
        ("gpt-1.3b", "Did you mean lm/gpt-1.3b?"),
        ("mien.yaml", "mien.yaml: no such file. Did you mean mine.yaml?"),
        (
            "xyzzy",
            "xyzzy: no such recipe. Name a YAML file or a shipped recipe: quickstart, lm/gpt-1.3b",
        ),
        ("no/such/place.yaml", "no/such/place.yaml: no such file. Name a YAML file or"),
        ("", r"\(nothing\): no such recipe"),
        ("mine.yaml/x", "no such recipe"),
    ],
)
def test_an_unknown_source_is_refused_with_what_there_is(recipes, source, message):
    (recipes / "mine.yaml").write_text("steps: 3\n")
    with pytest.raises(ConfigError, match=message):
        read_source(source)


def test_a_folder_is_refused_with_a_file_in_it(recipes):
    (recipes / "mine.yaml").write_text("steps: 3\n")
    with pytest.raises(ConfigError, match=r"must be a file, got the folder .*Name e.g. mine.yaml"):
        read_source(".")


@pytest.mark.parametrize("content", [b"\xff\xfea", b"steps: 3\x00", bytes(range(256))])
def test_a_binary_file_is_refused(recipes, content):
    (recipes / "x.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=r"must be UTF-8 text, which x.yaml is not"):
        read_source("x.yaml")


def test_a_large_file_is_refused_without_reading_all_of_it(recipes):
    with (recipes / "big.yaml").open("wb") as file:
        file.truncate(2**40)  # sparse
    with pytest.raises(ConfigError, match=r"big.yaml: it is larger than 1 MiB"):
        read_source("big.yaml")


def test_a_file_that_may_not_be_read_is_refused(recipes):
    if os.geteuid() == 0:
        pytest.skip("needs a user other than root, who may read everything")
    (recipes / "x.yaml").write_text("steps: 3\n")
    (recipes / "x.yaml").chmod(0)
    with pytest.raises(ConfigError, match=r"cannot read the recipe x.yaml: Permission denied"):
        read_source("x.yaml")


def test_a_link_in_a_circle_is_no_misspelling_of_itself(recipes):
    (recipes / "l1.yaml").symlink_to("l2.yaml")
    (recipes / "l2.yaml").symlink_to("l1.yaml")
    with pytest.raises(ConfigError) as caught:
        read_source("l1.yaml")
    assert str(caught.value) == (
        "cannot read the recipe l1.yaml: Too many levels of symbolic links. Name a YAML file"
    )


def test_a_device_and_names_that_cannot_be_are_refused_at_once(recipes):
    for source, why in [
        ("/dev/zero", "it is a device"),
        ("x" * 10**6, "File name too long"),
        ("a\0b", "zero byte in its name"),
    ]:
        with pytest.raises(ConfigError, match=why) as caught:
            read_source(source)
        assert len(str(caught.value)) < 400


def test_a_recipe_may_come_from_a_pipe(recipes):
    reading, writing = os.pipe()
    os.write(writing, b"steps: 3\n")
    os.close(writing)
    found = read_source(f"/dev/fd/{reading}")
    os.close(reading)
    assert (found.name, found.origin, found.text) == ("piped", "pipe", "steps: 3\n")
    assert found.shown == f"/dev/fd/{reading}"


def test_a_pipe_that_nobody_writes_to_is_refused(recipes, monkeypatch):
    monkeypatch.setattr(sources, "SILENCE_SECONDS", 0.1)
    os.mkfifo(recipes / "pipe")
    with pytest.raises(ConfigError, match=r"recipe pipe: it is a pipe to which nobody wrote for"):
        read_source("pipe")
