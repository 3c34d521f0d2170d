import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from narrowcast.errors import ConfigError
from narrowcast.workloads.sft.ica import Percentile, TopK, ZScore

LOADINGS = st.lists(
    st.floats(-10, 10, width=32).filter(lambda x: abs(x) > 1e-3),
    min_size=1,
    max_size=50,
    unique=True,
).map(torch.tensor)


@given(loadings=LOADINGS, percentile=st.floats(0, 99.9))
def test_a_percentile_selects_its_share(loadings, percentile):
    sizes = loadings.abs().unique()  # of equal ones all are taken
    chosen = Percentile(percentile).select(sizes)
    assert abs(len(chosen) - (100 - percentile) / 100 * len(sizes)) <= 1
    assert chosen


@given(loadings=LOADINGS, count=st.integers(1, 300))
def test_top_k_are_at_least_as_heavy_as_all_others(loadings, count):
    chosen = TopK(count).select(loadings)
    assert len(chosen) == min(count, len(loadings))
    others = [i for i in range(len(loadings)) if i not in chosen]
    if others:
        assert loadings[chosen].abs().min() >= loadings[others].abs().max()


@given(loadings=LOADINGS, threshold=st.floats(0.1, 5))
def test_two_sides_are_one_side_and_its_mirror(loadings, threshold):
    one, mirrored = ZScore(threshold).select(loadings), ZScore(threshold).select(-loadings)
    both = ZScore(threshold, two_sided=True).select(loadings)
    assert sorted(one + mirrored) == both


@given(loadings=LOADINGS)
@pytest.mark.parametrize("selector", [Percentile(90.0), ZScore(1.0), ZScore(1.0, True), TopK(3)])
def test_the_unit_of_loadings_does_not_matter(selector, loadings):
    assert selector.select(loadings) == selector.select(loadings * 4)


@pytest.mark.parametrize("selector", [Percentile(50.0), ZScore(), ZScore(two_sided=True), TopK(3)])
def test_a_channel_without_loading_is_never_selected(selector):
    assert selector.select(torch.zeros(5)) == []


@pytest.mark.parametrize(
    ("selector", "text"),
    [
        (Percentile(98.0), "percentile=98"),
        (ZScore(1.96), "z>1.96"),
        (ZScore(3.6, True), "|z|>3.6"),
        (TopK(15), "top-k=15"),
    ],
)
def test_selectors_say_what_they_do(selector, text):
    assert str(selector) == text


@pytest.mark.parametrize(
    "wrong",
    [lambda: Percentile(100.0), lambda: Percentile(-1.0), lambda: ZScore(0.0), lambda: TopK(0)],
)
def test_senseless_ones_are_refused(wrong):
    with pytest.raises(ConfigError, match=r"write|must be"):
        wrong()
