import json

import pytest

from narrowcast.bench.zoo.running import SavedRows
from narrowcast.bench.zoo.ways import AMP, BF16, ZooTrial
from narrowcast.errors import ConfigError

ABOUT = {"bench": "models", "device": "d", "torch": "2", "quick": True, "cold_caches": True}
ONE = ZooTrial(model="unet", way=AMP, mode="eager")
OTHER = ZooTrial(model="llama-348m", way=BF16, mode="compiled")
FIGURES = {"failure": "", "ms": 3.0, "loss": float("inf")}


def test_rows_are_read_again_and_failed_ones_are_tried_again(tmp_path):
    path = tmp_path / "rows.json"
    saved = SavedRows(path, about=ABOUT)
    saved.add(ONE, FIGURES)
    saved.add(OTHER, {"failure": "out of memory", "log": []})
    again = SavedRows(path, about=ABOUT)
    assert again.has(ONE)
    assert not again.has(OTHER)
    assert again.rows[ONE]["loss"] == "inf"
    assert [row["model"] for row in again.data()["rows"]] == ["llama-348m", "unet"]


@pytest.mark.parametrize("name", ["device", "torch", "quick", "cold_caches"])
def test_rows_that_cannot_be_compared_raise(tmp_path, name):
    path = tmp_path / "rows.json"
    SavedRows(path, about=ABOUT).add(ONE, FIGURES)
    with pytest.raises(ConfigError, match=f"has rows of {name} {ABOUT[name]} instead of other"):
        SavedRows(path, about=ABOUT | {name: "other"})


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", json.dumps(ABOUT), json.dumps(ABOUT | {"rows": [{"model": 1}]}),
     json.dumps(ABOUT | {"rows": 3})],
)  # fmt: skip
def test_a_file_of_something_else_is_left_alone(tmp_path, text):
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="was not written by bench models"):
        SavedRows(path, about=ABOUT)
    assert path.read_text() == text
