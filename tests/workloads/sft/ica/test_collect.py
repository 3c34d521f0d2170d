import pytest
import torch

from narrowcast.errors import ConfigError
from narrowcast.workloads.sft.ica import ICA, ArraySignals, FileSignals
from narrowcast.workloads.sft.ica.collect import collect
from narrowcast.workloads.sft.ica.signals import Storage, channel_statistics


class Uneven:
    """A source whose chunks have 1, 2, 3 … rows."""

    def __init__(self, array):
        self.array, self.channels = array, array.shape[1]

    def __iter__(self):
        start, size = 0, 1
        while start < len(self.array):
            yield self.array[start : start + size]
            start, size = start + size, size + 1


@pytest.fixture
def noise():
    return torch.randn(500, 8, generator=torch.Generator().manual_seed(0))


def collected(array, dtype):
    return collect(Uneven(array), Storage(dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_chunks_of_any_length_are_stored_as_they_came_but_for_rounding(noise, dtype):
    result = collected(noise, dtype)
    assert result.dtype == dtype
    assert torch.equal(torch.cat(list(result.signals)), noise.to(dtype))
    assert result.signals.bytes == noise.numel() * dtype.itemsize
    assert result.findings == ()


def test_an_overflow_in_float16_is_answered_by_float32(noise):
    noise[400, 3] = 70_000.0
    result = collected(noise, torch.float16)
    assert result.dtype == torch.float32
    assert torch.equal(torch.cat(list(result.signals)), noise)
    (finding,) = result.findings
    assert finding.kind == "overflow"
    assert "up to 7e+04, overflow float16, whose largest value is 6.55e+04" in finding.what
    assert finding.answer == "Signals are stored in float32"


def test_a_column_of_60000s_has_a_finite_mean_and_no_spread(noise):
    noise[:, 2] = 60_000.0
    statistics = channel_statistics(collected(noise, torch.float16).signals)
    assert statistics.mean[2] == 60_000
    assert statistics.spread[2] == 0


def test_signals_too_quiet_for_float16_are_stored_in_float32(noise):
    result = collected(noise * 1e-7, torch.float16)
    assert result.dtype == torch.float32
    assert result.findings[0].kind == "coarse"
    assert collected(noise * 1e-7, torch.bfloat16).dtype == torch.bfloat16


def test_what_came_in_no_finer_digits_is_not_widened(noise):
    assert collected((noise + 100).bfloat16(), torch.bfloat16).dtype == torch.bfloat16
    assert collected((noise + 100).bfloat16(), torch.float16).dtype == torch.float16


def test_channels_far_from_zero_are_too_coarse_for_bfloat16(noise):
    result = collected(noise + 100, torch.bfloat16)
    assert result.dtype == torch.float32
    assert "8 of 8 channels spread over less than three spacings of bfloat16" in str(
        result.findings[0]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_the_model_computes_wrong_is_its_own(noise, dtype, bad):
    noise[301, 5] = bad
    with pytest.raises(
        ConfigError, match=r"not finite, the first in row 301, channel 5. The model"
    ):
        collected(noise, dtype)


def test_components_say_what_was_done(noise):
    noise[0, 0] = 70_000.0
    ica = ICA(components=2, ica_dtype="float16")
    found = ica.fit(ica.collect(ArraySignals(noise)))
    assert found.dtype == torch.float32
    assert "overflow" in [finding.kind for finding in found.findings]


def test_a_file_is_read_chunk_by_chunk(noise, tmp_path):
    path = tmp_path / "signals"
    noise.numpy().tofile(path)
    source = FileSignals(path=path, channels=8)
    for _ in range(2):
        assert torch.equal(torch.cat([chunk.clone() for chunk in source]), noise)
    one = ICA(components=3).fit(source)
    other = ICA(components=3).fit(ArraySignals(noise))
    assert torch.equal(one.loadings, other.loadings)


def test_a_file_of_other_rows_is_refused(noise, tmp_path):
    path = tmp_path / "signals"
    noise.numpy().tofile(path)
    with pytest.raises(ConfigError, match="not a whole number of rows of 7 float32"):
        list(FileSignals(path=path, channels=7))
