import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis.strategies import integers

from narrowcast.workloads.lm.text import SYNTHETIC_TOKENS, Windows, synthetic_tokens


@given(count=integers(0, 60), length=integers(1, 20))
def test_every_token_is_a_target_at_most_once_and_few_are_left_out(count, length):
    windows = Windows(np.arange(count, dtype=np.uint16), length)
    _, targets = windows.__getitems__(list(range(len(windows))))
    assert targets.flatten().tolist() == list(range(1, len(windows) * length + 1))
    assert max(count - 1, 0) - targets.numel() < length


def test_targets_are_the_tokens_after_the_inputs():
    windows = Windows(np.arange(100, dtype=np.uint16) * 3, 5)
    inputs, targets = windows.__getitems__([4, 0])
    assert inputs.tolist() == [[60, 63, 66, 69, 72], [0, 3, 6, 9, 12]]
    assert targets.tolist() == [[63, 66, 69, 72, 75], [3, 6, 9, 12, 15]]
    assert inputs.dtype == targets.dtype == torch.int64


def test_tokens_above_two_bytes_are_kept():
    windows = Windows(np.array([0, 70_000, 80_000], dtype=np.int32), 2)
    assert windows.__getitems__([0])[1].tolist() == [[70_000, 80_000]]


def test_windows_can_be_sent_to_another_process():
    windows = pickle.loads(pickle.dumps(Windows(np.arange(9, dtype=np.uint16), 4)))
    assert windows.__getitems__([1])[0].tolist() == [[4, 5, 6, 7]]


@pytest.mark.parametrize("vocab", [256, 50_304, 100_000])
def test_synthetic_tokens_are_spread_evenly_and_repeat_with_their_seed(vocab):
    tokens = synthetic_tokens(vocab, seed=3)
    assert np.array_equal(tokens, synthetic_tokens(vocab, seed=3))
    assert not np.array_equal(tokens, synthetic_tokens(vocab, seed=4))
    assert len(tokens) == SYNTHETIC_TOKENS
    assert tokens.max() < vocab
    # The mean of n even draws is off by vocab / sqrt(12 n); five times that.
    error = 5 * vocab / np.sqrt(12 * SYNTHETIC_TOKENS)
    assert abs(tokens.mean(dtype=np.float64) - (vocab - 1) / 2) < error
