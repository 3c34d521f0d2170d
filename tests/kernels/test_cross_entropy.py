import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis.strategies import booleans, integers, sampled_from

from narrowcast.kernels import cross_entropy
from narrowcast.kernels.cross_entropy import cross_entropy_, cross_entropy_twin_
from narrowcast.kernels.launch import interpreted

DEVICE = "cpu" if interpreted() else "cuda"
DTYPES = {torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}
"""With the mantissa bits that are stored."""
IMPLEMENTATIONS = {"kernel": cross_entropy_, "twin": cross_entropy_twin_}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Let rows of a few dozen logits take several blocks, as rows of 50304 do."""
    monkeypatch.setattr(cross_entropy, "BLOCK", 32)


def drawn(rows, columns, *, dtype=torch.float32, seed=0, ignored=-100):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, columns, generator=generator) * 3).to(dtype)
    targets = torch.randint(0, columns, (rows,), generator=generator)
    targets[torch.rand(rows, generator=generator) < 0.2] = ignored
    factors = torch.rand(rows, generator=generator) - 0.5
    return logits.to(DEVICE), targets.to(DEVICE), factors.to(DEVICE)


def exact(logits, targets, *, label_smoothing=0.0, z_loss=0.0, ignore_index=-100):
    """Losses and gradients by torch's own functions and autograd, in float64."""
    wide = logits.double().requires_grad_()
    kept = targets != ignore_index
    losses = F.cross_entropy(
        wide,
        targets,
        label_smoothing=label_smoothing,
        ignore_index=ignore_index,
        reduction="none",
    )
    losses = losses + z_loss * wide.logsumexp(1).square().where(kept, 0.0)
    (gradient,) = torch.autograd.grad(losses.sum(), wide)
    return losses.detach(), gradient


@pytest.mark.parametrize("how", IMPLEMENTATIONS)
@given(
    rows=integers(1, 5),
    columns=sampled_from([1, 31, 33, 70]),
    dtype=sampled_from(list(DTYPES)),
    gradient=booleans(),
    seed=integers(0, 99),
)
@settings(max_examples=30)
def test_statistics_are_those_of_float64(how, rows, columns, dtype, gradient, seed):
    logits, targets, _ = drawn(rows, columns, dtype=dtype, seed=seed)
    logits[0] = logits[0].round()  # several are the largest
    if columns > 1:
        logits[0, -1] = float("-inf")
    kept = targets != -100
    entropies = torch.distributions.Categorical(logits=logits.double()).entropy()
    is_first = logits.float().cpu().numpy().argmax(1) == targets.cpu().numpy()
    statistics = torch.full((2, rows), 7.0, device=DEVICE)
    IMPLEMENTATIONS[how](
        logits, targets, ignore_index=-100, label_smoothing=0.0, z_loss=0.0, gradient=gradient,
        statistics=statistics,
    )  # fmt: skip
    expected = entropies.where(kept, 0.0).float()
    torch.testing.assert_close(statistics[0], expected, rtol=1e-5, atol=1e-5)
    assert statistics[1].tolist() == (torch.tensor(is_first) & kept.cpu()).float().tolist()


@pytest.mark.parametrize("how", IMPLEMENTATIONS)
@given(
    rows=integers(1, 5),
    columns=sampled_from([1, 2, 31, 32, 33, 70]),  # a kernel is compiled for each
    dtype=sampled_from(list(DTYPES)),
    label_smoothing=sampled_from([0.0, 0.1, 1.0]),
    z_loss=sampled_from([0.0, 0.01]),
    weighted=booleans(),
    seed=integers(0, 99),
)
@settings(max_examples=40)
def test_losses_and_gradients_are_those_of_float64(
    how, rows, columns, dtype, label_smoothing, z_loss, weighted, seed
):
    logits, targets, factors = drawn(rows, columns, dtype=dtype, seed=seed)
    terms = {"label_smoothing": label_smoothing, "z_loss": z_loss}
    losses, gradient = exact(logits, targets, **terms)
    gradient = 4 * gradient * (factors[:, None] if weighted else 1)
    found = IMPLEMENTATIONS[how](
        logits,
        targets,
        ignore_index=-100,
        gradient=True,
        lift=4.0,
        factors=factors if weighted else None,
        **terms,
    )
    # Sums of at most 70 terms and a few operations on them, in fp32, on logits of at most 15.
    error = 70 * 2.0**-24 * 15
    torch.testing.assert_close(found.double(), losses, rtol=error, atol=error)
    # One rounding to the format, where the interpreter cuts off; below it, fp16's smallest number.
    rounding = 2.0 ** -DTYPES[dtype]
    close = {"rtol": rounding + error, "atol": 2.0**-24 + 4 * error}
    torch.testing.assert_close(logits.double(), gradient, **close)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_and_its_twin_agree(dtype):
    logits, targets, factors = drawn(9, 77, dtype=dtype)
    targets[0] = 77
    settings = {"ignore_index": -100, "label_smoothing": 0.1, "z_loss": 0.01, "gradient": True}
    by_kernel, by_twin = logits.clone(), logits.clone()
    kernel = cross_entropy_(by_kernel, targets, factors=factors, **settings)
    twin = cross_entropy_twin_(by_twin, targets, factors=factors, **settings)
    torch.testing.assert_close(kernel, twin, rtol=77 * 2.0**-24, atol=0, equal_nan=True)
    # The interpreter cuts bf16 off where torch rounds: one step apart at most.
    close = {"rtol": 2.0 ** -DTYPES[dtype] + 77 * 2.0**-24, "atol": 2.0**-23}
    torch.testing.assert_close(by_kernel, by_twin, equal_nan=True, **close)


@pytest.mark.parametrize("how", IMPLEMENTATIONS)
@pytest.mark.parametrize("ignore_index", [-100, 5])
def test_ignored_rows_have_neither_loss_nor_gradient(how, ignore_index):
    logits, targets, _ = drawn(12, 40, ignored=ignore_index)
    ignored = targets == ignore_index
    assert ignored.any()
    losses, gradient = exact(logits, targets, ignore_index=ignore_index)
    found = IMPLEMENTATIONS[how](
        logits, targets, ignore_index=ignore_index, label_smoothing=0.0, z_loss=0.0, gradient=True
    )
    assert not found[ignored].any()
    assert not logits[ignored].any()
    torch.testing.assert_close(found, losses.float())
    torch.testing.assert_close(logits, gradient.float())


@pytest.mark.parametrize("how", IMPLEMENTATIONS)
def test_without_a_gradient_the_logits_stay(how):
    logits, targets, _ = drawn(4, 40)
    before = logits.clone()
    settings = {"ignore_index": -100, "label_smoothing": 0.1, "z_loss": 0.1}
    only = IMPLEMENTATIONS[how](logits, targets, gradient=False, **settings)
    assert torch.equal(logits, before)
    assert torch.equal(only, IMPLEMENTATIONS[how](logits, targets, gradient=True, **settings))


@pytest.mark.parametrize("how", IMPLEMENTATIONS)
def test_huge_logits_lose_no_digits(how):
    logits, targets, _ = drawn(6, 50)
    logits = torch.where(logits > 0, 1e4, -1e4) + logits
    losses, gradient = exact(logits, targets)
    found = IMPLEMENTATIONS[how](
        logits, targets, ignore_index=-100, label_smoothing=0.0, z_loss=0.0, gradient=True
    )
    # Differences from the largest logit are exact, or so large that they have no part in it.
    torch.testing.assert_close(found.double(), losses, rtol=50 * 2.0**-24, atol=50 * 2.0**-24)
    torch.testing.assert_close(logits.double(), gradient, rtol=50 * 2.0**-24, atol=2.0**-24)


@pytest.mark.parametrize("how", IMPLEMENTATIONS)
def test_a_column_that_is_ruled_out_has_no_part_in_the_loss(how):
    logits, targets, _ = drawn(3, 70)
    targets[:] = 69
    logits[:, :64] = -torch.inf  # whole blocks
    losses, gradient = exact(logits, targets)
    found = IMPLEMENTATIONS[how](
        logits, targets, ignore_index=-100, label_smoothing=0.0, z_loss=0.0, gradient=True
    )
    torch.testing.assert_close(found, losses.float())
    torch.testing.assert_close(logits, gradient.float())


# numpy, in which the interpreter computes, says so.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("how", IMPLEMENTATIONS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("column", [0, 69])
def test_what_is_not_finite_is_never_hidden(how, bad, column):
    logits, targets, _ = drawn(3, 70, ignored=1)
    logits[1, column] = bad
    found = IMPLEMENTATIONS[how](
        logits, targets, ignore_index=-100, label_smoothing=0.0, z_loss=0.0, gradient=True
    )
    assert found.isfinite().tolist() == [True, False, True]
    assert logits.isfinite().all(1).tolist() == [True, False, True]


@pytest.mark.parametrize("how", IMPLEMENTATIONS)
@pytest.mark.parametrize("target", [-1, 40, 2**40])
def test_a_target_that_is_no_column_gives_nan(how, target):
    logits, targets, _ = drawn(2, 40, ignored=1)
    targets[0] = target
    found = IMPLEMENTATIONS[how](
        logits, targets, ignore_index=-100, label_smoothing=0.0, z_loss=0.0, gradient=True
    )
    assert found.isnan().tolist() == [True, False]
    assert logits.isnan().all(1).tolist() == [True, False]


@pytest.mark.parametrize("how", IMPLEMENTATIONS)
def test_what_lies_between_rows_is_left_alone(how):
    space = torch.full((4, 64), 7.0, device=DEVICE)
    logits, targets, _ = drawn(4, 40)
    space[:, :40] = logits
    found = IMPLEMENTATIONS[how](
        space[:, :40], targets, ignore_index=-100, label_smoothing=0.0, z_loss=0.0, gradient=True
    )
    losses, gradient = exact(logits, targets)
    torch.testing.assert_close(found, losses.float())
    torch.testing.assert_close(space[:, :40], gradient.float())
    assert (space[:, 40:] == 7).all()
