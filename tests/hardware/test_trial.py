import json
import os

import pytest

from narrowcast.hardware import trial
from narrowcast.hardware.trial import CpuTrial, try_products

# What a healthy CPU would have left: no child process is needed to read it back.
KNOWN = {"bf16": CpuTrial(died=False, slowdown=0.25), "fp16": CpuTrial(died=True, slowdown=0.0)}


@pytest.fixture
def tried(tmp_path, monkeypatch):
    """Children that only say 0.25; returns the dtypes they were started with, so far."""
    log = tmp_path / "log"
    log.touch()
    script = f"import sys; open({str(log)!r}, 'a').write(sys.argv[1] + ' '); print(0.25)"
    monkeypatch.setattr(trial, "_SCRIPT", script)
    return lambda: log.read_text().split()


def test_a_trial_is_made_once_and_remembered(tmp_path, tried):
    store = tmp_path / "deep" / "store.json"
    first = try_products(["bf16"], store=store)
    assert first == {"bf16": KNOWN["bf16"]}
    assert try_products(["bf16"], store=store) == first
    assert tried() == ["bfloat16"]


def test_a_new_format_is_tried_beside_those_that_are_known(tmp_path, tried):
    store = tmp_path / "store.json"
    store.write_text('{"fp16": {"died": true, "slowdown": 0.0}}')
    assert try_products(["bf16", "fp16"], store=store) == KNOWN
    assert tried() == ["bfloat16"]
    assert set(json.loads(store.read_text())) == {"bf16", "fp16"}


DAMAGE = [
    b"",
    b"{",
    b"null",
    b"[]",
    b"7",
    b"\xff\xfe\x00",
    b'{"bf16": null}',
    b'{"bf16": 3}',
    b'{"bf16": {}}',
    b'{"bf16": {"died": false}}',
    b'{"bf16": {"died": false, "slowdown": "fast"}}',
    b'{"bf16": {"died": false, "slowdown": 0.0}}',
    b'{"bf16": {"died": false, "slowdown": -1.0}}',
    b'{"bf16": {"died": false, "slowdown": NaN}}',
    b'{"bf16": {"died": false, "slowdown": Infinity}}',
    b'{"bf16": {"died": "no", "slowdown": 0.5}}',
    b'{"bf16": {"died": false, "slowdown": 0.5, "more": 1}}',
]


@pytest.mark.parametrize("text", DAMAGE)
def test_a_damaged_file_is_as_good_as_none(tmp_path, tried, text):
    store = tmp_path / "store.json"
    store.write_bytes(text)
    assert try_products(["bf16"], store=store) == {"bf16": KNOWN["bf16"]}
    assert tried() == ["bfloat16"]
    assert json.loads(store.read_text()) == {"bf16": {"died": False, "slowdown": 0.25}}


def test_a_folder_in_the_files_place_costs_the_memory_and_nothing_else(tmp_path, tried):
    store = tmp_path / "store.json"
    store.mkdir()
    assert try_products(["bf16"], store=store) == {"bf16": KNOWN["bf16"]}


def test_a_home_that_cannot_be_written_costs_the_memory_and_nothing_else(tmp_path, tried):
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert try_products(["bf16"], store=blocked / "store.json") == {"bf16": KNOWN["bf16"]}


@pytest.mark.parametrize(
    "script", ["import os; os.abort()", "import os; os.kill(os.getpid(), 4)", "raise SystemExit(1)"]
)
def test_a_child_that_dies_is_recorded_and_does_not_take_us_along(tmp_path, monkeypatch, script):
    monkeypatch.setattr(trial, "_SCRIPT", script)
    found = try_products(["bf16"], store=tmp_path / "store.json")
    assert found == {"bf16": CpuTrial(died=True, slowdown=0.0)}


def test_a_child_that_hangs_counts_as_slow(tmp_path, monkeypatch):
    monkeypatch.setattr(trial, "_SCRIPT", "import time; time.sleep(60)")
    monkeypatch.setattr(trial, "_TIME_LIMIT_SECONDS", 0.2)
    found = try_products(["bf16"], store=tmp_path / "store.json")
    assert not found["bf16"].died
    assert found["bf16"].slowdown == 0.2


def test_the_memory_is_kept_in_the_users_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    store = trial.default_store()
    assert store.is_relative_to(tmp_path)
    assert store == trial.default_store()
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert os.fspath(trial.default_store()).startswith(os.path.expanduser("~"))  # noqa: PTH111
