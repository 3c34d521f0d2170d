import math

import pytest
import torch
from torch import nn

from narrowcast.precision.gradients.check import check_gradients, clip_factor
from narrowcast.precision.step.buffers import BufferGuard


def gradients(*values):
    return [torch.tensor(v) for v in values]


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 1])
def test_one_bad_element_anywhere_makes_the_step_not_finite(bad, place):
    given = [torch.ones(1000), torch.ones(7)]
    given[place][-1] = bad
    assert not check_gradients(given, None).finite


@pytest.mark.parametrize("shape", [(), (1,), (3,), (1000,)])
@pytest.mark.parametrize("value", [1e20, -1e25, 3e38])
def test_a_gradient_whose_square_overflows_is_not_finite_whatever_its_shape(shape, value):
    """Adam would put that infinity into its second moment."""
    assert not check_gradients([torch.full(shape, value)], None).finite


@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-20, 1.0, 1e15])
def test_a_finite_gradient_passes(value):
    assert check_gradients([torch.full((10,), value)], None).finite


def test_the_norm_is_torchs_with_the_scale_divided_out():
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(100, generator=generator) for _ in range(5)]
    plain = torch.nn.utils.get_total_norm(given)
    scaled = [g * 1024 for g in given]
    assert check_gradients(given, None).norm == plain
    assert check_gradients(scaled, torch.tensor(1 / 1024)).norm == plain
    each = torch.full((5,), 1 / 1024)
    assert check_gradients(scaled, each).norm == plain


@pytest.mark.parametrize("limit", [0.1, 1.0, 100.0])
def test_clipping_multiplies_by_what_torch_multiplies_by(limit):
    weight = nn.Parameter(torch.zeros(100))
    weight.grad = torch.randn(100, generator=torch.Generator().manual_seed(0))
    mine = weight.grad * clip_factor(torch.linalg.vector_norm(weight.grad), limit)
    torch.nn.utils.clip_grad_norm_([weight], limit)
    assert torch.equal(mine, weight.grad)


YES, NO = torch.tensor(True), torch.tensor(False)


def batch_norm_after(*batches):
    norm = nn.BatchNorm1d(3)
    guard = BufferGuard(norm)
    for batch, finite in batches:
        norm(batch)
        guard.after_step(finite)
    return norm


GOOD = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
BAD = torch.full((8, 3), math.nan)


@pytest.mark.parametrize("first", [True, False], ids=["first step", "later step"])
def test_a_skipped_step_leaves_batch_norm_as_it_was(first):
    before = () if first else ((GOOD, YES),)
    expected = batch_norm_after(*before).state_dict()
    actual = batch_norm_after(*before, (BAD, NO)).state_dict()
    assert all(torch.equal(actual[key], expected[key]) for key in expected)


def test_an_applied_step_leaves_batch_norm_as_torch_does():
    plain = nn.BatchNorm1d(3)
    plain(GOOD)
    actual = batch_norm_after((GOOD, YES)).state_dict()
    assert all(torch.equal(actual[key], value) for key, value in plain.state_dict().items())


class Running(nn.Module):
    """Keeps its statistic by putting a new tensor in the buffer's place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("mask", torch.tensor([0.0, -math.inf]))

    def forward(self, x):
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean()
        return x


def test_a_buffer_that_is_replaced_rather_than_written_is_guarded():
    module = Running()
    guard = BufferGuard(module)
    module(torch.tensor([1.0]))
    guard.after_step(YES)
    module(torch.tensor([math.inf]))
    guard.after_step(NO)
    assert module.mean == 0.5


def test_a_bad_buffer_is_restored_though_every_gradient_was_finite():
    module = Running()
    guard = BufferGuard(module)
    module(torch.tensor([math.nan]))
    guard.after_step(YES)
    assert module.mean == 0.0


def test_infinities_that_belong_to_a_buffer_stay_in_it():
    module = Running()
    guard = BufferGuard(module)
    module.mask.add_(1.0)
    guard.after_step(YES)
    assert torch.equal(module.mask, torch.tensor([1.0, -math.inf]))


def test_a_buffer_that_changes_its_shape_is_taken_as_it_is():
    module = Running()
    guard = BufferGuard(module)
    module.mean = torch.ones(5)
    guard.after_step(NO)
    assert torch.equal(module.mean, torch.ones(5))


def test_what_a_checkpoint_loaded_is_trusted():
    module = Running()
    guard = BufferGuard(module)
    module.mean.fill_(7.0)
    guard.reset()
    module(torch.tensor([math.nan]))
    guard.after_step(NO)
    assert module.mean == 7.0
