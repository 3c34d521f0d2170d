"""Means of powers, against the definition that autograd differentiates, in fp64."""

import pytest
import torch

from narrowcast.workloads.decompose.losses.penalties import power_means
from narrowcast.workloads.decompose.settings import EPSILON

POWERS = [1.0, 2.0, 0.5, 0.9, torch.tensor(0.7), torch.tensor(1.0)]


def sites(device="cpu", dtype=torch.float64, rows=70):
    torch.manual_seed(0)
    shapes = [(2, rows, 5), (2, rows, 70), (2, rows, 16)]
    drawn = [torch.rand(shape) * 1.2 - 0.1 for shape in shapes]
    drawn[0][:, :3] = 0.0
    return [each.to(device, dtype).requires_grad_() for each in drawn]


def by_autograd(uppers, power, epsilon=EPSILON):
    """The definition; below a power of 1, what is exactly 0 is a constant of it."""
    held = [torch.where((each == 0) & (power < 1), each.detach(), each) for each in uppers]
    return torch.cat([((each.clamp(min=0) + epsilon) ** power).mean(1) for each in held], -1)


def compared(uppers, power, *, step, epsilon=EPSILON):
    exactly = [each.detach().double().requires_grad_() for each in uppers]
    found = power_means(uppers, power, epsilon)
    expected = by_autograd(exactly, power, epsilon)
    down = torch.randn_like(found)
    ours = torch.autograd.grad(found, uppers, down)
    theirs = torch.autograd.grad(expected, exactly, down.double())
    for one, two in zip((found, *ours), (expected, *theirs), strict=True):
        torch.testing.assert_close(one.double(), two, rtol=step, atol=0)
    assert [each.dtype for each in ours] == [each.dtype for each in uppers]


@pytest.mark.parametrize("power", POWERS)
def test_in_plain_torch_means_and_gradients_are_as_defined(power):
    compared(sites(), power, step=1e-12)


@pytest.mark.interpreted
@pytest.mark.parametrize("power", POWERS)
def test_by_kernels_they_are_the_same(power):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    asked = power.to(device) if isinstance(power, torch.Tensor) else power
    # Of the smallest there is, 1e-12, the logarithm is -40: it loses 5 of 24 bits, and 2 roundings.
    compared(sites(device, torch.float32), asked, step=2.0**-17)


@pytest.mark.interpreted
@pytest.mark.parametrize("power", [0.5, torch.tensor(0.3)])
def test_a_larger_epsilon_bounds_the_slope(power):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    asked = power.to(device) if isinstance(power, torch.Tensor) else power
    compared(sites(), power, step=1e-12, epsilon=0.01)
    uppers = sites(device, torch.float32)
    compared(uppers, asked, step=2.0**-19, epsilon=0.01)
    slopes = torch.autograd.grad(power_means(uppers, asked, 0.01).sum(), uppers)
    most = float(power) * 0.01 ** (float(power) - 1) / uppers[0].shape[1]
    assert max(float(each.max()) for each in slopes) <= most * (1 + 2.0**-19)


@pytest.mark.interpreted
@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("power", [0.4, 0.99, 1.0, 2.0, 2])
@pytest.mark.parametrize("annealed", [False, True])
def test_below_a_power_of_1_an_importance_of_exactly_0_has_no_slope(kernels, power, annealed):
    """By the formula 6e6 at p = 0.4: one such number in bf16 drowned all others of a batch."""
    device = "cuda" if torch.cuda.is_available() and kernels else "cpu"
    dtype = torch.float32 if kernels else torch.float64  # kernels know no fp64
    upper = torch.tensor([0.0, 1e-6, 0.5], dtype=dtype, device=device).reshape(1, 1, 3)
    asked = torch.tensor(power, device=device) if annealed else power
    means = power_means([upper.requires_grad_()], asked)
    (slopes,) = torch.autograd.grad(means.sum(), upper)
    at_zero, near, far = slopes.flatten().tolist()
    assert at_zero == pytest.approx(0.0 if power < 1 else power * EPSILON ** (power - 1))
    assert near == pytest.approx(power * 1e-6 ** (power - 1), rel=1e-4)
    assert far == pytest.approx(power * 0.5 ** (power - 1), rel=1e-4)


@pytest.mark.interpreted
def test_importances_of_16_bits_have_gradients_of_16_bits():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    compared(sites(device, torch.bfloat16), 2.0, step=2.0**-7)


@pytest.mark.interpreted
@pytest.mark.parametrize("power", [1.0, 0.5])
def test_gradients_that_are_one_number_for_all_components_are_read_as_they_lie(power):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    uppers = sites(device, torch.float32, rows=5)
    once = torch.autograd.grad(power_means(uppers, power).sum(-1).sum(), uppers)
    means = power_means(uppers, power)
    again = torch.autograd.grad(means, uppers, torch.ones_like(means))
    assert all(map(torch.equal, once, again))


def test_they_are_compiled_whole():
    uppers = sites()
    compiled = torch.compile(power_means, fullgraph=True, backend="eager")
    ours = torch.autograd.grad(compiled(uppers, 0.5).sum(), uppers)
    theirs = torch.autograd.grad(by_autograd(uppers, 0.5).sum(), uppers)
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=0)
