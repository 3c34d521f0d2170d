import pytest

from narrowcast.runs.strict_json import open_plain, peek_json


def test_json_that_is_there_is_returned(tmp_path):
    (tmp_path / "plan.json").write_text('{"a": [1, "nan"]}')
    assert peek_json(tmp_path / "plan.json", most_bytes=100) == {"a": [1, "nan"]}


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"NaN", b"[" * 99_999, b"1" * 100_001])
def test_what_is_not_json_or_too_large_is_nothing(tmp_path, content):
    (tmp_path / "plan.json").write_bytes(content)
    assert (
        peek_json(tmp_path / "plan.json", most_bytes=150_000 if content[:1] == b"[" else 100)
        is None
    )


def test_a_link_and_a_folder_are_no_plain_files(tmp_path):
    (tmp_path / "file").write_text("1")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert peek_json(tmp_path / "link", most_bytes=100) is None
    with pytest.raises(OSError, match="it is a folder"):
        open_plain(tmp_path)
