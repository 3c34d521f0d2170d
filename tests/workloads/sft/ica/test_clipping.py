"""Loud rows: what they do to components, that it is reported, and that clipping undoes it."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from narrowcast.errors import ConfigError
from narrowcast.workloads.sft.ica import ICA, ArraySignals, Percentile
from narrowcast.workloads.sft.ica.collect import clip_signals
from narrowcast.workloads.sft.ica.signals import StoredSignals


def with_loud_rows(signals, count, factor):
    chance = torch.Generator().manual_seed(1)
    rows = torch.randperm(len(signals), generator=chance)[:count]
    loud = signals.clone()
    loud[rows] += factor * torch.randn(count, signals.shape[1], generator=chance)
    return loud


def loud_components(components):
    return [str(each) for each in components.findings if each.kind == "loud rows"]


@pytest.fixture(scope="module")
def plain(planted):
    return planted(rows=3000)


@pytest.fixture
def recovery(plain, mean_best_iou):
    def measure(components):
        networks = [set(Percentile(95).select(column)) for column in components.loadings.T]
        return mean_best_iou(plain.supports, networks)

    return measure


@pytest.mark.parametrize(
    ("count", "factor", "lost"),
    [(1, 300.0, 0.9), (30, 30.0, 0.1)],  # one row of 3,000; 1 % of the rows
)
def test_clipping_recovers_sources_that_loud_rows_hide(plain, recovery, count, factor, lost):
    signals = ArraySignals(with_loud_rows(plain.signals, count, factor))
    unclipped = ICA(components=5).fit(signals)
    clipped = ICA(components=5, clip_activations=99).fit(signals)
    assert recovery(unclipped) < lost
    assert loud_components(unclipped)
    assert recovery(clipped) > 0.95
    assert not loud_components(clipped)


def test_clipping_costs_nothing_without_loud_rows(plain, recovery):
    for percentile in (None, 99.9, 99):
        components = ICA(components=5, clip_activations=percentile).fit(ArraySignals(plain.signals))
        assert recovery(components) > 0.95
        assert components.findings == ()


def test_the_finding_names_the_share_and_the_rows(plain):
    signals = with_loud_rows(plain.signals, 1, 3000.0)
    components = ICA(components=5).fit(ArraySignals(signals))
    sources = components.sources(signals).double().numpy() ** 2
    share = np.sort(sources, 0)[-30:].sum(0) / sources.sum(0)
    np.testing.assert_allclose(components.loud_row_share, share, rtol=1e-3)
    (finding,) = loud_components(components)
    number = int(share.argmax())
    assert f"of component {number} comes from 1 % of rows, 30 of 3,000" in finding


def test_findings_number_the_components_of_all_layers_through(plain):
    loud = with_loud_rows(plain.signals, 1, 3000.0)
    ica = ICA(components=5)
    found = ica.fit_each([ArraySignals(plain.signals), ArraySignals(loud)])
    alone = int(found[1].loud_row_share.argmax())
    assert not loud_components(found[0])
    assert f"component {5 + alone} comes from" in loud_components(found[1])[0]


@given(
    percentile=st.floats(50.5, 99.99),
    rows=st.integers(1, 60),
    chunk=st.integers(1, 60),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_bounds_are_numpys_percentiles(percentile, rows, chunk, dtype):
    x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(rows), dtype=dtype)
    clipped = clip_signals(StoredSignals(x.split(chunk), 3), percentile)
    bounds = np.percentile(x.double().numpy(), [100 - percentile, percentile], axis=0)
    tolerance = 4 * torch.finfo(dtype).eps * float(x.abs().max())
    expected = np.clip(x.double().numpy(), *bounds)
    np.testing.assert_allclose(torch.cat(list(clipped)), expected, atol=tolerance)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_clipping_hides_no_value_that_is_not_finite(plain, value):
    signals = plain.signals.clone()
    signals[1234, 7] = value
    with pytest.raises(ConfigError, match="not finite, the first in row 1234, channel 7"):
        ICA(components=5, clip_activations=99).fit(ArraySignals(signals))


@pytest.mark.parametrize("percentile", [100, 50, 1.0, True, "99"])
def test_a_percentile_that_is_none_is_refused(percentile):
    with pytest.raises(ConfigError, match="clip_activations must be a percentile"):
        ICA(clip_activations=percentile)
