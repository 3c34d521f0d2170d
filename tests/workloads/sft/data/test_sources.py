import importlib.util
import os
import re
import sys

import pytest

from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.workloads.sft.data.settings import SftData
from narrowcast.workloads.sft.data.sources import choose_splits, find_sources

ROW = [{"question": "a", "answer": "b"}]


def names(sources):
    return [source.file.name for source in sources]


def test_paths_and_globs_are_taken_once_each_in_order(write, tmp_path):
    for name in ("b.jsonl", "a.jsonl", "c.jsonl"):
        write(ROW, name)
    given = (str(tmp_path / "b.jsonl"), str(tmp_path / "*.jsonl"))
    found = find_sources(SftData(path=given))
    assert names(found.train) == ["b.jsonl", "a.jsonl", "c.jsonl"]
    assert found.notes == (f"{tmp_path}/b.jsonl is listed more than once and read once",)


@pytest.mark.parametrize("word", ["validation", "val", "dev", "valid"])
def test_a_file_whose_name_says_so_is_validated_on_and_test_is_left_alone(word, write, tmp_path):
    for name in ("train.jsonl", f"my_{word}.jsonl.gz", "test.jsonl", "devices.jsonl"):
        write(ROW, name)
    found = find_sources(SftData(path=str(tmp_path / "*")))
    assert names(found.train) == ["devices.jsonl", "train.jsonl"]
    assert names(found.validation) == [f"my_{word}.jsonl.gz"]
    assert "used for validation" in found.notes[0]
    assert "test.jsonl is not used" in found.notes[1]
    all_of_it = find_sources(SftData(path=str(tmp_path / "*"), use_existing_splits=False))
    assert len(all_of_it.train) == 4


def test_a_file_that_is_named_alone_is_trained_on_whatever_it_is_called(write, settings):
    assert names(find_sources(settings(write(ROW, "test.jsonl"))).train) == ["test.jsonl"]


def test_what_to_validate_on_can_be_named(write, settings):
    train, held = write(ROW, "train.jsonl"), write(ROW, "test.jsonl")
    found = find_sources(settings(train, validation_path=str(held)))
    assert (names(found.train), names(found.validation)) == (["train.jsonl"], ["test.jsonl"])


def test_what_is_no_file_is_said_at_once(write, tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "loop.jsonl").symlink_to(tmp_path / "loop.jsonl")
    given = ("pipe.jsonl", "none/x.jsonl", "*.csv", "loop.jsonl", "\0", "**x/y")
    paths = (*(str(tmp_path / name) for name in given), str(tmp_path), "/dev/zero", "/" * 3000)
    with pytest.raises(ConfigError) as caught:
        find_sources(SftData(path=paths))
    said = str(caught.value)
    for part in (
        "pipe.jsonl cannot be read: it is a pipe, not a file",
        "x.jsonl: no such file",
        "*.csv: no such file",
        "zero byte",
        f"{tmp_path} cannot be read: it is a folder; write {tmp_path}/*.jsonl",
        "/dev/zero cannot be read: it is a device, not a file",
    ):
        assert part in said


@pytest.mark.skipif(importlib.util.find_spec("datasets") is not None, reason="datasets is there")
def test_a_name_of_the_hub_says_what_to_install():
    with pytest.raises(UnsupportedError, match=r"is not a file; .* needs datasets. Run pip"):
        find_sources(SftData(path="openai/gsm8k", dataset_config_name="main"))


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Let another library answer to the name of `datasets`, as the Hub might."""

    def answers(code):
        (tmp_path / "datasets.py").write_text(f"def load_dataset(name, config):\n    {code}\n")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "datasets", raising=False)
        importlib.invalidate_caches()

    yield answers
    sys.modules.pop("datasets", None)


def test_a_data_set_of_the_hub_is_loaded_with_its_configuration_and_splits(hub):
    hub('return {"train": [{"text": name + "/" + config}], "dev": [{"text": "held"}]}')
    found = find_sources(SftData(path="owner/name", dataset_config_name="main"))
    (train,), (held,) = found.train, found.validation
    assert (train.name, held.name) == ("owner/name (train)", "owner/name (dev)")
    assert [row.values for row in train.rows()] == [{"text": "owner/name/main"}]
    assert [row.location for row in held.rows()] == ["owner/name (dev), row 1"]
    alone = SftData(path="owner/name", dataset_config_name="main", use_existing_splits=False)
    assert find_sources(alone).validation == ()


@pytest.mark.parametrize(
    ("code", "kind", "said"),
    [
        (
            'raise ConnectionError("no net")',
            UnsupportedError,
            "cannot be downloaded and is not",
        ),
        ('raise FileNotFoundError("none")', ConfigError, "cannot be loaded: none. Write the name"),
        (
            'raise ValueError("which config?")',
            ConfigError,
            r"cannot be loaded: which config",
        ),
        ("return {}", ConfigError, "Dataset owner/name has no splits"),
    ],
)
def test_what_the_hub_cannot_give_is_said(hub, code, kind, said):
    hub(code)
    with pytest.raises(kind, match=said):
        find_sources(SftData(path="owner/name"))


def test_a_configuration_without_a_data_set_is_refused(write, settings):
    data = settings(write(ROW), dataset_config_name="main")
    with pytest.raises(ConfigError, match="files have no configurations"):
        find_sources(data)


@pytest.mark.parametrize(
    ("there", "train", "held"),
    [
        (["test", "train", "dev", "validation"], "train", "validation"),
        (["train", "test"], "train", ""),
        (["all"], "all", ""),
        (["dev"], "dev", ""),
    ],
)
def test_splits_of_the_hub_are_chosen_by_name(there, train, held):
    (trained,), validation, notes = choose_splits("a/b", {name: [{"of": name}] for name in there})
    assert [source.name for source in validation] == [f"a/b ({held})"] * bool(held)
    assert [(row.values, row.location) for row in trained.rows()] == [
        ({"of": train}, f"a/b ({train}), row 1")
    ]
    assert bool(notes) is (train != "train")


def test_sums_need_no_file():
    (source,) = find_sources(SftData(path="sums")).train
    rows = [row.values for row in source.rows()]
    assert len({row["question"] for row in rows}) == len(rows) == 1000
    for row in rows:
        sum_of, _, result = row["answer"].partition(" = ")
        a, b = map(int, sum_of.split(" + "))
        assert int(result) == a + b
        assert [int(digit) for digit in re.findall(r"\d+", row["question"])] == [a, b]
