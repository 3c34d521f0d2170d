"""Scale, cast and transpose, against ml_dtypes' rounding and torch's GELU in float64."""

import functools
from contextlib import contextmanager

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis.strategies import integers, sampled_from
from torch._subclasses import FakeTensorMode

from narrowcast.kernels import fp8
from narrowcast.kernels.fp8 import DECIDED, Quantized, quantize, quantize_into, scale_inv_for
from narrowcast.kernels.launch import interpreted
from narrowcast.numerics import E4M3, E5M2, scale_for

DEVICE = "cpu" if interpreted() else "cuda"
FORMATS = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2}
TARGETS = list(FORMATS)
THEIRS = {
    torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn,
    torch.float8_e5m2: ml_dtypes.float8_e5m2,
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
IMPLEMENTATIONS = ["kernel", "plain"]


@contextmanager
def by(how):
    """Let the kernel or its plain twin do the work."""
    with pytest.MonkeyPatch.context() as patch:
        if how == "plain":
            patch.setattr(fp8, "unsupported_reason", lambda device: "the plain twin was asked for")
        yield


def number(value):
    """A scale on the device, of which nobody has heard yet."""
    made = torch.tensor([value], device=DEVICE)
    DECIDED.remove({made.data_ptr()})
    return made


def trusted(value):
    made = number(value)
    DECIDED.add(made)
    return made


def codes(x):
    return x.cpu().view(torch.uint8)


def rounded(x, target, inverse):
    """The codes by ml_dtypes, of a matrix divided by a power of two, which is exact in float64."""
    top = FORMATS[target].largest
    scaled = np.clip(x.detach().cpu().double().numpy() / float(inverse), -top, top)
    return torch.from_numpy(scaled.astype(np.float32).astype(THEIRS[target]).view(np.uint8))


def assert_codes(found, x, target, inverse):
    """Compare every code; of NaNs only that they are some."""
    finite = x.cpu().isfinite()
    expected = rounded(x, target, inverse)
    assert torch.equal(codes(found)[finite], expected[finite])
    assert found.cpu().float()[~finite].isnan().all()


def any_bits(rows, columns, *, dtype, seed):
    """Floats of every exponent and sign, subnormal ones too, none that is not finite."""
    kinds = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 2**32, (rows, columns), generator=generator)
    x = bits.to(torch.int32).to(kinds[dtype]).view(dtype)
    return readable(torch.where(x.isfinite(), x, 0.0)).to(DEVICE)


def readable(x):
    """Triton's interpreter, not a GPU, takes a subnormal bf16 for zero: then let it be one."""
    lost = x.dtype == torch.bfloat16 and DEVICE == "cpu"
    return torch.where(x.float().abs() < 2.0**-126, 0.0, x) if lost else x


def normal(rows, columns, *, dtype=torch.float32, seed=0, spread=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, columns, generator=generator) * spread).to(dtype).to(DEVICE)


# What the interpreter multiplies in numpy may overflow, as on a GPU, and says so.
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("how", IMPLEMENTATIONS)
@pytest.mark.parametrize("target", TARGETS)
@settings(max_examples=8)
@given(
    seed=integers(0, 2**31),
    rows=integers(1, 40),
    sixteens=integers(1, 6),
    dtype=sampled_from(DTYPES),
    power=integers(-30, 30),
)
def test_codes_are_ml_dtypes_rounding_of_the_scaled_matrix(
    how, target, seed, rows, sixteens, dtype, power
):
    """Of values around one, and with a scale from outside of values of any size at all."""
    with by(how):
        x = normal(rows, 16 * sixteens, dtype=dtype, seed=seed, spread=2.0 ** (power % 8))
        found = quantize(x, target)
        assert_codes(found.rowwise[:rows], x, target, found.scale_inv)
        wild, inverse = any_bits(rows, 16 * sixteens, dtype=dtype, seed=seed), trusted(2.0**power)
        found = quantize(wild, target, scale_inv=inverse)
    assert_codes(found.rowwise[:rows], wild, target, inverse)


@pytest.mark.parametrize("how", IMPLEMENTATIONS)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("power", [0, -9, 17])
def test_every_value_every_tie_and_their_neighbours_round_as_ml_dtypes_does(how, target, power):
    every = np.arange(128, dtype=np.uint8).view(THEIRS[target]).astype(np.float32)
    values = np.sort(every[np.isfinite(every)])
    ties = (values[1:] + values[:-1]) / 2
    points = np.concatenate([values, ties, [values[-1] * 1.05, values[-1] * 9]])
    points = points.astype(np.float32)
    points = np.concatenate([points, np.nextafter(points, np.inf), np.nextafter(points, 0)])
    points = np.concatenate([points, -points]).astype(np.float32)
    x = torch.from_numpy(np.resize(points, (-(-points.size // 48), 48))) * 2.0**power
    with by(how):
        found = quantize(x.to(DEVICE), target, scale_inv=trusted(2.0**power))
    assert_codes(found.rowwise[: len(x)], x, target, 2.0**power)
    zeros = x == 0
    assert torch.equal(codes(found.rowwise[: len(x)])[zeros] == 0x80, x.signbit()[zeros])


@pytest.mark.parametrize("how", IMPLEMENTATIONS)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_becomes_nan_and_leaves_its_neighbours_alone(how, target, bad):
    x = normal(5, 32)
    x[3, 17] = bad
    with by(how):
        own = quantize(x, target)
        given_scale = quantize(x, target, scale_inv=trusted(2.0**-3))
    assert own.scale_inv.item() == 1  # nothing can be known of the scale
    for found in (own, given_scale):
        assert_codes(found.rowwise[:5], x, target, found.scale_inv)
        assert found.columnwise.float().isnan().sum() == 1


@pytest.mark.parametrize("how", IMPLEMENTATIONS)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("rows", [1, 16, 131])
@pytest.mark.parametrize("columns", [16, 144])
def test_the_layouts_are_each_other_transposed_and_filled_up_with_zeros(how, target, rows, columns):
    x = normal(rows, columns, dtype=torch.bfloat16)
    with by(how):
        found = quantize(x, target)
    padded = -(-rows // 16) * 16
    assert found.rowwise.shape == (padded, columns)
    assert found.columnwise.shape == (columns, padded)
    assert found.rowwise.is_contiguous()
    assert found.columnwise.is_contiguous()
    assert torch.equal(codes(found.rowwise), codes(found.columnwise).t())
    assert (codes(found.rowwise)[rows:] == 0).all()
    assert_codes(found.rowwise[:rows], x, target, found.scale_inv)


@pytest.mark.parametrize("how", IMPLEMENTATIONS)
def test_a_layout_that_is_not_asked_for_is_empty_and_changes_nothing_in_the_other(how):
    x = normal(20, 48)
    with by(how):
        both = quantize(x, torch.float8_e4m3fn)
        alone = quantize(x, torch.float8_e4m3fn, columnwise=False)
        turned = quantize(x, torch.float8_e4m3fn, rowwise=False)
    assert alone.columnwise.numel() == turned.rowwise.numel() == 0
    assert torch.equal(codes(alone.rowwise), codes(both.rowwise))
    assert torch.equal(codes(turned.columnwise), codes(both.columnwise))


@pytest.mark.parametrize("how", IMPLEMENTATIONS)
def test_a_matrix_that_lies_otherwise_in_memory_is_read_as_what_it_is(how):
    x = normal(48, 20)
    with by(how):
        found, plain = quantize(x.t(), E4M3.dtype), quantize(x.t().contiguous(), E4M3.dtype)
    assert torch.equal(codes(found.rowwise), codes(plain.rowwise))


@pytest.mark.parametrize("how", IMPLEMENTATIONS)
def test_a_matrix_without_rows_gives_none(how):
    with by(how):
        found = quantize(torch.empty(0, 32, device=DEVICE), torch.float8_e5m2)
    assert (found.rowwise.shape, found.columnwise.shape, found.scale_inv.item()) == (
        (0, 32),
        (32, 0),
        1,
    )


@pytest.mark.parametrize("how", IMPLEMENTATIONS)
@pytest.mark.parametrize("target", TARGETS)
@settings(max_examples=10)
@given(bits=integers(0, 0x7F7FFFFF), dtype=sampled_from(DTYPES))
def test_the_scale_is_the_one_that_numerics_gives(how, target, bits, dtype):
    amax = torch.tensor(bits, dtype=torch.int32).view(torch.float32).to(dtype)
    x = torch.zeros(2, 16, dtype=dtype)
    x[1, 3] = -readable(amax)
    with by(how):
        inverse = quantize(x.to(DEVICE), target).scale_inv.item()
    # One power less than numerics allows: so that the inverse is a normal number.
    scale = min(scale_for(x.float(), FORMATS[target]).item(), 2.0**126)
    assert inverse == 1 / scale


@settings(max_examples=100)
@given(bits=integers(1, 0x7F7FFFFF), target=sampled_from(TARGETS))
def test_the_scale_of_a_magnitude_is_the_largest_power_of_two_that_keeps_it(bits, target):
    amax = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    top = FORMATS[target].largest
    inverse = scale_inv_for(amax, top).double().item()
    assert np.frexp(inverse)[0] == 0.5
    assert amax.double().item() / inverse <= top
    assert amax.double().item() / (inverse / 2) > top or inverse == 2.0**-126


@pytest.mark.pairwise
@pytest.mark.parametrize("how", IMPLEMENTATIONS)
@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_magnitude_is_noted_as_bits_and_only_grows(how, calibrated, dtype):
    notes = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    largest = 0.0
    with by(how):
        for spread in (1.0, 4.0, 0.5, 0.0, 8.0):
            x = normal(21, 80, dtype=dtype, spread=spread)
            quantize(
                x, E4M3.dtype, scale_inv=trusted(1.0) if calibrated else None, cast_stats=notes
            )
            largest = max(largest, x.float().abs().max().item())
            assert notes[:1].view(torch.float32).item() == largest


@pytest.mark.parametrize("how", IMPLEMENTATIONS)
@pytest.mark.parametrize("target", TARGETS)
def test_the_first_matrix_sets_a_scale_and_later_ones_keep_it_and_saturate(how, target):
    inverse = number(0.0)
    small, large = normal(16, 32), normal(16, 32, spread=2.0**10)
    with by(how):
        first = quantize(small, target, scale_inv=inverse)
        assert first.scale_inv is inverse
        own = 1 / scale_for(small, FORMATS[target]).item()
        assert inverse.item() == own
        later = quantize(large, target, scale_inv=inverse)
    assert inverse.item() == own
    assert_codes(first.rowwise, small, target, own)
    assert_codes(later.rowwise, large, target, own)
    assert later.rowwise.float().abs().max() == FORMATS[target].largest


@pytest.mark.parametrize("how", IMPLEMENTATIONS)
def test_a_trusted_scale_is_used_as_it_is_and_a_distrusted_one_is_set_anew(how):
    inverse, x = trusted(2.0**3), normal(16, 32)
    own = 1 / scale_for(x, E4M3).item()
    with by(how):
        quantize(x, E4M3.dtype, scale_inv=inverse)
        assert inverse.item() == 2.0**3
        DECIDED.remove({inverse.data_ptr()})
        quantize(x, E4M3.dtype, scale_inv=inverse)
    assert inverse.item() == own != 2.0**3


@pytest.mark.parametrize("how", IMPLEMENTATIONS)
@pytest.mark.parametrize("by_itself", [False, True])
def test_quantising_into_what_exists_uses_its_memory_and_its_scale_or_a_new_one(how, by_itself):
    with by(how):
        into = quantize(normal(16, 32), torch.float8_e4m3fn)
        DECIDED.add(into.scale_inv)
        before, places = into.scale_inv.item(), [t.data_ptr() for t in into]
        x = normal(16, 32, seed=1, spread=2.0**6)
        notes = torch.zeros(4, dtype=torch.int32, device=DEVICE)
        quantize_into(into, x, cast_stats=notes, by_itself=by_itself)
    own = 1 / scale_for(x, E4M3).item()
    assert before != own
    assert into.scale_inv.item() == (own if by_itself else before)
    assert [t.data_ptr() for t in into] == places
    assert_codes(into.rowwise, x, torch.float8_e4m3fn, into.scale_inv)
    assert torch.equal(codes(into.rowwise), codes(into.columnwise).t())
    assert notes[:1].view(torch.float32).item() == x.abs().max().item()
    DECIDED.remove({into.scale_inv.data_ptr()})


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("how", IMPLEMENTATIONS)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("power", [-20, 0, 9])
def test_what_a_cast_loses_is_counted(how, target, power):
    x = any_bits(100, 64, dtype=torch.float32, seed=power)  # of one tile: all of it is looked at
    x[0, :3] = torch.tensor([float("inf"), float("nan"), 0.0])
    notes = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    with by(how):
        for _ in range(2):  # they add up
            quantize(x, target, scale_inv=trusted(2.0**power), cast_stats=notes)
    scaled = x[x.isfinite()].double().cpu() / 2.0**power
    rounded_to = scaled.clamp(-1e6, 1e6).float().numpy().astype(THEIRS[target])
    saturated = (scaled.abs() > FORMATS[target].largest).sum().item()
    flushed = (torch.from_numpy(rounded_to.astype(np.float32)) == 0) & (scaled != 0)
    assert notes[1:].tolist() == [2 * x.numel(), 2 * saturated, 2 * flushed.sum().item()]
    assert saturated > 100
    assert flushed.sum() > 100


def test_a_kernel_looks_at_about_one_value_in_seven_and_finds_the_same_share():
    x = normal(512, 512, dtype=torch.bfloat16)
    found = []
    for how in IMPLEMENTATIONS:
        notes = torch.zeros(4, dtype=torch.int32, device=DEVICE)
        with by(how):
            quantize(x, E4M3.dtype, scale_inv=trusted(2.0**-8), cast_stats=notes)
        found.append(notes.tolist())
    (amax, looked, *lost), (exact_amax, every, *all_lost) = found
    assert amax == exact_amax
    assert looked == pytest.approx(every / 7, rel=0.1)
    for a, b in zip(lost, all_lost, strict=True):
        # Of independent values: within six deviations of their number.
        share = b / every * looked
        assert abs(a - share) <= 6 * share**0.5


def activated(x, beside, activation):
    """torch's own, in float64."""
    if activation == "gelu":
        return F.gelu(x.double())
    wide = beside.double().requires_grad_()
    return torch.autograd.grad(F.gelu(wide), wide, x.double())[0]


# erf by Abramowitz and Stegun 7.1.26 is off by 1.5e-7 at most, about 2⁻²²·⁷, of which half enters;
# the roundings of fp32, and of a GPU's own reciprocal and power, stay below a few 2⁻²³.
ERF = 2.0**-20


@pytest.mark.parametrize("how", IMPLEMENTATIONS)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("activation", ["gelu", "gelu_backward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_activation_is_torchs_to_within_one_rounding(how, target, activation, dtype):
    x = normal(37, 144, dtype=dtype, spread=2.0)
    beside = normal(37, 144, dtype=dtype, seed=1, spread=2.0)
    notes = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    with by(how):
        found = quantize(x, target, activation=activation, second=beside, cast_stats=notes)
    exact = activated(x, beside, activation)
    value = found.rowwise[:37].double() * found.scale_inv.double()
    # Half of what lies between two values of the format, and what the function itself may be off.
    form, inverse = FORMATS[target], found.scale_inv.double()
    size = torch.maximum(value.abs(), exact.abs()).clamp(min=form.smallest_normal * inverse)
    half = torch.exp2(torch.floor(torch.log2(size))) * form.epsilon / 2
    assert ((value - exact).abs() <= half + ERF * x.double().abs()).all()
    assert torch.equal(codes(found.rowwise), codes(found.columnwise).t())
    assert (codes(found.rowwise)[37:] == 0).all()
    noted = notes[:1].view(torch.float32).double().item()
    assert noted == pytest.approx(exact.abs().max().item(), abs=ERF * x.abs().max().item())


def both(x, target, **settings):
    found = []
    for how in IMPLEMENTATIONS:
        with by(how):
            found.append(quantize(x, target, **settings))
    return found


@pytest.mark.parametrize("target", TARGETS)
@settings(max_examples=10)
@given(
    seed=integers(0, 2**31), rows=integers(1, 140), sixteens=integers(1, 9),
    dtype=sampled_from(DTYPES),
)  # fmt: skip
def test_the_kernel_and_its_twin_agree_bit_for_bit(target, seed, rows, sixteens, dtype):
    x = any_bits(rows, 16 * sixteens, dtype=dtype, seed=seed)
    kernel, plain = both(x, target)
    for a, b in zip(kernel, plain, strict=True):
        assert torch.equal(a.cpu().view(torch.uint8), b.cpu().view(torch.uint8))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("activation", ["gelu", "gelu_backward"])
def test_with_an_activation_the_kernel_and_its_twin_differ_rarely_and_by_one_code(
    target, activation
):
    x, beside = normal(70, 144, spread=2.0), normal(70, 144, seed=1, spread=2.0)
    kernel, plain = both(x, target, activation=activation, second=beside)
    assert kernel.scale_inv.item() == plain.scale_inv.item()
    form, inverse = FORMATS[target], kernel.scale_inv.double().cpu()
    values = [q.rowwise[:70].double().cpu() * inverse for q in (kernel, plain)]
    apart, size = (values[0] - values[1]).abs(), values[1].abs()
    step = torch.exp2(torch.floor(torch.log2(size.clamp(min=form.smallest_normal * inverse))))
    # Neighbours; below ERF · |x|, where e5m2 still has many values, both are right and no more.
    error = 2 * ERF * x.double().abs().cpu()
    assert (apart <= step * form.epsilon + error).all()
    # Only a value that near to a tie can go the other way: of those that the error is small
    # against, at most as many as its share of a step.
    large = size > 64 * error / form.epsilon
    assert large.float().mean() > 0.9
    assert (apart[large] > 0).float().mean() <= 2 / 64


def operator(x, target, inverse):
    """The operator for a scale that is given, or for one of the matrix's own."""
    ops = torch.ops.narrowcast
    if inverse is None:
        return functools.partial(ops.quantize_fp8, x, target)
    return functools.partial(ops.quantize_fp8_by, x, target, inverse)


def call(x, target, inverse, notes):
    return quantize(x, target, scale_inv=inverse, cast_stats=notes)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("scale", [None, 2.0**-4])
def test_the_operator_and_a_traced_call_are_the_direct_call(target, scale):
    torch._dynamo.reset()
    x = normal(21, 48, dtype=torch.bfloat16)

    def arguments():
        notes = torch.zeros(4, dtype=torch.int32, device=DEVICE)
        return x, target, None if scale is None else trusted(scale), notes

    direct_with, op_with, traced_with = arguments(), arguments(), arguments()
    direct = call(*direct_with)
    op = operator(*op_with[:3])(op_with[3], True, True, "", None)
    traced = torch.compile(call, backend="eager", fullgraph=True)(*traced_with)
    assert isinstance(traced, Quantized)
    for a, b, c in zip(direct[:2], op, traced, strict=False):
        assert torch.equal(codes(a), codes(b))
        assert torch.equal(codes(a), codes(c))
    assert traced.scale_inv.item() == direct.scale_inv.item()
    assert op_with[3].tolist() == traced_with[3].tolist() == direct_with[3].tolist()
    assert direct_with[3][0] > 0


@pytest.mark.pairwise
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("shape", [(21, 48), (16, 16), (0, 32)])
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_fake_tensors_have_the_shapes_of_real_ones(target, shape, rows, columns, scaled):
    x, how = torch.ones(shape), (None, rows, columns, "", None)
    real = operator(x, target, torch.ones(1) if scaled else None)(*how)
    with FakeTensorMode() as mode:
        inverse = mode.from_tensor(torch.ones(1)) if scaled else None
        fake = operator(mode.from_tensor(x), target, inverse)(*how)
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
