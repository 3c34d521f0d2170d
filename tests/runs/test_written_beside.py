import errno

import pytest

from narrowcast.errors import CheckpointError
from narrowcast.runs.writing import remove, write_text, written_atomically


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_appears_only_once_it_is_whole(tmp_path):
    with written_atomically(tmp_path / "file", hint="") as beside:
        write_text(beside, "all of it")
        assert not (tmp_path / "file").exists()
    assert (tmp_path / "file").read_text() == "all of it"
    assert names(tmp_path) == ["file"]


def test_a_folder_replaces_the_one_that_was_there(tmp_path):
    for content in ("old", "new"):
        with written_atomically(tmp_path / "folder", hint="") as beside:
            beside.mkdir()
            write_text(beside / content, content)
    assert names(tmp_path) == ["folder"]
    assert names(tmp_path / "folder") == ["new"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "no space"), KeyError("a bug")])
def test_what_was_there_survives_a_failure_and_nothing_is_left_beside_it(tmp_path, error):
    (tmp_path / "file").write_text("old")

    def fail():
        with written_atomically(tmp_path / "file", hint="") as beside:
            write_text(beside, "half of it")
            raise error

    with pytest.raises((CheckpointError, KeyError)):
        fail()
    assert names(tmp_path) == ["file"]
    assert (tmp_path / "file").read_text() == "old"


def test_a_failure_is_said_in_words_with_what_to_do(tmp_path):
    def fail():
        with written_atomically(tmp_path / "file", hint="an older one is there"):
            raise OSError(errno.ENOSPC, "no space")

    with pytest.raises(
        CheckpointError, match=r"Cannot write .*file: the disk is full.*an older one is"
    ):
        fail()


def test_leftovers_of_the_same_file_are_removed_and_no_others(tmp_path):
    for name in ("file.tmp-1", "other.tmp-1", "file.txt"):
        (tmp_path / name).touch()
    with written_atomically(tmp_path / "file", hint="") as beside:
        write_text(beside, "")
    assert names(tmp_path) == ["file", "file.txt", "other.tmp-1"]


def test_removing_takes_files_folders_and_nothing(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    for name in ("file", "folder", "nothing"):
        remove(tmp_path / name)
    assert names(tmp_path) == []
