import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrowcast.errors import ConfigError
from narrowcast.workloads.sft.ica import parse_layers


@pytest.mark.parametrize(
    ("spec", "layers"),
    [
        (None, tuple(range(12))),
        ("0", (0,)),
        ("0,3,7", (0, 3, 7)),
        ("7,3, 0", (0, 3, 7)),
        ("0:4,9:", (0, 1, 2, 3, 9, 10, 11)),
        ("0:4,5:6,9:", (0, 1, 2, 3, 5, 9, 10, 11)),
        (":2", (0, 1)),
        (":", tuple(range(12))),
        ("3,2:5", (2, 3, 4)),
    ],
)
def test_what_is_meant(spec, layers):
    assert parse_layers(spec, 12) == layers


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("", "layer spec is empty"),
        ("  ", "layer spec is empty"),
        ("1,,2", "separated by commas, got nothing"),
        ("1,", "separated by commas, got nothing"),
        ("-1", "got a negative number"),
        ("12", "has layer 12, but the model has 12 layers. Write numbers from 0 to 11"),
        ("3:13", "has layer 12"),
        ("4:4", "has an empty range: 4:4 goes from 4 to before 4"),
        ("5:2", "has an empty range"),
        ("12:", "has an empty range"),
        ("one", "separated by commas, got 'one'"),
        ("1-3", "got '1-3'"),
        ("0:4:2", "got '0:4:2'"),
        ("²", "got '²'"),
    ],
)
def test_what_is_refused(spec, why):
    with pytest.raises(ConfigError, match=why):
        parse_layers(spec, 12)


@given(layers=st.sets(st.integers(0, 30), min_size=1))
def test_a_list_of_layers_names_them(layers):
    assert parse_layers(",".join(map(str, layers)), 31) == tuple(sorted(layers))


@given(spec=st.text(alphabet="0123456789,:- ", max_size=12), depth=st.integers(1, 40))
def test_a_text_is_refused_with_advice_or_names_layers_of_the_model(spec, depth):
    try:
        layers, refusal = parse_layers(spec, depth), ""
    except ConfigError as error:
        layers, refusal = (), str(error)
    assert bool(layers) != ("Write numbers from 0 to" in refusal)
    assert set(layers) <= set(range(depth))
