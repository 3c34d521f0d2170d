import gzip
import os

import pytest

from narrowcast.errors import ConfigError
from narrowcast.workloads.sft.judge.perplexity import read_texts


def test_paths_and_globs_are_read_in_order_and_once(tmp_path):
    for name in ("b.txt", "a.txt"):
        (tmp_path / name).write_text(f"text of {name}")
    found = read_texts((f"{tmp_path}/b.txt", f"{tmp_path}/*.txt"), most_bytes=1000)
    assert [text.text for text in found] == ["text of b.txt", "text of a.txt"]


@pytest.mark.parametrize("most", range(1, 14))
def test_a_text_is_cut_between_two_characters(tmp_path, most):
    whole = "aé日🙂b" * 9
    (tmp_path / "a.txt").write_text(whole)
    (found,) = read_texts((f"{tmp_path}/a.txt",), most_bytes=most)
    size = len(found.text.encode())
    assert whole.startswith(found.text)
    assert most <= size < most + 4


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b" \n ", "only whitespace"),
        (b"a\0b", "binary file: zero byte at 1"),
        (b"caf\xe9 noir", "not UTF-8 text: byte 0xe9 at 3"),
        (gzip.compress(b"text", mtime=0), "not UTF-8 text"),
    ],
)
def test_what_is_no_text_is_refused_with_its_file(tmp_path, content, said):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(ConfigError, match=f"eval_tasks.perplexity: .*a.txt .*{said}"):
        read_texts((f"{tmp_path}/a.txt",), most_bytes=1000)


def test_what_is_no_file_is_refused_and_all_of_it_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    names = (f"{tmp_path}/none.txt", str(tmp_path), f"{tmp_path}/pipe", "a\0b")
    with pytest.raises(ConfigError) as refused:
        read_texts(names, most_bytes=9)
    told = str(refused.value)
    for said in ("no such file", "it is a folder", "it is a pipe", "zero byte"):
        assert said in told
    assert told.endswith("Write eval_tasks.perplexity=FILE, a path or glob of UTF-8 text.")
