"""Attention over packed rows, against torch's own of each sequence alone in float64."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from narrowcast.kernels.attention.packed import packed_attention
from narrowcast.kernels.launch import interpreted

DEVICE = "cpu" if interpreted() else "cuda"
# Shrinking takes minutes in an interpreter.
SHOWN = [Phase.explicit, Phase.reuse, Phase.generate]
STEP = {torch.float32: 2.0**-20, torch.float16: 2.0**-10}
if not interpreted():  # the interpreter multiplies bf16 as the integers that it keeps them in
    STEP[torch.bfloat16] = 2.0**-7
NARROW = list(STEP)[-1]


def bounds_of(rows):
    """From lengths of sequences, row by row."""
    ends = [torch.tensor(lengths).cumsum(0) for lengths in rows]
    pairs = [
        torch.stack([(end - torch.tensor(lengths)), end]).repeat_interleave(
            torch.tensor(lengths), dim=1
        )
        for end, lengths in zip(ends, rows, strict=True)
    ]
    return torch.stack(pairs).to(DEVICE, torch.int32)


def alone(query, key, value, rows, window=None):
    """Each sequence by itself: (batch, length, heads, width)."""
    whole = []
    for row, lengths in enumerate(rows):
        parts = zip(*(t[row].split(lengths, 1) for t in (query, key, value)), strict=True)
        whole.append(torch.cat([one(*part, window) for part in parts], 1))
    return torch.stack(whole).transpose(1, 2)


def one(query, key, value, window):
    place = torch.arange(query.shape[1], device=query.device)
    since = place[:, None] - place
    seen = (since >= 0) & (since < (window or len(place)))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=True)


def heads_of(batch, count, length, width, *, dtype, seed):
    """As projections give them: tokens before heads."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, length, count, width, generator=generator)
    return x.to(DEVICE, dtype).transpose(1, 2).requires_grad_()


def assert_same(rows, *, heads, group, width, dtype, window=None, seed=0):
    length = sum(rows[0])
    query = heads_of(len(rows), heads * group, length, width, dtype=dtype, seed=seed)
    key, value = (
        heads_of(len(rows), heads, length, width, dtype=dtype, seed=seed + n) for n in (1, 2)
    )
    found = packed_attention(query, key, value, bounds_of(rows), window=window)
    exact = [t.detach().double().requires_grad_() for t in (query, key, value)]
    expected = alone(*exact, rows, window)
    assert found.dtype == dtype
    grad = heads_of(*found.shape, dtype=dtype, seed=seed + 3).detach()
    results = (found, *torch.autograd.grad(found, (query, key, value), grad))
    wanted = (expected, *torch.autograd.grad(expected, exact, grad.double()))
    for a, b in zip(results, wanted, strict=True):
        assert a.shape == b.shape
        # Shares of scores are rounded to the dtype on the way. A gradient may be the difference of
        # numbers far larger than itself: a token that sees only itself has one of exactly 0.
        size = max(b.norm(), grad.double().norm())
        assert (a.double() - b).norm() <= STEP[dtype] * size


@settings(max_examples=8, phases=SHOWN)
@given(
    lengths=st.lists(st.integers(1, 45), min_size=1, max_size=5),
    batch=st.integers(1, 2), heads=st.integers(1, 2), group=st.integers(1, 3),
    width=st.sampled_from([4, 16, 24]), dtype=st.sampled_from(list(STEP)),
    window=st.none() | st.integers(1, 100), seed=st.integers(0, 99),
)  # fmt: skip
def test_a_sequence_of_a_row_is_what_it_is_alone(
    lengths, batch, heads, group, width, dtype, window, seed
):
    rows = [lengths, lengths[::-1]][:batch]
    assert_same(rows, heads=heads, group=group, width=width, dtype=dtype, window=window, seed=seed)


@pytest.mark.sampled(times=1)
@pytest.mark.parametrize("lengths", [[300], [1, 299], [128, 128, 44], [130, 40, 5, 125]])
@pytest.mark.parametrize("width", [64, 128])
def test_tiles_that_no_border_crosses_are_whole(lengths, width):
    assert_same([lengths], heads=1, group=2, width=width, dtype=NARROW)


def test_what_is_not_a_number_in_one_row_stays_there():
    rows = [[20, 30], [50]]
    query, key, value = (heads_of(2, 1, 50, 16, dtype=torch.float32, seed=n) for n in range(3))
    bad = value.detach().clone()
    bad[1] = torch.nan
    bounds = bounds_of(rows)
    plain, other = (packed_attention(query, key, v, bounds) for v in (value, bad))
    assert torch.equal(plain[0], other[0])
    assert other[1].isnan().all()


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiler_sees_one_operator_each_way(dynamic):
    query, key, value = (heads_of(1, 2, 40, 16, dtype=torch.float32, seed=n) for n in range(3))
    bounds = bounds_of([[15, 25]])

    def work(query):
        return packed_attention(query, key, value, bounds).square().sum()

    compiled = torch.compile(work, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    results = [torch.autograd.grad(run(query), query)[0] for run in (work, compiled)]
    assert torch.equal(*results)


def test_nothing_waits_for_the_device(host_never_waits, cuda):
    query, key, value = (heads_of(1, 2, 256, 64, dtype=NARROW, seed=n) for n in range(3))
    bounds = bounds_of([[100, 156]])
    packed_attention(query, key, value, bounds).sum().backward()
    with host_never_waits():
        packed_attention(query, key, value, bounds).sum().backward()
