import numpy as np
import torch
from hypothesis import given
from hypothesis.strategies import integers, sampled_from

from narrowcast.workloads.lm.model import rotary_table, rotate

LENGTH = 64
BASE = 10_000.0
# Each entry of the table is a float64 value rounded to fp32.
TABLE_ERROR = 2.0**-24


def turned(vector: torch.Tensor, position: int) -> torch.Tensor:
    """Turn one vector as it is turned at one position."""
    table = rotary_table(LENGTH, len(vector), base=BASE)
    return rotate(vector.expand(1, LENGTH, 1, -1), table)[0, position, 0]


def vectors(seed: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, width, generator=generator, dtype=torch.float64)


def test_the_table_is_the_complex_exponential_of_position_times_frequency():
    frequency = BASE ** (-np.arange(0, 16, 2) / 16)
    expected = np.exp(1j * np.arange(300)[:, None] * frequency)
    table = torch.view_as_complex(rotary_table(300, 16, base=BASE))[:, 0].numpy()
    assert np.abs(table - expected).max() <= 2 * TABLE_ERROR


@given(
    seed=integers(0, 1000),
    width=sampled_from([2, 8, 32]),
    query=integers(0, LENGTH // 2 - 1),
    key=integers(0, LENGTH // 2 - 1),
    shift=integers(0, LENGTH // 2),
)
def test_the_product_of_query_and_key_depends_on_their_distance_alone(
    seed, width, query, key, shift
):
    q, k = vectors(seed, width)
    here = turned(q, query) @ turned(k, key)
    there = turned(q, query + shift) @ turned(k, key + shift)
    # Each of the four turns adds at most two table errors a number.
    assert abs(here - there) <= 8 * TABLE_ERROR * q.norm() * k.norm()


@given(seed=integers(0, 1000), position=integers(0, LENGTH - 1))
def test_turning_keeps_the_length_of_a_vector(seed, position):
    vector = vectors(seed, 16)[0]
    assert abs(turned(vector, position).norm() - vector.norm()) <= 2 * TABLE_ERROR * vector.norm()


def test_the_first_position_is_not_turned():
    vector = torch.randn(8)
    assert torch.equal(turned(vector, 0), vector)


def test_a_pair_of_adjacent_numbers_turns_together():
    vector = torch.tensor([1.0, 0.0, 0.0, 0.0])
    table = rotary_table(2, 4, base=BASE)
    first = rotate(vector.expand(1, 2, 1, -1), table)[0, 1, 0]
    expected = torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    expected[0].cos_()
    expected[1].sin_()
    torch.testing.assert_close(first.double(), expected, rtol=0, atol=2 * TABLE_ERROR)


def test_bf16_is_turned_in_fp32():
    x = torch.randn(2, LENGTH, 3, 8).bfloat16()
    table = rotary_table(LENGTH, 8, base=BASE)
    assert torch.equal(rotate(x, table), rotate(x.float(), table).bfloat16())


def test_compiled_code_turns_as_eager_code_does():
    x = torch.randn(2, LENGTH, 3, 8)
    table = rotary_table(LENGTH, 8, base=BASE)
    compiled = torch.compile(rotate, backend="eager", fullgraph=True)(x, table)
    # Two products and a sum, each rounded once, of numbers no larger than x.
    error = 3 * 2.0**-24 * 2 * x.abs().max().item()
    torch.testing.assert_close(compiled, rotate(x, table), rtol=0, atol=error)
