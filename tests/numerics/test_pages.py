import pytest
import torch

from narrowcast.numerics.methods import empty_on_large_pages


@pytest.mark.parametrize("shape", [(0,), (7,), (3000, 1000)], ids=["none", "few", "many"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_pages_hold_what_is_written(shape, dtype):
    like = torch.zeros(shape)
    found = empty_on_large_pages(like, dtype=dtype)
    assert (found.shape, found.stride(), found.dtype) == (like.shape, like.stride(), dtype)
    assert torch.equal(found.fill_(3), torch.full(shape, 3, dtype=dtype))


def test_a_transposed_layout_is_kept():
    like = torch.zeros(2000, 1000).t()
    assert empty_on_large_pages(like, dtype=torch.float32).stride() == like.stride()
