import json

import pytest

from narrowcast.bench.zoo.kept import Kept
from narrowcast.bench.zoo.ways import AMP, BF16, Trial
from narrowcast.errors import RecipeError

ABOUT = {"bench": "models", "device": "d", "torch": "2", "quick": True, "cold_caches": True}
ONE = Trial(model="unet", way=AMP, mode="eager")
OTHER = Trial(model="llama-348m", way=BF16, mode="compiled")
FIGURES = {"failure": "", "ms": 3.0, "loss": float("inf")}


def test_rows_are_there_again_and_those_that_failed_are_tried_again(tmp_path):
    path = tmp_path / "rows.json"
    kept = Kept(path, about=ABOUT)
    kept.add(ONE, FIGURES)
    kept.add(OTHER, {"failure": "out of memory", "log": []})
    again = Kept(path, about=ABOUT)
    assert again.has(ONE)
    assert not again.has(OTHER)
    assert again.rows[ONE]["loss"] == "inf"
    assert [row["model"] for row in again.data()["rows"]] == ["llama-348m", "unet"]


@pytest.mark.parametrize("name", ["device", "torch", "quick", "cold_caches"])
def test_rows_that_cannot_be_compared_are_refused(tmp_path, name):
    path = tmp_path / "rows.json"
    Kept(path, about=ABOUT).add(ONE, FIGURES)
    with pytest.raises(RecipeError, match=f"its rows are of {name} {ABOUT[name]} and not other"):
        Kept(path, about=ABOUT | {name: "other"})


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", json.dumps(ABOUT), json.dumps(ABOUT | {"rows": [{"model": 1}]}),
     json.dumps(ABOUT | {"rows": 3})],
)  # fmt: skip
def test_a_file_of_something_else_is_left_alone(tmp_path, text):
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(RecipeError, match="not one that this bench has written; name another"):
        Kept(path, about=ABOUT)
    assert path.read_text() == text
