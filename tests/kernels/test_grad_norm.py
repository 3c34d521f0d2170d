import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowcast.kernels.grad_norm import NormKernel
from narrowcast.kernels.launch import interpreted

DEVICE = torch.device("cpu" if interpreted() else "cuda")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def gradients():
    generator = torch.Generator().manual_seed(0)

    def tensor(shape, dtype):
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    return [
        tensor((), torch.float32),
        tensor((0,), torch.bfloat16),
        tensor((17, 3), torch.bfloat16),
        tensor((4096,), torch.bfloat16),
        tensor((5001,), torch.float16),
        tensor((20, 64), torch.float32).t(),
        tensor((40, 40), torch.bfloat16)[:, ::2],
        tensor((33,), torch.bfloat16)[1:],
    ]


def test_norms_are_those_of_exact_arithmetic():
    given = gradients()
    norms = NormKernel(DEVICE, chunk=1024)(given)
    for norm, gradient in zip(norms, given, strict=True):
        exact = torch.linalg.vector_norm(gradient.double())
        # Sums of at most 1024 squares in fp32, in pairs, and their root.
        assert abs(float(norm) - float(exact)) <= float(exact) * 1024 * 2.0**-24


def test_the_same_gradients_have_the_same_norm_wherever_they_are():
    kernel = NormKernel(DEVICE, chunk=1024)
    first = gradients()
    norms = [kernel(first), kernel(gradients()), kernel(first)]
    assert torch.equal(norms[0], norms[1])
    assert torch.equal(norms[0], norms[2])


def test_fewer_or_other_gradients_are_taken_as_they_come():
    kernel = NormKernel(DEVICE, chunk=1024)
    everything = gradients()
    whole = kernel(everything)
    assert torch.equal(kernel(everything[2:5]), whole[2:5])
    assert torch.equal(kernel(everything), whole)


@settings(max_examples=15)
@given(
    bad=st.sampled_from([math.inf, -math.inf, math.nan]),
    dtype=st.sampled_from(DTYPES),
    size=st.integers(1, 700),
    data=st.data(),
)
def test_one_bad_element_makes_its_tensor_and_no_other_not_finite(bad, dtype, size, data):
    tensor = torch.ones(size, dtype=dtype, device=DEVICE)
    tensor[data.draw(st.integers(0, size - 1))] = bad
    norms = NormKernel(DEVICE, chunk=256)([torch.ones(5, device=DEVICE), tensor])
    assert norms.isfinite().tolist() == [True, False]


@pytest.mark.filterwarnings("ignore:overflow encountered")  # numpy tells of it, a GPU does not
@pytest.mark.parametrize("value", [1e20, -3e38])
def test_a_square_beyond_fp32_is_an_infinite_norm(value):
    assert NormKernel(DEVICE, chunk=256)([torch.full((3,), value, device=DEVICE)]).isinf().all()


def test_a_long_tensor_is_joined_from_many_chunks():
    norm = NormKernel(DEVICE, chunk=16)([torch.full((16 * 2100,), 2.0, device=DEVICE)])
    assert float(norm) == pytest.approx(2 * math.sqrt(16 * 2100), rel=2.0**-20)
