from itertools import pairwise

import numpy as np
import pytest
import torch

from narrowcast.workloads.forecast.windows import DeviceSeries, Starts, find_starts


@pytest.fixture
def series():
    values = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    return DeviceSeries(
        values=values,
        observed=values > -1,
        past=torch.arange(50.0)[None],
        future=torch.arange(100.0, 200.0).view(2, 50),
        static=torch.tensor([[1.0], [2.0]]),
        series_of_row=torch.tensor([0] * 20 + [1] * 30),
        lookback=5,
        horizon=3,
    )


def test_windows_are_the_slices_that_numpy_cuts(series):
    window = series.windows(torch.tensor([0, 7, 42]))
    values = series.values.numpy()
    for row, start in enumerate((0, 7, 42)):
        np.testing.assert_array_equal(window.x[row], values[:, start : start + 5])
        np.testing.assert_array_equal(window.y[row], values[:, start + 5 : start + 8])
        np.testing.assert_array_equal(window.observed[row], values[:, start + 5 : start + 8] > -1)
        assert window.past[row, 0].tolist() == list(range(start, start + 5))
        assert window.future[row, 1].tolist() == list(range(150 + start, 150 + start + 8))
    assert window.static.tolist() == [[1.0], [1.0], [2.0]]


def test_a_window_shares_no_memory_with_the_series(series):
    before = series.values.clone()
    series.windows(torch.tensor([3])).x.zero_()
    assert torch.equal(series.values, before)


def test_windows_never_cross_from_one_series_into_the_next():
    starts = find_starts([(0, 20), (20, 50)], offsets=(0, 20, 50), lookback=5, horizon=3)
    assert starts.rows.tolist() == [*range(13), *range(20, 43)]


def test_a_lookback_may_begin_before_the_rows_that_are_forecast():
    # The counts that the LTSF loaders have on ETTh with a lookback of 336 and a horizon of 96.
    cuts = (0, 8640, 8640 + 2880, 8640 + 5760)
    counts = [
        len(find_starts([(a, b)], offsets=(0, 17420), lookback=336, horizon=96))
        for a, b in pairwise(cuts)
    ]
    assert counts == [8640 - 336 - 96 + 1, 2880 - 96 + 1, 2880 - 96 + 1]


def test_a_stride_leaves_out_windows_between():
    starts = find_starts([(0, 20)], offsets=(0, 20), lookback=4, horizon=2, stride=5)
    assert starts.rows.tolist() == [0, 5, 10]


def test_windows_of_an_evaluation_are_spread_over_all():
    assert Starts(torch.arange(10)).spread(4).rows.tolist() == [0, 2, 5, 7]
    assert len(Starts(torch.arange(3)).spread(None)) == 3
