import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from narrowcast.kernels.launch import (
    HostTable,
    TensorAddresses,
    chunk_table,
    is_dense,
    laid_like,
    lies_like,
)


@given(sizes=st.lists(st.integers(0, 3000), max_size=6), chunk=st.sampled_from([16, 256, 1024]))
def test_chunks_cover_every_element_of_every_tensor_once(sizes, chunk):
    table = chunk_table(sizes, range(len(sizes)), chunk=chunk)
    covered = [
        (tensor, number * chunk + i)
        for tensor, number, left, _ in table.tolist()
        for i in range(left)
    ]
    assert covered == [(t, i) for t, size in enumerate(sizes) for i in range(size)]
    assert ((table[:, 2] > 0) & (table[:, 2] <= chunk)).all()


SHAPED = {
    "contiguous": (torch.zeros(4, 6), True),
    "transposed": (torch.zeros(4, 6).t(), True),
    "channels last": (torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last), True),
    "one number": (torch.zeros(()), True),
    "empty": (torch.zeros(0, 3)[:, ::2], True),
    "every other": (torch.zeros(4, 6)[:, ::2], False),
    "expanded": (torch.zeros(4, 1).expand(4, 6), False),
}


@pytest.mark.parametrize(("tensor", "dense"), SHAPED.values(), ids=SHAPED)
def test_dense_tensors_fill_a_stretch_of_memory(tensor, dense):
    assert is_dense(tensor) == dense


def test_a_tensor_is_laid_as_another_without_changing_its_values():
    given, other = torch.arange(24.0).view(4, 6), torch.zeros(6, 4).t()
    laid = laid_like(given, other)
    assert not lies_like(given, other)
    assert lies_like(laid, other)
    assert torch.equal(laid, given)
    assert laid_like(given, given) is given


def test_a_table_holds_what_was_written_last():
    table = HostTable(3, torch.device("cpu"), dtype=torch.int64)
    for numbers in ([1, 2, 3], [1, 2, 3], [2**62, 0, 5]):
        table.write(numbers)
        assert table.tensor.tolist() == numbers


def test_two_graphs_of_one_step_each_keep_the_addresses_of_their_own_capture():
    table = HostTable(2, torch.device("cpu"), dtype=torch.int64)
    first, second = table.stored_for_replays([1, 2]), table.stored_for_replays([3, 4])
    assert (first.tolist(), second.tolist()) == ([1, 2], [3, 4])
    assert table.stored_for_replays([3, 4]).data_ptr() == second.data_ptr()
    again = table.stored_for_replays([5, 6]), table.stored_for_replays([7, 8])  # captured anew
    assert [each.tolist() for each in again] == [[5, 6], [7, 8]]


def test_every_capture_that_room_was_made_for_keeps_its_own():
    table = HostTable(2, torch.device("cpu"), dtype=torch.int64)
    kept = []
    for numbers in ([1, 2], [3, 4], [5, 6], [7, 8]):
        table.make_room()
        kept.append((numbers, table.stored_for_replays(numbers)))
    assert all(host.tolist() == numbers for numbers, host in kept)


def test_places_are_of_the_very_tensors_they_were_taken_of():
    one, other = torch.zeros(2), torch.zeros(2)
    places = TensorAddresses([one, other], [one.data_ptr(), other.data_ptr()], [one.dtype] * 2)
    assert places.matches([one, other])
    assert not places.matches([other, one])
    assert not places.matches([one])
    assert not places.matches([one, other.clone()])


def test_what_a_replay_has_written_over_is_written_again():
    table = HostTable(2, torch.device("cpu"), dtype=torch.int64)
    table.write([1, 2])
    table.tensor.copy_(torch.tensor([3, 4]))  # as a replayed graph does
    table.has_replayed()
    table.write([1, 2])
    assert table.tensor.tolist() == [1, 2]
