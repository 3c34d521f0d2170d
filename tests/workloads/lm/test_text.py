import os
import re

import pytest
from hypothesis import given
from hypothesis.strategies import floats, text

from narrowcast.errors import ConfigError
from narrowcast.workloads.lm.text import read_text, split_text

TOPICS = "python-topics"


def test_pythons_own_help_is_english_without_repeated_paragraphs():
    words = read_text([TOPICS])
    paragraphs = words.split("\n\n")
    assert len(words) > 300_000
    assert len(paragraphs) == len(set(paragraphs))
    assert len(re.findall(r"\bthe\b", words)) > 1000


def test_files_are_joined_in_the_order_given_and_globs_by_name(tmp_path):
    for name in ("b", "a", "c"):
        (tmp_path / f"{name}.txt").write_text(name)
    assert read_text([f"{tmp_path}/c.txt", f"{tmp_path}/[ab].txt"]) == "c\na\nb"


def test_a_glob_may_look_into_folders(tmp_path):
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in/deep/a.txt").write_text("found")
    assert read_text([f"{tmp_path}/**/*.txt"]) == "found"


def test_a_relative_glob_is_looked_up_where_the_command_runs(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("here")
    monkeypatch.chdir(tmp_path)
    assert read_text(["*.txt"]) == "here"


def test_a_name_with_brackets_that_exists_is_no_glob(tmp_path):
    (tmp_path / "a[1].txt").write_text("itself")
    (tmp_path / "a1.txt").write_text("other")
    assert read_text([f"{tmp_path}/a[1].txt"]) == "itself"


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfHello")
    assert read_text([f"{tmp_path}/a.txt"]) == "Hello"


def test_carriage_returns_are_kept(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo")
    assert read_text([f"{tmp_path}/a.txt"]) == "one\r\ntwo"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is empty"),
        (b" \n\t", "has only whitespace"),
        (b"caf\xe9 au lait", "is not UTF-8 text: byte 0xe9 at 3"),
        (b"\x1f\x8b\x08\x00", "is not UTF-8 text"),
        (b"plain\x00text", "is a binary file: zero byte at 5"),
    ],
)
def test_a_file_that_is_no_text_is_refused_with_what_to_write(tmp_path, content, why):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"a.txt {why}(.|\n)*Write data.text=FILE"):
        read_text([f"{tmp_path}/a.txt"])


def test_a_folder_is_refused_with_the_glob_that_reads_it(tmp_path):
    with pytest.raises(ConfigError, match=rf"is a folder. Write data.text={tmp_path}/\*.txt"):
        read_text([str(tmp_path)])


@pytest.mark.parametrize("source", ["missing.txt", "*.nothing", "**/none*"])
def test_a_name_that_matches_nothing_is_refused(tmp_path, source):
    with pytest.raises(ConfigError, match=rf"no such file(.|\n)*data.text={TOPICS}"):
        read_text([f"{tmp_path}/{source}"])


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("***", "can only be an entire path component"),
        ("a**b", "can only be an entire path component"),
        ("[", "no such file"),
        ("pipe", "cannot be read: it is a pipe, not a file"),
        ("loop", "cannot be read: Too many levels of symbolic links"),
        ("sparse", "larger than .* MiB; text is tokenized in memory and may use a quarter"),
        ("x" * 300, "File name too long"),
        ("a\0b", "no file has a zero byte in its name"),
        ("a\nb", r"a\\nb: no such file"),
        ("x/" * 1500, "no such file"),
    ],
)
def test_whatever_a_source_is_called_the_answer_is_in_words(tmp_path, source, why):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(2**42)
    with pytest.raises(ConfigError, match=why) as caught:
        read_text([f"{tmp_path}/{source}"])
    assert len(str(caught.value)) < 600


def test_devices_are_not_read_and_many_problems_are_counted(tmp_path):
    with pytest.raises(ConfigError, match="/dev/zero cannot be read: it is a device, not a file"):
        read_text(["/dev/zero"])
    with pytest.raises(ConfigError, match=r"data.text: and 2990 more"):
        read_text([f"{tmp_path}/{number}" for number in range(3000)])


def test_everything_wrong_is_said_at_once(tmp_path):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ConfigError, match=r"empty.txt is empty(.|\n)*gone.txt: no such file"):
        read_text([f"{tmp_path}/empty.txt", f"{tmp_path}/gone.txt"])


@given(words=text(max_size=400), share=floats(0.01, 0.99))
def test_a_split_keeps_every_character_once_and_in_order(words, share):
    train, validation = split_text(words, validation_share=share)
    assert sorted(train + validation) == sorted(words)
    kept = iter(words)
    assert all(character in kept for character in train)
    kept = iter(words)
    assert all(character in kept for character in validation)


@given(share=floats(0.01, 0.99))
def test_a_split_has_the_shares_asked_for(share):
    _, validation = split_text("x" * 10_000, validation_share=share)
    # Each of ten stretches rounds to a whole character.
    assert abs(len(validation) - 10_000 * share) <= 5


def test_no_line_of_the_validation_text_stands_in_the_training_text():
    train, validation = split_text(read_text([TOPICS]), validation_share=0.1)
    # 128 characters, the quickstart's window: shorter pieces are grammar and repeat anywhere.
    windows = [validation[i : i + 128] for i in range(0, len(validation) - 128, 128)]
    assert len(windows) > 200
    assert not [window for window in windows if window in train]
