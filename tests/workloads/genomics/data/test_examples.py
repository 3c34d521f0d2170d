import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from narrowcast.workloads.genomics.data.examples import Examples, Ragged

rows_of_numbers = st.lists(st.lists(st.integers(1, 9), max_size=12), min_size=1, max_size=8)


def ragged(rows):
    return Ragged.joined([np.array(row, dtype=np.int64) for row in rows], np.uint16)


@given(rows_of_numbers)
def test_rows_come_back_as_they_were(rows):
    joined = ragged(rows)
    assert [joined[at].tolist() for at in range(len(joined))] == rows
    assert joined.longest == max(map(len, rows))
    order = list(range(len(rows)))[::-1]
    padded = joined.padded(order, 16, 0)
    assert padded.tolist() == [rows[at] + [0] * (16 - len(rows[at])) for at in order]


@given(rows_of_numbers)
def test_all_batches_together_are_all_rows_once_and_of_one_shape(rows):
    examples = Examples(tokens=ragged(rows), targets=np.arange(len(rows)))
    batches = list(examples.batches(3))
    assert torch.cat([batch["targets"] for batch in batches]).tolist() == list(range(len(rows)))
    widths = {batch["tokens"].shape[1] for batch in batches}
    assert len(widths) == 1
    assert widths.pop() % 8 == 0
    assert sum(int(batch["mask"].sum()) for batch in batches) == sum(map(len, rows))


def test_neither_sequence_of_a_pair_of_unequal_lengths_loses_letters():
    examples = Examples(
        tokens=ragged([[1, 2, 3], [1]]), alternatives=ragged([[1], [1, 2, 3, 4]]), targets=None
    )
    batch = examples.__getitems__([0, 1])
    assert batch["mask"].sum(1).tolist() == [3, 4]
    assert batch["alternative"][0].tolist() == [1] + [0] * 7


def test_the_classes_of_letters_are_filled_up_with_what_losses_leave_out():
    targets = Ragged.joined([np.array([1, 0]), np.array([2])], np.int16)
    batch = Examples(tokens=ragged([[5, 5], [5]]), targets=targets).__getitems__([1, 0])
    assert batch["targets"].dtype == torch.int64
    assert batch["targets"][:, :3].tolist() == [[2, -100, -100], [1, 0, -100]]


def test_other_examples_have_another_digest():
    def digest(tokens, **more):
        return Examples(tokens=ragged(tokens), **{"targets": None, **more}).digest()

    plain = digest([[1, 2], [3]])
    assert plain == digest([[1, 2], [3]])
    others = [
        digest([[1], [2, 3]]),
        digest([[1, 2], [4]]),
        digest([[1, 2], [3]], alternatives=ragged([[1, 2], [3]])),
        digest([[1, 2], [3]], targets=np.array([0, 1])),
        digest([[1, 2], [3]], targets=np.array([1, 0])),
        digest([[1, 2], [3]], targets=ragged([[1, 1], [1]])),
    ]
    assert len({plain, *others}) == 1 + len(others)
