import os
import socket
from pathlib import Path

import pytest

from narrowcast.config.plain_file import path_of, read_plain, status_of


def why_not(path, most=100):
    with pytest.raises(OSError) as caught:  # noqa: PT011  # the words are what is tested
        read_plain(path, most=most)
    return caught.value.strerror


def test_a_file_is_read_whole(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    assert read_plain(tmp_path / "a", most=3) == b"abc"


def test_a_file_that_is_too_long_is_refused_before_it_is_read(tmp_path):
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(2**42)
    assert why_not(tmp_path / "sparse", 2**20) == "it is larger than 1 MiB"
    assert (
        why_not(Path("/proc/self/maps"), 2**10) == "it is larger than 1 KiB"
    )  # it says it is empty


def test_what_might_never_end_or_begin_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        assert why_not(tmp_path / "socket") == "it is a socket, not a file"
    assert why_not(tmp_path / "pipe") == "it is a pipe, not a file"
    assert why_not(Path("/dev/zero")) == "it is a device, not a file"
    assert why_not(tmp_path) == "it is a folder"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("loop", "Too many levels of symbolic links"),
        ("dangling", "No such file or directory"),
        ("x" * 300, "File name too long"),
        ("a\0b", "no file has a zero byte in its name"),
    ],
)
def test_a_name_that_leads_nowhere_says_why(tmp_path, name, why):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("nothing")
    assert why_not(tmp_path / name) == why
    with pytest.raises(OSError):  # noqa: PT011  # its words are tested above
        status_of(tmp_path / name)


def test_a_name_that_nobody_has_is_none(tmp_path):
    (tmp_path / "a").touch()
    assert status_of(tmp_path / "b") is None
    assert status_of(tmp_path / "a" / "b") is None


def test_the_folder_of_no_user_is_a_name_like_any_other():
    assert str(path_of("~no such user/x")) == "~no such user/x"
    assert path_of("~/x").is_absolute()
