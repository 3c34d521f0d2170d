import json
import math

import pytest

from narrowcast.runs import strict_json


def test_numbers_that_are_not_finite_become_words_at_any_depth():
    text = strict_json.dumps({"a": [math.inf, {"b": (-math.inf, math.nan)}], "c": 1.5})
    assert json.loads(text) == {"a": ["inf", {"b": ["-inf", "nan"]}], "c": 1.5}


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
def test_words_that_are_not_json_are_refused(constant):
    with pytest.raises(ValueError, match="is not JSON"):
        strict_json.loads(f'{{"a": {constant}}}')
