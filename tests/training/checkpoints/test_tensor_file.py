import errno

import pytest
import torch

from narrowcast.training.checkpoints.tree import write_tensors


def test_tensors_that_cannot_be_written_are_an_error_of_the_system(tmp_path):
    with pytest.raises(OSError, match="os error 2") as raised:
        write_tensors(tmp_path / "missing" / "x", {"x": torch.zeros(1)}, metadata={})
    assert raised.value.errno == errno.ENOENT
