"""Emulated products against numpy in fp64, with operands rounded by ml_dtypes."""

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD

import narrowcast as nc
from narrowcast import numerics
from narrowcast.errors import UnsupportedError
from narrowcast.numerics import BF16, FP16, FP32, TF32, quantize
from narrowcast.precision.fp8.delayed import AmaxHistories
from narrowcast.precision.plan.policy import Policy
from narrowcast.precision.products.emulated import linear_product, rounded_call
from narrowcast.precision.products.modes import EmulatedProducts
from narrowcast.precision.products.operands import ProductFormats
from narrowcast.precision.products.regions import Pass, PreparedModel, Region, RegionEntry

ROWS, IN, OUT = 32, 64, 32
pytestmark = pytest.mark.usefixtures("guarded")


def rounded_bf16(x):
    return x.astype(ml_dtypes.bfloat16).astype(np.float64)


def rounded_fp16(x):
    return x.astype(np.float16).astype(np.float64)


def rounded_tf32(x):
    fraction, exponent = np.frexp(x.astype(np.float64))
    return np.ldexp(np.rint(fraction * 2.0**11), exponent - 11)


def rounded_fp32(x):
    return x.astype(np.float32).astype(np.float64)


def power_of_two_scale(amax, largest):
    scale = 2.0 ** np.floor(np.log2(largest / np.where(amax > 0, amax, 1.0)))
    return np.where(amax > 0, scale, 1.0)


def rounded_fp8(x, dtype, *, axis):
    largest = float(ml_dtypes.finfo(dtype).max)
    scale = power_of_two_scale(np.abs(x).max(axis=axis, keepdims=True), largest)
    return (x * scale).astype(np.float32).astype(dtype).astype(np.float64) / scale


def rounded_mxfp8(x, *, axis):
    blocks = np.moveaxis(x, axis, -1).reshape(-1, 32)
    amax = np.abs(blocks).max(axis=-1, keepdims=True)
    scale = 2.0 ** (np.floor(np.log2(amax)) - 8)
    scaled = np.clip(blocks / scale, -448, 448).astype(np.float32)
    result = scaled.astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale
    return np.moveaxis(result.reshape(np.moveaxis(x, axis, -1).shape), -1, axis)


def rounded_nvfp4(x, *, axis):
    moved = np.moveaxis(x, axis, -1)
    blocks = np.ascontiguousarray(moved).reshape(-1, 16).astype(np.float32)
    amax = np.abs(blocks).max(axis=-1, keepdims=True)
    whole = amax.max() / np.float32(6 * 448)
    scale = (amax / np.float32(6) / whole).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    scale = np.maximum(scale, np.float32(2.0**-9)) * whole
    scaled = np.clip(blocks / scale, -6, 6)
    result = scaled.astype(ml_dtypes.float4_e2m1fn).astype(np.float64) * scale.astype(np.float64)
    return np.moveaxis(result.reshape(moved.shape), -1, axis)


E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2


def reference_operand(x, name, scaling, axis):
    """Round `x` to a format; `axis` is the one that the product sums over."""
    match name:
        case "fp32":
            return rounded_fp32(x)
        case "tf32":
            return rounded_tf32(x)
        case "bf16":
            return rounded_bf16(x)
        case "fp16":
            return rounded_fp16(x)
        case "e4m3" | "e5m2":
            dtype = E4M3 if name == "e4m3" else E5M2
            return rounded_fp8(x, dtype, axis=axis if scaling == "row" else None)
        case "mxfp8":
            return rounded_mxfp8(x, axis=axis)
        case "nvfp4":
            return rounded_nvfp4(x, axis=axis)


OUTPUTS = {
    "fp32": (rounded_fp32, 2.0**-24),
    "bf16": (rounded_bf16, 2.0**-8),
    "fp16": (rounded_fp16, 2.0**-11),
}


def assert_is_product(actual, left, right, output, bias=0.0):
    """Within the error of fp32 sums of the rounded operands, rounded to the output's format."""
    exact = left @ right + bias
    terms = np.abs(left) @ np.abs(right) + np.abs(bias)
    sums = (left.shape[-1] + 2) * 2.0**-24 * terms
    _, half_ulp = OUTPUTS[output]
    # One rounding of the sum, and before that one of the product where a bias is added to it.
    before_bias = np.abs(left @ right) if np.any(bias) else 0.0
    allowed = sums + half_ulp * (np.abs(exact) + before_bias) * (1 + 2 * half_ulp) + 2 * sums
    allowed = allowed + 2.0**-24 * (output == "fp16")  # its subnormals step by that
    assert np.all(np.abs(actual.double().numpy() - exact) <= allowed)
    on_grid = OUTPUTS[output][0](actual.numpy())
    assert np.array_equal(on_grid, actual.double().numpy())


def make(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


POLICIES = {
    "fp32": Policy(),
    "bf16": Policy(forward="bf16", grad_input="bf16", grad_weight="bf16"),
    "fp16": Policy(forward="fp16", grad_input="fp16", grad_weight="fp16"),
    "tf32": Policy(forward="tf32", grad_input="tf32", grad_weight="tf32"),
    "fp8-tensor": Policy(forward="e4m3", grad_input="e5m2", grad_weight="e5m2", scaling="tensor"),
    "fp8-row": Policy(forward="e4m3", grad_input="e5m2", grad_weight="e5m2", scaling="row"),
    "e4m3 throughout": Policy(
        forward="e4m3", grad_input="e4m3", grad_weight="e4m3", scaling="tensor"
    ),
    "mixed fp8": Policy(forward="e4m3", grad_input="e5m2", grad_weight="e4m3", scaling="row"),
    "bf16 with e5m2 gradients": Policy(
        forward="bf16", grad_input="e5m2", grad_weight="e5m2", scaling="tensor"
    ),
    "wide grad_weight": Policy(
        forward="e4m3", grad_input="e5m2", grad_weight="bf16", scaling="tensor"
    ),
    "bf16 forward only": Policy(forward="bf16"),
    "fp32 output": Policy(forward="bf16", grad_input="bf16", grad_weight="bf16", output="fp32"),
    "mxfp8": Policy(forward="mxfp8", grad_input="mxfp8", grad_weight="mxfp8"),
    "nvfp4": Policy(forward="nvfp4", grad_input="nvfp4", grad_weight="nvfp4"),
    "mxfp8 with e5m2 gradients": Policy(
        forward="mxfp8", grad_input="e5m2", grad_weight="e5m2", scaling="tensor"
    ),
}
EIGHT_BITS = ("e4m3", "e5m2", "mxfp8", "nvfp4")


def beside(policy, product):
    narrow = product in EIGHT_BITS and policy.forward in EIGHT_BITS
    return policy.forward if narrow else product


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no bias"])
def test_a_linear_product_is_that_of_rounded_operands(policy, with_bias):
    x, weight, bias = make(0, ROWS, IN), make(1, OUT, IN) / 8, make(2, OUT)
    output = policy.output_format
    result = linear_product(
        x, weight, bias if with_bias else None, formats=ProductFormats.of(policy)
    )
    left = reference_operand(x.numpy(), policy.forward, policy.scaling, 1)
    right = reference_operand(weight.numpy(), policy.forward, policy.scaling, 1)
    added = OUTPUTS[output][0](bias.numpy()) if with_bias else np.zeros(OUT)
    assert_is_product(result, left, right.T, output, bias=added)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_both_backward_products_have_their_own_formats(policy):
    x = make(3, ROWS, IN).requires_grad_()
    weight = (make(4, OUT, IN) / 8).requires_grad_()
    bias = make(5, OUT).requires_grad_()
    grad = make(6, ROWS, OUT)
    output, scaling = policy.output_format, policy.scaling
    linear_product(x, weight, bias, formats=ProductFormats.of(policy)).backward(grad)
    arrived = OUTPUTS[output][0](grad.numpy())  # what comes back has the format of what went out
    values, weights = x.detach().numpy(), weight.detach().numpy()
    name = policy.grad_input
    left = reference_operand(arrived, name, scaling, 1)
    right = reference_operand(weights, beside(policy, name), scaling, 0)
    assert_is_product(x.grad, left, right, output)
    name = policy.grad_weight
    left = reference_operand(arrived, name, scaling, 0)
    right = reference_operand(values, beside(policy, name), scaling, 0)
    assert_is_product(weight.grad, left.T, right, output)
    assert_is_product(bias.grad, np.ones((1, ROWS)), arrived, output)


@pytest.mark.parametrize("shape", [(IN,), (3, IN), (2, 3, IN), (2, 1, 3, IN), (0, IN), (2, 0, IN)])
@pytest.mark.parametrize("policy", ["bf16", "fp8-row", "mxfp8", "fp8-tensor"])
def test_any_number_of_leading_dimensions_gives_the_same_rows(shape, policy):
    formats = ProductFormats.of(POLICIES[policy])
    x, weight, bias = make(0, *shape).requires_grad_(), make(1, OUT, IN), make(2, OUT)
    result = linear_product(x, weight, bias, formats=formats)
    flat = linear_product(x.detach().reshape(-1, IN), weight, bias, formats=formats)
    assert result.shape == (*shape[:-1], OUT)
    assert torch.equal(result.reshape(-1, OUT), flat)
    result.sum().backward()
    assert x.grad.shape == shape


def test_an_empty_batch_passes_through_delayed_scaling():
    policy = Policy(forward="e4m3", grad_input="e5m2", grad_weight="e5m2", scaling="delayed")
    history = remembering(policy)
    x = torch.zeros(0, IN, requires_grad=True)
    result = linear_product(
        x, make(1, OUT, IN), None, formats=ProductFormats.of(policy), history=history
    )
    result.sum().backward()
    assert result.shape == (0, OUT)


def test_operands_need_not_be_contiguous():
    formats = ProductFormats.of(POLICIES["fp8-row"])
    x, weight = make(0, IN, ROWS).t(), make(1, IN, 2 * OUT).t()[::2]
    grad = make(2, OUT, ROWS).t()
    results = []
    for a, w, g in ((x, weight, grad), (x.contiguous(), weight.contiguous(), grad.contiguous())):
        left, right = a.detach().requires_grad_(), w.detach().requires_grad_()
        result = linear_product(left, right, None, formats=formats)
        result.backward(g)
        results.append((result, left.grad, right.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("which", [0, 1, 2])
def test_only_the_gradients_that_are_asked_for_are_computed(which):
    tensors = [make(i, *shape) for i, shape in enumerate([(ROWS, IN), (OUT, IN), (OUT,)])]
    alone = [t.clone().requires_grad_(i == which) for i, t in enumerate(tensors)]
    together = [t.clone().requires_grad_() for t in tensors]
    formats = ProductFormats.of(POLICIES["fp8-tensor"])
    for operands in (alone, together):
        linear_product(*operands, formats=formats).sum().backward()
    assert torch.equal(alone[which].grad, together[which].grad)
    assert all(t.grad is None for i, t in enumerate(alone) if i != which)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stream_keeps_its_dtype_where_that_can_hold_the_result(dtype):
    x = make(0, ROWS, IN).to(dtype).requires_grad_()
    result = linear_product(x, make(1, OUT, IN), None, formats=ProductFormats.of(POLICIES["bf16"]))
    assert result.dtype == dtype
    result.sum().backward()
    assert x.grad.dtype == dtype


def test_a_bf16_stream_has_the_values_of_the_fp32_stream():
    x, weight = make(0, ROWS, IN).bfloat16(), make(1, OUT, IN).bfloat16()
    formats = ProductFormats.of(POLICIES["bf16"])
    wide = linear_product(x.float(), weight.float(), None, formats=formats)
    assert torch.equal(linear_product(x, weight, None, formats=formats).float(), wide)


def test_an_fp32_result_is_not_squeezed_into_a_bf16_stream():
    x = make(0, ROWS, IN).bfloat16()
    formats = ProductFormats.of(POLICIES["fp32 output"])
    assert linear_product(x, make(1, OUT, IN), None, formats=formats).dtype == torch.float32


def test_fp32_products_equal_torchs_own_with_their_gradients():
    operands = [make(i, *shape) for i, shape in enumerate([(ROWS, IN), (OUT, IN), (OUT,)])]
    mine = [t.clone().requires_grad_() for t in operands]
    torchs = [t.clone().requires_grad_() for t in operands]
    grad = make(9, ROWS, OUT)
    linear_product(*mine, formats=ProductFormats.of(Policy())).backward(grad)
    F.linear(*torchs).backward(grad)
    for a, b in zip(mine, torchs, strict=True):
        allowed = IN * 2.0**-24 * float(b.grad.abs().max()) * 4
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=allowed)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("policy", ["fp8-tensor", "fp8-row", "mxfp8", "bf16"])
def test_what_is_not_finite_is_never_hidden_by_saturation(policy, bad):
    x = make(0, ROWS, IN)
    x[3, 5] = bad
    result = linear_product(x, make(1, OUT, IN), None, formats=ProductFormats.of(POLICIES[policy]))
    assert not result[3].isfinite().any()


def test_scales_by_row_confine_what_is_not_finite_to_its_row():
    x = make(0, ROWS, IN)
    x[3, 5] = float("inf")
    formats = ProductFormats.of(POLICIES["fp8-row"])
    result = linear_product(x, make(1, OUT, IN), None, formats=formats)
    assert result[torch.arange(ROWS) != 3].isfinite().all()


DELAYED = Policy(forward="e4m3", grad_input="e5m2", grad_weight="e5m2", scaling="delayed")


def remembering(policy=None):
    """The memory of one layer."""
    formats = ProductFormats.of(policy or DELAYED)
    return AmaxHistories([formats], torch.device("cpu")).of(0)


def applied(history):
    history.whole.advance(torch.tensor(True))


def delayed_product(x, history, policy=DELAYED):
    return linear_product(
        x, make(1, OUT, IN), None, formats=ProductFormats.of(policy), history=history
    )


def test_the_first_delayed_product_scales_by_its_own_values():
    x = make(0, ROWS, IN)
    history = remembering()
    now = linear_product(
        x, make(1, OUT, IN), None, formats=ProductFormats.of(POLICIES["fp8-tensor"])
    )
    assert torch.equal(delayed_product(x, history), now)


def test_delayed_scales_come_from_the_largest_of_the_last_sixteen_steps():
    history = remembering()
    amaxes = [2.0**-i for i in range(20)]
    for i, amax in enumerate(amaxes):
        delayed_product(torch.full((1, IN), amax), history)
        applied(history)
        seen = amaxes[max(0, i - 15) : i + 1]
        assert history.amax[0].max() == max(seen)
        assert history.amax[0, 0] == amax


def test_values_beyond_what_the_past_foretold_saturate_under_delayed_scaling():
    history = remembering()
    delayed_product(torch.ones(1, IN), history)
    applied(history)
    weight = torch.zeros(OUT, IN)
    weight[0, 0] = 1.0
    sudden = linear_product(
        torch.full((1, IN), 1e6),
        weight,
        None,
        formats=ProductFormats.of(DELAYED),
        history=history,
    )
    assert sudden[0, 0] == 448 / 256  # the scale for an amax of 1 is 256


def test_evaluation_leaves_the_history_alone():
    history = remembering()
    with torch.no_grad():
        delayed_product(make(0, ROWS, IN), history)
    applied(history)
    assert not history.amax[0].any()


def test_a_bad_batch_is_not_remembered_in_the_history():
    history = remembering()
    delayed_product(torch.ones(1, IN), history)
    applied(history)
    delayed_product(torch.full((1, IN), float("inf")), history)
    applied(history)
    assert history.amax.isfinite().all()
    assert history.amax[0].max() == 1


def test_a_skipped_step_leaves_no_trace_in_the_history():
    history = remembering()
    delayed_product(torch.ones(1, IN), history)
    applied(history)
    before = {key: value.clone() for key, value in history.whole.state_dict().items()}
    delayed_product(torch.full((1, IN), 1e6), history)
    history.whole.advance(torch.tensor(False))
    assert all(torch.equal(before[key], now) for key, now in history.whole.state_dict().items())


def test_all_micro_batches_of_a_step_have_one_scale():
    history = remembering()
    delayed_product(torch.ones(1, IN), history)
    first = history.scale_inv("input").clone()
    delayed_product(torch.full((1, IN), 1e-3), history)
    delayed_product(torch.full((1, IN), 1e3), history)
    assert torch.equal(history.scale_inv("input"), first)
    applied(history)
    assert history.amax[0, 0] == 1e3


@pytest.mark.parametrize("grad_weight", ["e4m3", "bf16", "e5m2"])
@pytest.mark.parametrize("grad_input", ["e4m3", "bf16", "e5m2"])
@pytest.mark.parametrize("forward", ["e4m3", "mxfp8", "bf16"])
def test_delayed_scales_fit_the_format_of_each_product(forward, grad_input, grad_weight):
    policy = Policy(
        forward=forward, grad_input=grad_input, grad_weight=grad_weight, scaling="delayed"
    )
    history = remembering(policy)
    x, weight = make(0, ROWS, IN).requires_grad_(), make(1, OUT, IN).requires_grad_()
    grad = make(2, ROWS, OUT)
    for _ in range(2):
        applied(history)
        x.grad = weight.grad = None
        formats = ProductFormats.of(policy)
        linear_product(x, weight, None, formats=formats, history=history).backward(grad)
    for actual, exact in ((x.grad, grad @ weight), (weight.grad, grad.t() @ x)):
        # Two operands of at least two mantissa bits each: an eighth apiece, whatever the signs.
        assert (actual - exact).norm() < 2 * 2.0**-3 * exact.norm()


@pytest.mark.parametrize("target", [BF16, FP16, TF32], ids=lambda f: f.name)
@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (torch.matmul, [(3, 8, 16), (16, 4)]),
        (torch.bmm, [(3, 8, 16), (3, 16, 4)]),
        (F.conv1d, [(2, 4, 9), (6, 4, 3)]),
        (F.conv_transpose1d, [(2, 4, 9), (4, 6, 3)]),
    ],
    ids=["matmul", "bmm", "conv1d", "conv_transpose1d"],
)
def test_any_product_is_computed_from_rounded_operands_and_rounded_gradients(
    function, shapes, target
):
    rounding = {"bf16": rounded_bf16, "fp16": rounded_fp16, "tf32": rounded_tf32}[target.name]
    output = (rounded_fp32, 2.0**-24) if target is TF32 else OUTPUTS[target.name]
    operands = [make(i, *shape).requires_grad_() for i, shape in enumerate(shapes)]
    result = rounded_call(function, tuple(operands), {}, target)
    grad = make(7, *result.shape)
    result.backward(grad)
    exact = [torch.from_numpy(rounding(t.detach().numpy())).requires_grad_() for t in operands]
    reference = function(*exact)
    reference.backward(torch.from_numpy(rounding(grad.numpy())))
    pairs = [(result, reference), *((a.grad, b.grad) for a, b in zip(operands, exact, strict=True))]
    for actual, wanted in pairs:
        # At most 72 terms of magnitude below 16 each are summed in fp32, then rounded once.
        allowed = output[1] * wanted.detach().abs() + 72 * 72 * 16 * 2.0**-24
        assert ((actual.detach().double() - wanted.detach()).abs() <= allowed).all()
        on_grid = output[0](actual.detach().numpy())
        assert np.array_equal(on_grid, actual.detach().double().numpy())


def test_a_product_writes_where_it_is_told_to():
    a, b, out = make(0, 4, 4), make(1, 4, 4), torch.zeros(4, 4)
    result = rounded_call(torch.mm, (a, b), {"out": out}, BF16)
    assert result is out
    assert torch.equal(out, rounded_call(torch.mm, (a, b), {}, BF16))


def test_integers_and_flags_pass_through_a_rounded_call():
    mask = torch.ones(2, 2, dtype=torch.bool).tril()
    q = make(0, 1, 2, 16)
    masked = rounded_call(F.scaled_dot_product_attention, (q, q, q), {"attn_mask": mask}, FP16)
    causal = rounded_call(F.scaled_dot_product_attention, (q, q, q), {"is_causal": True}, FP16)
    # The same sums in another order, then one rounding to fp16.
    torch.testing.assert_close(masked, causal, rtol=2.0**-10, atol=2.0**-20)


def test_fp32_is_a_format_that_rounds_nothing():
    x = make(0, ROWS, IN)
    weight = make(1, OUT, IN)
    result = linear_product(x, weight, None, formats=ProductFormats.of(Policy()))
    assert result.dtype == FP32.dtype
    assert torch.equal(result, x @ weight.t())


def test_a_block_of_128_has_a_scale_of_its_own_and_a_weight_one_a_square():
    policy = Policy(forward="e4m3", grad_input="e4m3", grad_weight="e4m3", scaling="block")
    x, weight = make(0, 256, 256), make(1, 128, 256)
    x[:, :128] *= 1e-4  # beside values 10⁴ times larger, one scale would flush all of these
    formats = ProductFormats.of(policy)
    blocks = x.reshape(256, 2, 128)
    expected_x = quantize(blocks, numerics.E4M3, per="row").reshape(256, 256)
    tiles = torch.stack([quantize(tile, numerics.E4M3) for tile in weight.split(128, dim=1)])
    expected_weight = torch.cat(list(tiles), dim=1)
    result = linear_product(x, weight, None, formats=formats)
    exact = expected_x.double() @ expected_weight.double().t()
    assert (result.double() - exact).abs().max() <= 2.0**-8 * exact.abs().max()


@pytest.mark.parametrize("function", [F.linear, lambda x, w: torch.mm(x, w.t())])
def test_a_compiled_product_has_the_gradients_of_the_eager_one_in_any_version(function):
    """Torch 2.11 traces autograd functions like ours and makes every gradient zero."""
    torch.manual_seed(0)
    x, w = (torch.randn(n, 8, requires_grad=True) for n in (4, 5))
    found = []
    for run in (function, torch.compile(function, backend="eager")):
        with EmulatedProducts(BF16):
            loss = run(x, w).square().sum()
        found.append(torch.autograd.grad(loss, [x, w]))
    for eager, compiled in zip(*found, strict=True):
        assert eager.abs().max() > 0
        assert torch.equal(eager, compiled)


POWERS = {
    "h ** 2": lambda h: h**2, "h ** h": lambda h: (h.abs() + 1) ** h, "2 ** h": lambda h: 2**h,
    "h.pow(2)": lambda h: h.pow(2), "torch.pow": lambda h: torch.pow(h, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", POWERS)
@pytest.mark.parametrize("policy", ["fp16", "tf32", "bf16"])
def test_powers_are_compiled_however_they_are_written(policy, name):
    """A compiler first says of the function behind `**` that it is in no table, then that it is."""
    torch.manual_seed(0)
    model, x, power = nn.Linear(16, 8), torch.randn(4, 16), POWERS[name]
    run = nc.prepare(model, SGD(model.parameters(), lr=0.1), policy=policy, emulate=True)
    torch._dynamo.reset()

    def loss_of(x):
        return power(model(x)).float().mean()

    found = []
    for each in (loss_of, torch.compile(loss_of, backend="aot_eager")):
        with run.autocast():
            loss = each(x)
        found.append((loss, *torch.autograd.grad(loss, model.parameters())))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("policy", ["bf16", "fp16", "fp8-delayed"])
def test_rows_of_several_lengths_are_those_of_one_after_the_other(policy):
    torch.manual_seed(0)
    rows = [torch.randn(length, IN) for length in (3, 7)]
    model = nn.Linear(IN, OUT)
    run = nc.prepare(model, SGD(model.parameters(), lr=0.1), policy=policy, emulate=True)
    given = torch.nested.nested_tensor(rows, layout=torch.jagged)
    with run.autocast():
        together = model(torch.cat(rows))
        found = model(given)
    assert torch.equal(found.values(), together)
    assert torch.equal(found.offsets(), given.offsets())
    turned = given.unflatten(-1, (1, IN)).transpose(1, 2)  # torch takes none of these either
    with (
        pytest.raises(UnsupportedError, match="differ in dimension 1, got dimension 2"),
        run.autocast(),
    ):
        model(turned)
    assert run.step(found.values().float().square().mean()).applied


@pytest.mark.parametrize("native", [False, True])
def test_expert_products_run_in_the_policy_format(native):
    generator = torch.Generator().manual_seed(0)
    x, weights = (torch.randn(*shape, generator=generator) for shape in ((16, 32), (2, 32, 64)))
    ends = torch.tensor([8, 16], dtype=torch.int32)
    region = Region("bf16", not native, "cpu")
    with Pass(RegionEntry(region, PreparedModel(nn.Linear(2, 2)))):
        inside = F.grouped_mm(x, weights, offs=ends)
    rows, experts = (rounded_bf16(t.numpy()) for t in (x, weights))
    exact = np.concatenate([rows[:8] @ experts[0], rows[8:] @ experts[1]])
    np.testing.assert_allclose(inside.float().numpy(), exact, rtol=2.0**-8, atol=2.0**-16)
    assert F.grouped_mm(x, weights, offs=ends).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert F.grouped_mm(x, weights, offs=ends).dtype == torch.float32
