"""e4m3 widened with a scale for each row, and transposed, against torch's own."""

import pytest
import torch

from narrowcast.kernels.fp8_groups import _widen_plainly, transposed_bytes, widen_rows
from narrowcast.kernels.launch import interpreted

DEVICE = "cpu" if interpreted() else "cuda"


def every_code(rows):
    """Each finite e4m3 number in every row, in another order in each."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F].view(torch.float8_e4m3fn)
    generator = torch.Generator().manual_seed(0)
    mixed = [codes[torch.randperm(len(codes), generator=generator)] for _ in range(rows)]
    return torch.stack(mixed).to(DEVICE)


@pytest.mark.parametrize("widen", [widen_rows, _widen_plainly], ids=["kernel", "twin"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_code_times_its_scale_is_rounded_once(dtype, widen):
    codes = every_code(9)
    # fp16 ends at 65504, and has the smallest to round.
    most = 7 if dtype == torch.float16 else 90
    scale = 2.0 ** torch.tensor([-30, -12, -9, -1, 0, 1, 5, 7, most], device=DEVICE)
    found = widen(codes, scale, dtype)
    assert found.dtype == dtype
    assert torch.equal(found, (codes.double() * scale[:, None].double()).to(dtype))


@pytest.mark.parametrize("shape", [(1, 1), (3, 2048), (2, 2049), (0, 5), (5, 0)])
def test_any_shape_is_widened_whole(shape):
    codes = torch.randn(shape, device=DEVICE).to(torch.float8_e4m3fn)
    scale = torch.full((shape[0],), 0.5, device=DEVICE)
    assert torch.equal(widen_rows(codes, scale, torch.bfloat16), codes.bfloat16() / 2)


@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (130, 16), (16, 300), (0, 5)])
def test_bytes_are_transposed(shape):
    codes = torch.randn(shape, device=DEVICE).to(torch.float8_e4m3fn)
    found = transposed_bytes(codes)
    assert found.is_contiguous()
    assert torch.equal(found.view(torch.uint8), codes.view(torch.uint8).t())
