"""Pictures and histograms, against numpy and the tensors they were made from."""

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from narrowcast.workloads.decompose.report.matrices import (
    LEVELS,
    MOST_CELLS,
    Picture,
    diagonal_order,
    histogram,
    importance_picture,
    picture,
)


def test_a_small_matrix_comes_back_within_half_a_level():
    matrix = torch.randn(7, 30, generator=torch.Generator().manual_seed(0))
    drawn = picture(matrix)
    assert not drawn.pooled
    half = (drawn.high - drawn.low) / LEVELS / 2
    assert (torch.tensor(drawn.cells()) - matrix).abs().max() <= half * 1.001


def test_zero_is_exactly_in_the_middle_of_an_even_scale():
    assert picture(torch.tensor([[0.0, 3.0]])).cells()[0][0] == 0.0


def test_pooling_keeps_the_largest_number_of_a_cell_with_its_sign():
    matrix = torch.zeros(300, 4000)
    matrix[211, 3456], matrix[17, 5] = -4.0, 2.0
    drawn = picture(matrix)
    assert drawn.pooled
    assert drawn.shape == (300, 4000)
    cells = np.array(drawn.cells())
    assert cells.shape == (MOST_CELLS, MOST_CELLS)
    assert cells.min() == -4.0
    assert cells.max() == pytest.approx(2.0, abs=8 / LEVELS)
    assert (cells != 0).sum() == 2


def test_numbers_that_are_not_finite_do_not_spoil_the_scale():
    drawn = picture(torch.tensor([[float("inf"), float("nan"), -1.0]]))
    assert drawn.cells() == [[1.0, 0.0, -1.0]]


def test_permuted_columns_read_as_a_diagonal_and_weak_ones_are_last():
    shuffled = [3, 1, 0, 4, 2]
    g = torch.zeros(5, 8)
    g[:, 2:7] = torch.eye(5)[:, shuffled]
    order = diagonal_order(g)
    assert torch.equal(g[:, order[:5]], torch.eye(5))
    assert sorted(order) == list(range(8))


def test_shared_components_stand_by_their_sum():
    g = torch.tensor([[0.1, 0.9, 0.0], [0.2, 1.0, 0.3]])
    assert diagonal_order(g, dense=True) == [1, 0, 2]


def test_of_many_components_the_first_are_drawn_and_named():
    g = torch.zeros(10, 4000)
    g[range(10), range(100, 1100, 100)] = 1.0
    drawn, order = importance_picture(g)
    assert order[:10] == list(range(100, 1100, 100))
    assert len(order) == MOST_CELLS
    assert np.array_equal(np.array(drawn.cells())[:, :10], np.eye(10))


def test_a_histogram_counts_as_numpy_does():
    shares = torch.rand(500, generator=torch.Generator().manual_seed(1)).double() ** 4
    shares[:20] = 0
    found = histogram(shares)
    used = np.log10(shares[shares > 0].numpy())
    expected, _ = np.histogram(np.clip(used, found.edges[0], found.edges[-1]), found.edges)
    assert found.never == 20
    assert list(found.counts) == expected.tolist()


@pytest.mark.parametrize("rows", [("00", "0000"), ("0",), ("0g",), ("ff",), ()])
def test_a_picture_that_is_none_is_refused(rows):
    with pytest.raises(ValidationError, match=r"picture|hexadecimal|at least 1"):
        Picture(low=0.0, high=1.0, rows=rows, shape=(1, 1))
