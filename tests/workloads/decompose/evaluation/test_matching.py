"""Components against the weights they make up, in numpy."""

import numpy as np
import pytest
import torch

from narrowcast.workloads.decompose.component_files import Components, compare_runs
from narrowcast.workloads.decompose.evaluation.toy_table import match_features


def cosine(a, b):
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def made_of_columns(seeds=2, d_in=5, d_out=3, dead=4):
    """Components that are the columns of a weight, and some of nearly no size that are nearer."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(seeds, d_out, d_in, generator=generator)
    v = torch.cat([torch.eye(d_in).expand(seeds, -1, -1), torch.full((seeds, d_in, dead), 1e-4)], 2)
    noisy = weight.mT * 0.9 + 0.01 * torch.randn(seeds, d_in, d_out, generator=generator)
    return v, torch.cat([noisy, weight.mT[:, :dead]], dim=1), weight


@pytest.mark.parametrize("along", ["inputs", "outputs"])
def test_the_largest_component_is_compared_not_the_nearest(along):
    v, u, weight = made_of_columns()
    if along == "outputs":
        v, u, weight = u.mT, v.mT, weight.mT
    found = match_features(v, u, weight, along=along)
    assert found.component.tolist() == [list(range(5))] * 2
    assert torch.allclose(found.norm_ratio, torch.full((2, 5), 0.9), atol=0.03)
    assert (found.cosine < 1 - 1e-7).all()


@pytest.mark.parametrize("along", ["inputs", "outputs"])
def test_cosines_and_ratios_are_those_of_numpy(along):
    generator = torch.Generator().manual_seed(3)
    v, u = torch.randn(2, 4, 7, generator=generator), torch.randn(2, 7, 6, generator=generator)
    weight = torch.randn(2, 6, 4, generator=generator)
    found = match_features(v, u, weight, along=along)
    for seed in range(2):
        parts = np.einsum("ic,co->coi", v[seed].numpy(), u[seed].numpy())  # (C, d_out, d_in)
        whole = weight[seed].numpy()
        if along == "outputs":
            parts, whole = parts.transpose(0, 2, 1), whole.T
        for feature in range(whole.shape[1]):
            columns = parts[:, :, feature]
            c = np.linalg.norm(columns, axis=1).argmax()
            assert found.component[seed, feature] == c
            expected = cosine(columns[c], whole[:, feature])
            assert found.cosine[seed, feature].item() == pytest.approx(expected, abs=1e-5)
            ratio = np.linalg.norm(columns[c]) / np.linalg.norm(whole[:, feature])
            assert found.norm_ratio[seed, feature].item() == pytest.approx(ratio, rel=1e-5)


def test_what_is_dead_does_not_count():
    v, u, weight = made_of_columns()
    alive = torch.ones(2, v.shape[2], dtype=torch.bool)
    alive[0, 1] = False
    alive[1] = False
    found = match_features(v, u, weight, along="inputs", alive=alive)
    assert found.component[0, 1] != 1
    assert found.norm_ratio[0, 1] < 0.01
    assert found.component[1].tolist() == [-1] * 5
    assert found.norm_ratio[1].tolist() == found.cosine[1].tolist() == [0.0] * 5


def test_runs_of_the_same_components_in_another_order_are_alike():
    generator = torch.Generator().manual_seed(5)
    v, u = torch.randn(6, 8, generator=generator), torch.randn(8, 4, generator=generator)
    order = torch.randperm(8, generator=generator)
    alive = torch.tensor([True] * 6 + [False] * 2)
    # The same matrix in other factors, and its sign in both.
    first = Components(v=v, u=u, alive=alive)
    second = Components(v=-3 * v[:, order], u=-u[order] / 3, alive=alive[order])
    forth, back = compare_runs(first, second)
    assert forth.shape == back.shape == (6,)
    assert torch.allclose(forth, torch.ones(6), atol=1e-5)
    assert torch.allclose(back, torch.ones(6), atol=1e-5)


def test_cosines_between_runs_are_those_of_their_matrices():
    generator = torch.Generator().manual_seed(6)
    all_alive = torch.ones(3, dtype=torch.bool)
    runs = [
        Components(
            v=torch.randn(5, 3, generator=generator),
            u=torch.randn(3, 4, generator=generator),
            alive=all_alive,
        )
        for _ in range(2)
    ]
    matrices = [[np.outer(run.v[:, c], run.u[c]).ravel() for c in range(3)] for run in runs]
    expected = [max(cosine(a, b) for b in matrices[1]) for a in matrices[0]]
    assert compare_runs(*runs)[0].tolist() == pytest.approx(expected, abs=1e-5)


def test_a_run_without_living_components_is_like_nothing():
    alive = Components(v=torch.ones(2, 3), u=torch.ones(3, 2), alive=torch.ones(3).bool())
    dead = Components(v=torch.ones(2, 3), u=torch.ones(3, 2), alive=torch.zeros(3).bool())
    forth, back = compare_runs(alive, dead)
    assert forth.tolist() == [0.0] * 3
    assert back.tolist() == []
