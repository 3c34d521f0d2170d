"""Errors of causal importances, counted by hand and by scipy."""

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment

from narrowcast.workloads.decompose.evaluation.toy_table import (
    dense_error,
    identity_error,
    importance_error,
)
from narrowcast.workloads.decompose.targets.toy import Truth


def permuted_identity(features=5, components=20, seed=0):
    columns = torch.randperm(components, generator=torch.Generator().manual_seed(seed))
    return torch.eye(features, components)[:, columns]


def test_an_identity_in_any_order_has_no_error():
    importance = torch.stack([permuted_identity(seed=seed) for seed in range(3)])
    assert identity_error(importance, tolerance=0.1).tolist() == [0, 0, 0]


def test_each_wrong_entry_counts_once():
    importance = permuted_identity()[None]
    row = importance[0, 2]
    row[row.argmax()] = 0.85  # says less than 1
    row[row.argmin()] = 0.15  # and another one more than 0
    assert identity_error(importance, tolerance=0.1).tolist() == [2]
    assert identity_error(importance, tolerance=0.2).tolist() == [0]
    assert importance_error(importance, Truth(kind="identity", size=5)).tolist() == [2]


def test_nothing_at_all_is_an_error_for_each_feature():
    assert identity_error(torch.zeros(1, 5, 20), tolerance=0.1).tolist() == [5]


def test_everything_important_is_an_error_for_each_other_entry():
    assert identity_error(torch.ones(1, 5, 20), tolerance=0.1).tolist() == [5 * 19]


def test_too_few_components_leave_features_without_one():
    assert identity_error(torch.eye(5, 3)[None], tolerance=0.1).tolist() == [2]


def test_what_is_not_a_number_is_wrong():
    importance = permuted_identity()[None]
    importance[0, 0] = torch.nan
    assert identity_error(importance, tolerance=0.1).item() >= 20
    assert dense_error(torch.full((1, 5, 20), torch.nan), 2, tolerance=0.1).item() == 2 + 5 * 18


@pytest.mark.parametrize("tolerance", [0.1, 0.2])
def test_random_importances_against_scipy(tolerance):
    importance = torch.rand(4, 6, 9, generator=torch.Generator().manual_seed(1)) ** 3
    for seed, matrix in enumerate(importance.numpy()):
        rows, columns = linear_sum_assignment(matrix, maximize=True)
        diagonal = np.zeros_like(matrix, dtype=bool)
        diagonal[rows, columns] = True
        expected = (matrix[diagonal] < 1 - tolerance).sum() + (matrix[~diagonal] > tolerance).sum()
        assert identity_error(importance, tolerance=tolerance)[seed] == expected


def test_a_dense_site_needs_its_components_and_no_others():
    dense = torch.zeros(1, 5, 20)
    dense[0, :, [3, 7]] = torch.rand(5, 2)
    dense[0, 1, 3] = dense[0, 4, 7] = 1.0
    assert dense_error(dense, 2, tolerance=0.1).tolist() == [0]
    assert importance_error(dense, Truth(kind="dense", size=2)).tolist() == [0]
    dense[0, 4, 7] = dense[0, :, 7].clamp_(max=0.8)[4]  # one never says 1
    dense[0, [0, 2], 9] = 0.2  # and another says something twice
    assert dense_error(dense, 2, tolerance=0.1).tolist() == [3]
