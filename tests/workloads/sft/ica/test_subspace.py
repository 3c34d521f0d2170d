import pytest
import torch

from narrowcast.workloads.sft.ica import ArraySignals
from narrowcast.workloads.sft.ica import subspace as module
from narrowcast.workloads.sft.ica.signals import channel_statistics
from narrowcast.workloads.sft.ica.subspace import Standardised, principal_subspace


def standardised(array):
    signals = ArraySignals(array)
    return Standardised.of(signals, channel_statistics(signals))


@pytest.fixture(autouse=True)
def _few_are_many(monkeypatch):
    monkeypatch.setattr(module, "FEW_CHANNELS", 8)


@pytest.fixture
def decaying():
    """Channels whose directions fall off slowly, as those of activations do."""
    chance = torch.Generator().manual_seed(0)
    strength = torch.arange(1, 101) ** -0.5
    mixed = torch.randn(600, 100, generator=chance) * strength
    channels = torch.randn(100, 400, generator=chance)
    return mixed @ channels + 0.5 * torch.randn(600, 400, generator=chance) + 5


def test_many_passes_find_the_directions_of_a_full_decomposition(decaying):
    found = principal_subspace(
        standardised(decaying), 10, generator=torch.Generator().manual_seed(0)
    )
    exact = (decaying - decaying.mean(0)) / decaying.std(0, correction=0)
    _, strength, v = torch.linalg.svd(exact.double(), full_matrices=False)
    assert found.converged
    torch.testing.assert_close(found.variances, strength[:10] ** 2 / 600, rtol=1e-4, atol=0)
    cosines = torch.linalg.svdvals(v[:10] @ found.basis.double())
    assert cosines.min() > 1 - 1e-4
    gram = found.basis.T @ found.basis
    torch.testing.assert_close(gram, torch.eye(10), atol=1e-5, rtol=0)


def test_both_ways_agree(decaying, monkeypatch):
    signals = standardised(decaying)
    streamed = principal_subspace(signals, 5, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(module, "FEW_CHANNELS", 400)
    direct = principal_subspace(signals, 5, generator=torch.Generator().manual_seed(0))
    assert streamed.passes > direct.passes == 1
    torch.testing.assert_close(streamed.variances, direct.variances, rtol=1e-4, atol=0)
    cosines = torch.linalg.svdvals(streamed.basis.T @ direct.basis)
    assert cosines.min() > 1 - 1e-4


def test_no_chunk_is_changed_by_a_pass(decaying):
    before = decaying.clone()
    principal_subspace(standardised(decaying), 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(decaying, before)


def test_directions_that_run_out_are_no_trouble():
    chance = torch.Generator().manual_seed(0)
    low_rank = torch.randn(300, 6, generator=chance) @ torch.randn(6, 200, generator=chance)
    found = principal_subspace(
        standardised(low_rank), 4, generator=torch.Generator().manual_seed(0)
    )
    exact = (low_rank - low_rank.mean(0)) / low_rank.std(0, correction=0)
    strength = torch.linalg.svdvals(exact.double())
    torch.testing.assert_close(found.variances, strength[:4] ** 2 / 300, rtol=1e-4, atol=0)
    torch.testing.assert_close(found.basis.T @ found.basis, torch.eye(4), atol=1e-5, rtol=0)
