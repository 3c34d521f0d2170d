import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from narrowcast.report.phrases import written

TEXTS = st.text(st.sampled_from("abnoy-_. /%:#{}[],'\"0159tTrueéñ"), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | TEXTS,
    lambda inner: st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


@given(found=st.dictionaries(TEXTS, VALUES, max_size=3))
def test_a_mapping_is_read_back_as_it_was(found):
    assert json.dumps(YAML(typ="safe").load(written(found))) == json.dumps(found)


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ("a plain: text", "a plain: text"),
        (0.003, "0.003"),
        (True, "true"),
        ([0.9, 0.95], "[0.9, 0.95]"),
        ({"head": "bf16"}, "{head: bf16}"),
        ({"blocks.*": "yes"}, '{"blocks.*": "yes"}'),
        (
            [
                {"policy": "fp32", "overrides": {}, "until": "15%"},
                {"policy": "bf16", "for": None},
            ],
            "[{policy: fp32, until: 15%}, {policy: bf16}]",
        ),
    ],
)
def test_a_setting_is_written_as_a_recipe_would(found, text):
    assert written(found) == text
