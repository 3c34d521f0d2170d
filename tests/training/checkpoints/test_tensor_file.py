import errno

import pytest
import torch
from safetensors import safe_open

from narrowcast.training.checkpoints.tree import write_tensors


def test_safetensors_reads_written_files(tmp_path):
    torch.manual_seed(0)
    bits = torch.randint(256, (3, 16), dtype=torch.uint8)
    dtypes = torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.float64, torch.int16
    tensors = {str(dtype): (bits > 99).to(dtype) for dtype in dtypes}
    tensors |= {"codes": bits, "none": torch.empty(0, 4), "number": torch.tensor(2.5)}
    write_tensors(tmp_path / "x", tensors, metadata={"step": "7"})
    with safe_open(tmp_path / "x", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "step": "7"}
        assert set(file.keys()) == set(tensors)
        for name, tensor in tensors.items():
            read = file.get_tensor(name)
            assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(read.float(), tensor.float())


def test_tensors_that_cannot_be_written_are_an_error_of_the_system(tmp_path):
    with pytest.raises(FileNotFoundError) as raised:
        write_tensors(tmp_path / "missing" / "x", {"x": torch.zeros(1)}, metadata={})
    assert raised.value.errno == errno.ENOENT
