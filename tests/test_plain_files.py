import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from narrowcast.plain_files import expand_path, open_plain, read_pipe, read_plain, stat_or_none


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
        stat_or_none(tmp_path / name)


def test_a_name_that_nobody_has_is_none(tmp_path):
    (tmp_path / "a").touch()
    assert stat_or_none(tmp_path / "b") is None
    assert stat_or_none(tmp_path / "a" / "b") is None


def test_the_folder_of_no_user_is_a_name_like_any_other():
    assert str(expand_path("~no such user/x")) == "~no such user/x"
    assert expand_path("~/x").is_absolute()


def test_the_target_of_a_link_is_read_where_it_is_a_file(tmp_path):
    (tmp_path / "file").write_bytes(b"all of it")
    (tmp_path / "link").symlink_to("file")
    assert read_plain(tmp_path / "link") == b"all of it"


@pytest.mark.parametrize("kind", ["pipe", "endless", "vast", "nowhere"])
def test_what_would_never_end_is_an_error(tmp_path, kind):
    file = tmp_path / "file"
    match kind:
        case "pipe":
            os.mkfifo(file)
        case "endless":
            file.symlink_to("/dev/zero")
        case "nowhere":
            file.symlink_to("somewhere")
        case "vast":
            with file.open("wb") as opened:
                opened.truncate(2**43)
    with pytest.raises(OSError, match=r"not a file|larger than the memory|No such file"):
        read_plain(file)


def test_a_link_is_opened_only_where_its_target_will_do(tmp_path):
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("file")
    with pytest.raises(OSError, match="it is a link, not a file"):
        open_plain(tmp_path / "link")
    with open_plain(tmp_path / "link", follow=True) as file:
        assert file.read() == b"abc"


def test_a_pipe_is_read_to_its_end(tmp_path):
    os.mkfifo(tmp_path / "pipe")

    def write():
        with (tmp_path / "pipe").open("wb") as pipe:
            pipe.write(b"a" * 100_000)
            pipe.flush()
            time.sleep(0.2)
            pipe.write(b"b")

    thread = threading.Thread(target=write)
    thread.start()
    assert read_pipe(tmp_path / "pipe", most=2**20, seconds=5) == b"a" * 100_000 + b"b"
    thread.join()


def test_a_pipe_that_nobody_writes_to_or_that_never_ends_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match=r"a pipe to which nobody wrote for 0\.1 s"):
        read_pipe(tmp_path / "pipe", most=10, seconds=0.1)
    with subprocess.Popen(["yes"], stdout=subprocess.PIPE) as endless:
        with pytest.raises(OSError, match="it is larger than 1 MiB"):
            read_pipe(Path(f"/dev/fd/{endless.stdout.fileno()}"), most=2**20, seconds=5)
        endless.kill()


BARE = """
import os, sys, torch
for name in ("O_NONBLOCK", "O_CLOEXEC", "O_NOFOLLOW", "sysconf"):
    delattr(os, name)
from narrowcast.cli.entry import run_command
sys.exit(run_command(sys.argv[1:]))
"""


def test_a_system_without_pipes_and_their_flags_reads_recipes_and_texts(tmp_path):
    (tmp_path / "a.yaml").write_text("workload: lm\nsteps: 1\nbatch_size: 1\n")
    (tmp_path / "a.txt").write_text("some words to train on\n" * 200)
    ended = subprocess.run(
        [sys.executable, "-c", BARE, "train", "a.yaml", "data.text=a.txt", "data.length=16",
         "model.layers=1", "model.width=16", "data.eval_windows=2", "health.every=0"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, "")
