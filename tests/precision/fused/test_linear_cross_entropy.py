import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis.strategies import booleans, integers, sampled_from
from torch import nn
from torch.utils.checkpoint import checkpoint

import narrowcast as nc
from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.kernels.launch import interpreted
from narrowcast.numerics import BF16
from narrowcast.precision.fused import chunked_pass
from narrowcast.precision.fused import linear_cross_entropy as linear_loss
from narrowcast.precision.modules.wrappers import EmulatedLinear
from narrowcast.precision.plan.policy import Policy
from narrowcast.precision.products.emulated import TRACED_RIGHTLY
from narrowcast.precision.products.operands import ProductFormats
from narrowcast.precision.products.regions import (
    EmulatedProducts,
    InRegion,
    PreparedModel,
    Region,
    RegionEntry,
)
from narrowcast.precision.swap import swap

DEVICE = "cpu" if interpreted() else "cuda"
MANTISSA = {torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}


def drawn(
    *shape, width=12, columns=50, bias=True, dtype=torch.float32, seed=0, ignored=-100, share=0.2
):
    """States, a head and targets, some of them to be ignored."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*shape, width, generator=generator)
    head = nn.Linear(width, columns, bias=bias)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    targets = torch.randint(0, columns, shape, generator=generator)
    targets[torch.rand(shape, generator=generator) < share] = ignored
    hidden = hidden.to(DEVICE, dtype).requires_grad_()
    return hidden, head.to(DEVICE, dtype), targets.to(DEVICE)


def exact(hidden, head, targets, *, z_loss=0.0, reduction="mean", ignore_index=-100, **terms):
    """The loss by torch's own functions in float64, on leaves of its own."""
    hidden, head = hidden.detach().double().requires_grad_(), copy.deepcopy(head).double()
    logits = head(hidden).flatten(0, -2)
    flat = targets.flatten()
    kept = flat != ignore_index
    loss = F.cross_entropy(logits, flat, reduction=reduction, ignore_index=ignore_index, **terms)
    squares = z_loss * logits.logsumexp(1).square().where(kept, 0.0)
    totals = {"none": squares, "sum": squares.sum(), "mean": squares.sum() / kept.sum()}
    if z_loss:
        loss = loss + totals[reduction]
    return loss.view(targets.shape) if reduction == "none" else loss, hidden, head


def gradients(loss, hidden, head, *, scale=1.0):
    return torch.autograd.grad(loss.sum() * scale, [hidden, *head.parameters()])


def assert_close(found, expected, *, dtype):
    """Compare by norms: a row's error is that of its logits, which sum `width` rounded products.

    Logits here are of order one, however small the loss that they come to.
    """
    error = 8 * 2.0 ** -MANTISSA[dtype]
    difference = (found.double() - expected).norm().item()
    assert difference <= error * max(expected.norm().item(), 1.0)


@given(
    rows=integers(1, 13),
    columns=sampled_from([2, 31, 32, 33, 70]),  # a kernel is compiled for each
    chunk_rows=integers(1, 14),
    dtype=sampled_from(list(MANTISSA)),
    bias=booleans(),
    label_smoothing=sampled_from([0.0, 0.1]),
    z_loss=sampled_from([0.0, 0.01]),
    reduction=sampled_from(["mean", "sum", "none"]),
    seed=integers(0, 99),
)
@settings(max_examples=40)
def test_the_loss_and_every_gradient_are_those_of_float64(
    rows, columns, chunk_rows, dtype, bias, label_smoothing, z_loss, reduction, seed
):
    hidden, head, targets = drawn(rows, columns=columns, bias=bias, dtype=dtype, seed=seed)
    targets[0] = 1  # all ignored is a case of its own
    terms = {"label_smoothing": label_smoothing, "z_loss": z_loss, "reduction": reduction}
    loss = nc.linear_cross_entropy(hidden, head, targets, chunk_rows=chunk_rows, **terms)
    expected, wide, wide_head = exact(hidden, head, targets, **terms)
    assert loss.dtype == torch.float32
    assert loss.shape == expected.shape
    assert_close(loss, expected, dtype=dtype)
    for found, wanted, of in zip(
        gradients(loss, hidden, head),
        gradients(expected, wide, wide_head),
        [hidden, *head.parameters()],
        strict=True,
    ):
        assert found.dtype == of.dtype
        # A gradient is a difference of probability and one, each with the error of its logit.
        slack = 4 * 2.0 ** -MANTISSA[dtype] * rows**0.5
        assert (found.double() - wanted).norm() <= slack * (1 + wanted.norm())


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_loss_without_chunks_is_torchs_own_composition_bit_for_bit(reduction):
    hidden, head, targets = (t.to("cpu") for t in drawn(2, 9))
    hidden = hidden.detach().requires_grad_()
    loss = nc.linear_cross_entropy(hidden, head, targets, reduction=reduction)
    logits = head(hidden).flatten(0, 1).float()
    plain = F.cross_entropy(logits, targets.flatten(), reduction=reduction)
    assert torch.equal(loss.flatten(), plain.flatten())
    pairs = zip(gradients(loss, hidden, head), gradients(plain, hidden, head), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("chunk_rows", [None, 4])
def test_z_loss_is_the_squared_logarithm_of_the_sum(chunk_rows):
    hidden, head, targets = drawn(11)
    loss = nc.linear_cross_entropy(hidden, head, targets, z_loss=0.1, chunk_rows=chunk_rows)
    expected, *_ = exact(hidden, head, targets, z_loss=0.1)
    assert loss.item() == pytest.approx(expected.item(), rel=50 * 2.0**-24)


def test_where_all_rows_are_ignored_the_mean_is_nan_and_gradients_zero_as_in_torch():
    hidden, head, targets = drawn(5, share=2.0)
    for chunk_rows in (None, 2):
        loss = nc.linear_cross_entropy(hidden, head, targets, chunk_rows=chunk_rows)
        assert loss.isnan()
        assert not any(grad.any() for grad in gradients(loss, hidden, head))


def test_gradients_in_fp16_do_not_vanish_for_many_rows():
    hidden, head, targets = drawn(512, width=4, columns=8, dtype=torch.float16)
    loss = nc.linear_cross_entropy(hidden, head, targets, chunk_rows=512)
    expected, wide, wide_head = exact(hidden, head, targets)
    scale = 2.0**16
    found = gradients(loss, hidden, head, scale=scale)
    for mine, wanted in zip(found, gradients(expected, wide, wide_head, scale=scale), strict=True):
        assert_close(mine, wanted, dtype=torch.float16)


def test_small_probabilities_keep_their_digits_in_fp16():
    """Each has 2⁻¹⁰ or less, of which a mean over the rows leaves 2⁻¹⁸; fp16 ends at 2⁻²⁴."""
    rows, columns = 256, 1024
    hidden = torch.ones(rows, 16, dtype=torch.float16, device=DEVICE)
    head = nn.Linear(16, columns, bias=False).to(DEVICE, torch.float16)
    with torch.no_grad():
        head.weight.copy_(torch.linspace(-0.5, 0.0, columns)[:, None].expand(-1, 16))
    targets = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    loss = nc.linear_cross_entropy(hidden, head, targets, chunk_rows=100)
    (found,) = torch.autograd.grad(loss * 1024, [head.weight])
    expected, _, wide_head = exact(hidden, head, targets)
    (wanted,) = torch.autograd.grad(expected * 1024, [wide_head.weight])
    # Logits below 8 are rounded by 2⁻⁹ at most, which their exponentials repeat.
    torch.testing.assert_close(found.double(), wanted, rtol=2.0**-8, atol=2.0**-25)


@pytest.mark.parametrize("scale", [2.0**-20, 1.0, 2.0**16])
def test_rows_weigh_what_the_backward_pass_says_in_fp16(scale):
    hidden, head, targets = drawn(9, dtype=torch.float16)
    head.weight.grad_dtype = head.bias.grad_dtype = torch.float32
    weights = torch.linspace(0.5, 1.0, 9, device=DEVICE)
    losses = nc.linear_cross_entropy(hidden, head, targets, reduction="none", chunk_rows=4)
    expected, _, wide_head = exact(hidden, head, targets, reduction="none")
    (losses * weights).sum().mul(scale).backward()
    (expected * weights.double()).sum().mul(scale).backward()
    for mine, wanted in zip(head.parameters(), wide_head.parameters(), strict=True):
        assert_close(mine.grad, wanted.grad, dtype=torch.float16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_weigh_what_the_backward_pass_says_if_the_head_is_frozen(dtype):
    hidden, head, targets = drawn(9, dtype=dtype)
    head.requires_grad_(False)
    weights = torch.linspace(-0.5, 1.0, 9, device=DEVICE)
    losses = nc.linear_cross_entropy(hidden, head, targets, reduction="none", chunk_rows=4)
    expected, wide, _ = exact(hidden, head, targets, reduction="none")
    (grad,) = torch.autograd.grad((losses * weights).sum(), [hidden], retain_graph=True)
    (again,) = torch.autograd.grad((losses * weights).sum(), [hidden])
    (wanted,) = torch.autograd.grad((expected * weights.double()).sum(), [wide])
    assert_close(grad, wanted, dtype=dtype)
    assert torch.equal(grad, again)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_huge_logits_give_no_nan(sign):
    hidden, head, targets = drawn(6)
    with torch.no_grad():
        head.weight.mul_(1e4 * sign)
    loss = nc.linear_cross_entropy(hidden, head, targets, chunk_rows=4)
    expected, *_ = exact(hidden, head, targets)
    assert loss.item() == pytest.approx(expected.item(), rel=2.0**-20)
    assert all(grad.isfinite().all() for grad in gradients(loss, hidden, head))


# numpy, in which the interpreter computes, says so.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_what_is_not_finite_in_the_states_is_not_finite_in_the_loss(bad):
    hidden, head, targets = drawn(6, share=0.0)
    with torch.no_grad():
        hidden[5, 3] = bad
    loss = nc.linear_cross_entropy(hidden, head, targets, chunk_rows=4)
    assert not loss.isfinite()
    assert not gradients(loss, hidden, head)[1].isfinite().all()


@pytest.mark.parametrize("columns", [9, 16])
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_an_ignored_row_has_no_gradient_whatever_it_holds(columns, bad):
    """Whether the columns are filled up or not."""
    hidden, head, targets = drawn(4, columns=columns)
    with torch.no_grad():
        hidden[1, 0] = bad
    targets[:] = 1
    targets[1] = -100
    loss = nc.linear_cross_entropy(hidden, head, targets, chunk_rows=4, reduction="sum")
    (found,) = torch.autograd.grad(loss, hidden)
    assert not found[1].any()
    assert found[0].isfinite().all()


def test_gradients_of_two_calls_add_up():
    hidden, head, targets = drawn(10)
    for part in (slice(0, 4), slice(4, 10)):
        nc.linear_cross_entropy(
            hidden[part], head, targets[part], reduction="sum", chunk_rows=3
        ).backward()
    expected, wide, wide_head = exact(hidden, head, targets, reduction="sum")
    expected.backward()
    for mine, wanted in zip([hidden, *head.parameters()], [wide, *wide_head.parameters()]):  # noqa: B905
        assert_close(mine.grad, wanted.grad, dtype=torch.float32)


def test_a_graph_that_is_kept_can_be_gone_through_again():
    hidden, head, targets = drawn(7)
    loss = nc.linear_cross_entropy(hidden, head, targets, chunk_rows=3)
    inputs = [hidden, *head.parameters()]
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    kept = [grad.clone() for grad in first]
    second = torch.autograd.grad(loss * 3, inputs)
    for one, copied, three in zip(first, kept, second, strict=True):
        assert torch.equal(one, copied)
        torch.testing.assert_close(three, 3 * one)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_second_derivative_is_refused(reduction):
    hidden, head, targets = drawn(4)
    loss = nc.linear_cross_entropy(hidden, head, targets, reduction=reduction, chunk_rows=4).sum()
    with pytest.raises(UnsupportedError, match=r"no second derivative.* Write F.cross_entropy"):
        torch.autograd.grad(loss, [hidden], create_graph=True)


def test_a_tied_weight_gets_both_gradients():
    torch.manual_seed(0)  # where it predicts itself well, what is left of a gradient is rounding
    targets = torch.tensor([[1, 2, 3, 4]], device=DEVICE)
    embed, head = nn.Embedding(20, 8, device=DEVICE), nn.Linear(8, 20, bias=False, device=DEVICE)
    head.weight = embed.weight
    nc.linear_cross_entropy(embed(targets).tanh(), head, targets, chunk_rows=3).backward()
    weight = embed.weight.detach().double().requires_grad_()
    states = F.embedding(targets, weight).tanh()
    F.cross_entropy(F.linear(states, weight).flatten(0, 1), targets.flatten()).backward()
    assert_close(embed.weight.grad, weight.grad, dtype=torch.float32)


@pytest.mark.parametrize("trained", ["hidden", "weight", "bias"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_what_needs_no_gradient_gets_none(trained, reduction):
    hidden, head, targets = drawn(7)
    tensors = {"hidden": hidden, "weight": head.weight, "bias": head.bias}
    for name, tensor in tensors.items():
        tensor.requires_grad_(name == trained)
    nc.linear_cross_entropy(
        hidden, head, targets, reduction=reduction, chunk_rows=3
    ).sum().backward()
    _, wide, wide_head = expected = exact(hidden, head, targets, reduction=reduction)
    expected[0].sum().backward()
    wanted = {"hidden": wide, "weight": wide_head.weight, "bias": wide_head.bias}[trained]
    assert_close(tensors[trained].grad, wanted.grad, dtype=torch.float32)
    assert all(t.grad is None for name, t in tensors.items() if name != trained)


def test_without_gradients_none_is_computed(monkeypatch):
    hidden, head, targets = drawn(7)
    monkeypatch.setattr(chunked_pass, "_product_into", None)
    with torch.no_grad():
        loss = nc.linear_cross_entropy(hidden, head, targets, chunk_rows=3)
    assert not loss.requires_grad
    assert loss.item() == pytest.approx(exact(hidden, head, targets)[0].item(), rel=2.0**-20)


def test_a_weight_in_16_bits_whose_gradient_is_fp32_gets_all_digits():
    hidden, head, targets = drawn(7, dtype=torch.bfloat16)
    head.weight.grad_dtype = torch.float32
    nc.linear_cross_entropy(hidden, head, targets, chunk_rows=3).backward()
    assert head.weight.grad.dtype == torch.float32
    assert not torch.equal(head.weight.grad, head.weight.grad.bfloat16().float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_operands_are_rounded_to_its_format(dtype):
    hidden, head, targets = drawn(7)
    with torch.autocast(DEVICE, dtype=dtype):
        loss = nc.linear_cross_entropy(hidden, head, targets, chunk_rows=3)
    narrow = nn.Linear(12, 50).to(DEVICE, dtype)
    narrow.load_state_dict(head.state_dict())
    states = hidden.detach().to(dtype).requires_grad_()
    expected = nc.linear_cross_entropy(states, narrow, targets, chunk_rows=3)
    assert torch.equal(loss, expected)
    found = gradients(loss, hidden, head)
    assert [grad.dtype for grad in found] == [torch.float32] * 3
    for mine, other in zip(found, gradients(expected, states, narrow), strict=True):
        assert torch.equal(mine.to(dtype), other)


def test_a_checkpointed_loss_gives_the_same_gradients():
    hidden, head, targets = drawn(7)

    def loss(states):
        return nc.linear_cross_entropy(states.tanh(), head, targets, chunk_rows=3)

    plain = gradients(loss(hidden), hidden, head)
    again = gradients(checkpoint(loss, hidden, use_reentrant=False), hidden, head)
    assert all(map(torch.equal, plain, again))


# torch's own tracer makes an instance of every autograd function it meets, and warns of it.
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loss_traced_as_one_graph_is_the_same(dtype, reduction):
    torch._dynamo.reset()
    hidden, head, targets = drawn(7, dtype=dtype)

    def loss(states):
        return nc.linear_cross_entropy(states * 2, head, targets, reduction=reduction, chunk_rows=3)

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    assert torch.equal(loss(hidden), compiled(hidden))
    pairs = zip(
        gradients(loss(hidden), hidden, head),
        gradients(compiled(hidden), hidden, head),
        strict=True,
    )
    assert all(torch.equal(a, b) for a, b in pairs)
    with torch.no_grad():
        assert torch.equal(loss(hidden), compiled(hidden))


def autocast(head):
    return torch.autocast(DEVICE, dtype=torch.bfloat16)


def emulated(head):
    return EmulatedProducts(BF16)


def in_a_native_region(head):
    if type(head) is nn.Linear:
        swap(
            head, InRegion, nc_entry=RegionEntry(Region("fp32", False, DEVICE), PreparedModel(head))
        )
    return contextlib.nullcontext()


@pytest.mark.parametrize(
    "where",
    [
        autocast,
        pytest.param(
            emulated,
            marks=pytest.mark.skipif(
                not TRACED_RIGHTLY, reason="needs torch 2.13: before, such a graph is broken up"
            ),
        ),
        in_a_native_region,
    ],
)
def test_a_traced_loss_sees_the_region_around_it(where):
    torch._dynamo.reset()
    hidden, head, targets = drawn(7)

    def loss(states):
        return nc.linear_cross_entropy(states * 2, head, targets, chunk_rows=3)

    found = []
    for run in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        with where(head):
            value = run(hidden)
        found.append([value, *gradients(value, hidden, head)])
    for eager, traced in zip(*found, strict=True):
        # A GPU may sum in another order, and what is rounded to bf16 land on the neighbour.
        spacing = 2.0**-7 if eager.is_cuda else 0.0
        assert ((eager - traced).abs() <= spacing * eager.abs().max()).all()


def hooked(head):
    head.register_forward_hook(lambda module, inputs, output: output * 2)
    return contextlib.nullcontext()


def narrow(head):
    formats = ProductFormats.of(Policy(forward="e4m3", scaling="tensor"))
    swap(head, EmulatedLinear, nc_formats=formats, nc_history=None)
    return contextlib.nullcontext()


def in_an_emulated_region(head):
    swap(head, InRegion, nc_entry=RegionEntry(Region("bf16", True, DEVICE), PreparedModel(head)))
    return contextlib.nullcontext()


@pytest.mark.parametrize("change", [hooked, narrow, emulated, in_an_emulated_region])
def test_a_head_that_computes_something_of_its_own_is_asked_itself(change):
    hidden, head, targets = drawn(2, 4)
    with change(head):
        loss = nc.linear_cross_entropy(hidden, head, targets, chunk_rows=3)
        logits = head(hidden).flatten(0, 1).float()
        expected = F.cross_entropy(logits, targets.flatten())
    assert torch.equal(loss, expected)
    pairs = zip(gradients(loss, hidden, head), gradients(expected, hidden, head), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_head_with_a_native_region_of_its_own_is_taken_in_chunks_of_its_format(monkeypatch):
    hidden, head, targets = drawn(2, 4)
    expected = nc.linear_cross_entropy(hidden, head, targets, chunk_rows=3)
    swap(head, InRegion, nc_entry=RegionEntry(Region("fp32", False, DEVICE), PreparedModel(head)))
    monkeypatch.setattr(InRegion, "forward", None)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        loss = nc.linear_cross_entropy(hidden, head, targets, chunk_rows=3)
    assert torch.equal(loss, expected)


def test_float64_stays_float64():
    hidden, head, targets = drawn(7, dtype=torch.float64)
    loss = nc.linear_cross_entropy(hidden, head, targets, chunk_rows=3)
    assert loss.dtype == torch.float64
    assert torch.equal(loss, exact(hidden, head, targets)[0])


def test_a_default_device_changes_nothing():
    hidden, head, targets = drawn(7)
    expected = nc.linear_cross_entropy(hidden, head, targets, chunk_rows=3)
    with torch.device(DEVICE):
        assert torch.equal(expected, nc.linear_cross_entropy(hidden, head, targets, chunk_rows=3))


@given(rows=integers(1, 2**20), columns=integers(1, 2**18), size=sampled_from([2, 4]))
def test_chunks_are_few_and_within_their_bytes(rows, columns, size):
    dtype = {2: torch.bfloat16, 4: torch.float32}[size]
    chunk = chunked_pass.even_chunks(rows, columns, dtype)
    assert chunk % 128 == 0
    assert (chunk - 128) * columns * size <= chunked_pass.CHUNK_BYTES
    fewest = -(-rows * columns * size // chunked_pass.CHUNK_BYTES)
    assert -(-rows // chunk) <= fewest


@pytest.mark.parametrize("chunk_rows", [None, 3])
@pytest.mark.parametrize("shape", [(), (1,), (2, 3, 2)])
def test_states_have_any_shape(shape, chunk_rows):
    hidden, head, targets = drawn(*shape, share=0.0)
    losses = nc.linear_cross_entropy(hidden, head, targets, reduction="none", chunk_rows=chunk_rows)
    logits = head(hidden).reshape(-1, 50)
    expected = F.cross_entropy(logits, targets.flatten(), reduction="none").view(shape)
    torch.testing.assert_close(losses, expected)


def test_no_rows_at_all_are_torchs_matter():
    hidden, head, targets = drawn(0)
    assert nc.linear_cross_entropy(hidden, head, targets, chunk_rows=3).isnan()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"targets": torch.zeros(2, 4)},
            r"must be torch.int64 of shape \(2, 4\), got torch.float32",
        ),
        ({"targets": torch.zeros(8, dtype=torch.int64)}, r"must be torch.int64 of shape \(2, 4\)"),
        ({"hidden": torch.zeros(2, 4, 11)}, "the width of the head, 12, got 11"),
        ({"label_smoothing": 1.5}, "label_smoothing must be between 0 and 1, got 1.5"),
        ({"reduction": "avg"}, 'reduction must be "mean", "sum" or "none", got'),
        ({"chunk_rows": 0}, "chunk_rows must be at least 1, got 0"),
    ],
)
def test_what_makes_no_sense_is_refused(changes, message):
    hidden, head, targets = drawn(2, 4)
    given_ = {"hidden": hidden, "head": head, "targets": targets, **changes}
    with pytest.raises(ConfigError, match=message):
        nc.linear_cross_entropy(**given_)


def test_without_triton_chunks_are_refused(monkeypatch):
    hidden, head, targets = drawn(2, 4)
    monkeypatch.setattr(linear_loss, "_HAS_TRITON", False)
    with pytest.raises(UnsupportedError, match="needs Triton, which is not installed"):
        nc.linear_cross_entropy(hidden, head, targets, chunk_rows=3)


def test_without_triton_the_logits_are_held_whole(monkeypatch):
    hidden, head, targets = drawn(2, 4)
    monkeypatch.setattr(linear_loss, "_HAS_TRITON", False)
    expected = F.cross_entropy(head(hidden).flatten(0, 1), targets.flatten())
    assert torch.equal(nc.linear_cross_entropy(hidden, head, targets), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu_the_logits_are_never_held_whole(dtype):
    rows, width, columns = 16384, 256, 50304
    hidden = torch.randn(rows, width, device="cuda", dtype=dtype, requires_grad=True)
    head = nn.Linear(width, columns, bias=False, device="cuda", dtype=dtype)
    targets = torch.randint(0, columns, (rows,), device="cuda")
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    nc.linear_cross_entropy(hidden, head, targets).backward()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - held
    # A chunk (128 rows more than fit its bytes, at most), and both gradients in fp32 and as given.
    chunk = chunked_pass.CHUNK_BYTES + 128 * (columns + 64) * 2
    assert peak <= chunk + 6 * width * (rows + columns) + 2**25
    assert peak < 2 * rows * columns / 2


def test_on_a_gpu_nothing_waits_for_the_device(host_never_waits):
    hidden, head, targets = drawn(64, dtype=torch.bfloat16)
    nc.linear_cross_entropy(hidden, head, targets).backward()
    with host_never_waits():
        for reduction in ("mean", "none"):
            nc.linear_cross_entropy(hidden, head, targets, reduction=reduction).sum().backward()
    assert head.weight.grad.isfinite().all()


@pytest.mark.parametrize("dtype", list(MANTISSA))
@pytest.mark.parametrize("scale", [-0.25, 512.0])
def test_equal_log_probs_are_those_of_float64(dtype, scale, monkeypatch):
    monkeypatch.setattr(chunked_pass, "CHUNK_BYTES", 2048)
    hidden, head, targets = drawn(300, dtype=dtype, share=0.0)
    losses, *there = exact(hidden, head, targets, reduction="none")
    log_probs, entropies, is_top1 = chunked_pass.chunked_log_probs(
        hidden, head.weight, head.bias, targets, dtype=dtype
    )
    assert_close(log_probs, -losses, dtype=dtype)
    logits = there[1](there[0])
    assert_close(entropies, torch.distributions.Categorical(logits=logits).entropy(), dtype=dtype)
    assert (is_top1 == (logits.argmax(1) == targets)).float().mean() > 0.98  # rounding makes ties
    expected = gradients(-losses, *there, scale=scale)
    for found, each in zip(gradients(log_probs, hidden, head, scale=scale), expected, strict=True):
        assert_close(found / scale, each / scale, dtype=dtype)


def test_log_probs_that_do_not_count_alike_have_no_gradient():
    hidden, head, targets = drawn(6, share=0.0)
    log_probs, *_ = chunked_pass.chunked_log_probs(
        hidden, head.weight, head.bias, targets, dtype=torch.float32
    )
    weights = torch.tensor([1.0, 1, 1, 1, 1, 2], device=DEVICE)
    assert all(each.isnan().all() for each in gradients(log_probs * weights, hidden, head))
