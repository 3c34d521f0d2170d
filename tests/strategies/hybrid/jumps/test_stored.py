"""Movements come back as they were, to the digits and the rank they are kept in."""

import pytest
import torch

from narrowcast.strategies.hybrid.jumps.stored import LowRank, MoveCode, low_rank, probe_columns

CPU = torch.device("cpu")


def code(moves, keep, rank=3):
    return MoveCode([m.shape for m in moves], keep, rank=rank, seed=0, device=CPU)


def test_fp32_comes_back_bit_for_bit(randn):
    moves = [randn(5, 7), randn(3)]
    stored = code(moves, "fp32")
    assert all(map(torch.equal, stored.decode(stored.encode(moves)), moves))


def test_bf16_comes_back_as_torch_rounds_it(randn):
    moves = [randn(5, 7), randn(3)]
    stored = code(moves, "bf16")
    rounded = [m.bfloat16().float() for m in moves]
    assert all(map(torch.equal, stored.decode(stored.encode(moves)), rounded))


def test_a_matrix_of_the_rank_kept_comes_back_to_the_digits_of_bf16(randn):
    move = randn(40, 3) @ randn(3, 30)
    stored = code([move], "svd")
    (back,) = stored.decode(stored.encode([move]))
    assert (back - move).norm() <= 3 * 2**-8 * move.norm()


def test_low_rank_is_as_near_as_the_singular_value_decomposition(randn):
    matrix = randn(60, 40) * 0.8 ** torch.arange(40)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    best = (left[:, :4] * values[:4]) @ right[:4]
    probe = probe_columns(40, 4, generator=torch.Generator().manual_seed(1))
    found = low_rank(matrix, rank=4, probe=probe).whole()
    assert (found - matrix).norm() <= 1.01 * (best - matrix).norm()


def test_a_random_basis_gives_the_projection_on_it(randn):
    move = randn(20, 16)
    stored = code([move], "random")
    once = stored.decode(stored.encode([move]))
    twice = stored.decode(stored.encode(once))
    assert torch.allclose(once[0], twice[0], atol=2**-7 * float(move.abs().max()))
    assert 0 < once[0].norm() < move.norm()


@pytest.mark.parametrize("keep", ["fp32", "bf16", "svd", "random"])
def test_bytes_are_those_of_what_is_stored(randn, keep):
    moves = [randn(20, 16), randn(3), randn(8, 2, 3, 3), randn(2, 2)]
    stored = code(moves, keep)
    parts = [part for each in stored.encode(moves) for part in each]
    assert sum(part.nbytes for part in parts) == stored.bytes_each()


@pytest.mark.parametrize("keep", ["fp32", "bf16", "svd", "random"])
def test_no_movement_comes_back_as_none(keep):
    moves = [torch.zeros(20, 16), torch.zeros(3)]
    stored = code(moves, keep)
    assert all(not m.any() for m in stored.decode(stored.encode(moves)))


def test_low_rank_is_the_product_of_its_parts(randn):
    left, right = randn(4, 2), randn(2, 5)
    assert torch.equal(LowRank(left, right).whole(), left @ right)
