"""Windows of tokens: none is lost or read twice, and what cannot be cut is said."""

import numpy as np
import pytest
import torch

from narrowcast.errors import ConfigError
from narrowcast.training.task import MapDataset
from narrowcast.workloads.decompose.targets.language import TokenWindows, read_windows, split


def as_bytes(text):
    return list(text.encode())


@pytest.mark.parametrize("count", [2, 19, 20, 61])
def test_every_window_is_in_one_of_the_two_parts(count):
    windows = TokenWindows(np.arange(count * 3 + 2, dtype=np.int32), 3)
    train, held_out = split(windows)
    assert isinstance(train, MapDataset)
    assert len(train) + len(held_out) == count
    assert len(held_out) == max(1, count // 20)
    both = [part.__getitems__(list(range(len(part)))) for part in (train, held_out)]
    tokens = torch.cat(both)
    assert tokens.dtype == torch.int64
    assert tokens.flatten().sort().values.tolist() == list(range(count * 3))


def test_windows_are_those_of_the_text(tmp_path):
    (tmp_path / "a.txt").write_text("abcdef")
    (tmp_path / "b.txt").write_text("ghij")
    windows, digest = read_windows([f"{tmp_path}/*.txt"], as_bytes, length=3, vocabulary=256)
    got = windows.__getitems__([2, 0])
    assert [bytes(row).decode() for row in got.tolist()] == ["\ngh", "abc"]
    (tmp_path / "b.txt").write_text("ghik")
    assert read_windows([f"{tmp_path}/*.txt"], as_bytes, length=3, vocabulary=256)[1] != digest


@pytest.mark.parametrize(
    ("content", "length", "vocabulary", "why"),
    [
        (b"abc", 2, 256, r"two windows of data\.length=2.*3 tokens \(1 windows\)"),
        (b" \n ", 2, 256, r"Write data\.text=\[FILE\]"),
        (b"abc\xff", 2, 256, "not UTF-8 text: byte 0xff at 3"),
        (b"abcdef", 2, 100, "returns token 102 for data.text, but the model has 100"),
    ],
)
def test_text_that_cannot_be_cut_is_refused(tmp_path, content, length, vocabulary, why):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(ConfigError, match=why):
        read_windows([f"{tmp_path}/a.txt"], as_bytes, length=length, vocabulary=vocabulary)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.txt does not exist"):
        read_windows([f"{tmp_path}/none.txt"], as_bytes, length=2, vocabulary=256)
