"""A gated product and its gradients cast to fp8, against torch's autograd in float64."""

from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

from narrowcast.kernels import fp8
from narrowcast.kernels.fp8 import DECIDED, quantize
from narrowcast.kernels.gating import fp8_back
from narrowcast.kernels.gating.fp8_back import quantize_gated_back
from narrowcast.kernels.launch import interpreted

DEVICE = "cpu" if interpreted() else "cuda"
TARGETS = {torch.float8_e4m3fn: 2.0**-4, torch.float8_e5m2: 2.0**-3}
"""By format, half of the distance between neighbours, of a normal number."""
ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
SHAPES = [(32, 48), (20, 64), (80, 80), (1, 16)]
IMPLEMENTATIONS = ["kernel", "plain"]


@contextmanager
def by(how):
    """Let the kernel or its plain twin do the work."""
    with pytest.MonkeyPatch.context() as patch:
        if how == "plain":
            for module in (fp8, fp8_back):
                patch.setattr(module, "unsupported_reason", lambda device: "the twin was asked for")
        yield


def drawn(rows, columns, *, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator).to(dtype).to(DEVICE)


def number(value):
    made = torch.tensor([value], device=DEVICE)
    DECIDED.remove({made.data_ptr()})
    return made


def exact(grad, gate, value, activation):
    """The product and both gradients in float64, by torch's autograd."""
    inputs = [each.double().requires_grad_() for each in (gate, value)]
    product = ACTIVATIONS[activation](inputs[0]) * inputs[1]
    return product.detach(), *torch.autograd.grad(product, inputs, grad.double())


def assert_near(found, expected, target):
    """As near as the format allows: half a step of a normal number, or of the smallest one."""
    scale = float(found.scale_inv)
    count = expected.shape[0]
    values = found.rowwise.double()[:count] * scale
    smallest = scale * (2.0**-10 if target == torch.float8_e4m3fn else 2.0**-17)
    # fp32 on the way, and what a rounding of it moves across a tie.
    bound = expected.abs() * (TARGETS[target] + 2.0**-20) + smallest * (1 + 2.0**-20) + 1e-6 * scale
    assert ((values - expected).abs() <= bound).all()
    assert not found.rowwise[count:].float().any()
    assert torch.equal(
        found.columnwise.view(torch.uint8), found.rowwise.view(torch.uint8).t().contiguous()
    )


@pytest.mark.pairwise
@pytest.mark.parametrize("how", IMPLEMENTATIONS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("target", TARGETS)
def test_product_and_gradients_are_those_of_float64_rounded_once(how, activation, shape, target):
    grad, gate, value = (drawn(*shape, seed=seed) for seed in range(3))
    product, of_gate, of_value = exact(grad, gate, value, activation)
    with by(how):
        forth = quantize(gate, target, activation=f"gated_{activation}", second=value)
        back = quantize_gated_back(grad, gate, value, target, activation=activation)
    assert_near(forth, product, target)
    for found, expected in zip(back, (of_gate, of_value), strict=True):
        assert_near(found, expected, target)
        inverse = float(found.scale_inv)
        top = 448.0 if target == torch.float8_e4m3fn else 57344.0
        assert expected.abs().max() / inverse <= top * (1 + 2.0**-20)
        assert expected.abs().max() / inverse > top / 2 * (1 - 2.0**-20)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_and_twin_agree(activation, dtype):
    grad, gate, value = (drawn(48, 80, seed=seed, dtype=dtype) for seed in range(3))
    found = {}
    for how in IMPLEMENTATIONS:
        with by(how):
            target = torch.float8_e5m2
            back = quantize_gated_back(grad, gate, value, target, activation=activation)
            forth = quantize(gate, target, activation=f"gated_{activation}", second=value)
            found[how] = [each.rowwise.float() * each.scale_inv for each in (forth, *back)]
    for kernel, plain in zip(found["kernel"], found["plain"], strict=True):
        # The same number in fp32 but for its last bits, which may lie on either side of a tie.
        assert ((kernel - plain).abs() <= 2.0**-2 * plain.abs() + 1e-6).all()
        assert (kernel != plain).float().mean() <= 0.01


@pytest.mark.parametrize("how", IMPLEMENTATIONS)
def test_scales_from_the_past_are_used_and_what_is_met_is_noted(how):
    grad, gate, value = (drawn(64, 64, seed=seed) for seed in range(3))
    _, *expected = exact(grad, gate, value, "silu")
    scales = [number(2.0**-9), number(2.0**-3)]
    for each in scales:
        DECIDED.add(each)
    stats = [torch.zeros(4, dtype=torch.int32, device=DEVICE) for _ in range(2)]
    with by(how):
        back = quantize_gated_back(
            grad, gate, value, torch.float8_e4m3fn, activation="silu",
            gate_scale=(scales[0], stats[0]), value_scale=(scales[1], stats[1]),
        )  # fmt: skip
    for found, scale, noted, gradient in zip(back, scales, stats, expected, strict=True):
        assert found.scale_inv is scale
        amax = noted[:1].view(torch.float32).item()
        assert amax == pytest.approx(gradient.abs().max().item(), rel=2.0**-20)
        scaled = gradient.abs() / scale
        assert noted[1].item() == 64 * 64  # one tile, which is looked at
        # Of neighbours of the limits, fp32 may see one on the other side.
        assert abs(noted[2].item() - (scaled > 448).sum().item()) <= 2
        assert abs(noted[3].item() - (scaled <= 2.0**-10).sum().item()) <= 2
        clipped = gradient.clamp(-448 * scale, 448 * scale)
        assert_near(found, clipped, torch.float8_e4m3fn)


@pytest.mark.parametrize("how", IMPLEMENTATIONS)
def test_the_first_matrices_decide_their_scales_each_its_own(how):
    grad, gate, value = (drawn(32, 32, seed=seed) for seed in range(3))
    undecided, decided = number(0.0), number(2.0**-5)
    DECIDED.add(decided)
    stats = [torch.zeros(4, dtype=torch.int32, device=DEVICE) for _ in range(2)]
    with by(how):
        alone = quantize_gated_back(grad, gate, value, torch.float8_e5m2, activation="gelu")
        back = quantize_gated_back(
            grad, gate, value, torch.float8_e5m2, activation="gelu",
            gate_scale=(undecided, stats[0]), value_scale=(decided, stats[1]),
        )  # fmt: skip
    assert back[0].scale_inv.item() == alone[0].scale_inv.item()
    assert decided.item() == 2.0**-5
    assert undecided in DECIDED
    assert all(each[0] > 0 for each in stats)


@pytest.mark.parametrize("rowwise", [True, False])
@pytest.mark.parametrize("columnwise", [True, False])
def test_a_layout_that_nobody_wants_is_empty(rowwise, columnwise):
    given = [drawn(32, 32, seed=seed) for seed in range(3)]
    stats = [torch.zeros(4, dtype=torch.int32, device=DEVICE) for _ in range(2)]
    back = quantize_gated_back(
        *given, torch.float8_e5m2, activation="silu", rowwise=rowwise, columnwise=columnwise,
        gate_scale=(None, stats[0]), value_scale=(None, stats[1]),
    )  # fmt: skip
    for each, noted in zip(back, stats, strict=True):
        assert bool(each.rowwise.numel()) == rowwise
        assert bool(each.columnwise.numel()) == columnwise
        assert noted[0] > 0


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("how", IMPLEMENTATIONS)
def test_what_is_not_finite_stays_so(how, bad):
    grad, gate, value = (drawn(16, 16, seed=seed) for seed in range(3))
    grad[3, 5] = bad
    with by(how):
        back = quantize_gated_back(grad, gate, value, torch.float8_e5m2, activation="silu")
    for each in back:
        assert each.rowwise.float()[3, 5].isnan()
        assert each.rowwise.float().isfinite().sum() == 255


def test_a_compiler_sees_the_shapes_that_come_out():
    given = [drawn(20, 32, seed=seed) for seed in range(3)]
    scale = number(1.0)
    call = torch.ops.narrowcast.quantize_gated_back_fp8
    rest = (torch.float8_e5m2, "silu", None, None, scale, None, True, True)
    real = call(*given, *rest)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = call(*(mode.from_tensor(each) for each in given), *rest)
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
