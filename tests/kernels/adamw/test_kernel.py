"""The fused kernel against its twin, torch's AdamW, exact bits and the laws of chance."""

import copy
import dataclasses
import itertools
import math

import pytest
import torch

from narrowcast.errors import UnsupportedError
from narrowcast.kernels.adamw.kernel import AdamKernel, Tiling
from narrowcast.kernels.adamw.twin import (
    AdamTwin,
    Hyper,
    Weight,
    decode,
    encode,
    mix,
    random_bits,
    randomly,
)
from narrowcast.kernels.launch import interpreted
from narrowcast.numerics.rounding import join, split
from narrowcast.precision.weights.master import WeightAverage

DEVICE = torch.device("cpu" if interpreted() else "cuda")
SIZES = (0, 1, 17, 256, 512, 777)
MOMENTS = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
ADAMW = Hyper(lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, decoupled=True)
SHARE = 1 - 0.9
ADAM = dataclasses.replace(ADAMW, betas=(0.8, 0.95), decoupled=False)
MAKES = [
    (dtype, master, moments)
    for dtype, masters in (
        (torch.float32, ("none",)),
        (torch.bfloat16, ("none", "fp32", "split", "kahan", "stochastic")),
        (torch.float16, ("fp32", "kahan", "stochastic")),
    )
    for master, moments in itertools.product(masters, MOMENTS)
]


def weight_of(full, dtype, master, moments, *, group=0):
    weight, beside = full.to(dtype), None
    match master:
        case "split":
            weight, beside = split(full)
        case "fp32":
            beside = full.clone()
        case "kahan":
            beside = (full - weight.float()).to(dtype)
    first = torch.zeros_like(full, dtype=MOMENTS[moments])
    second = torch.zeros_like(full, dtype=torch.uint8 if moments == "int8" else first.dtype)
    scales = [None, None]
    if moments == "int8":
        scales = [torch.zeros(-(-full.numel() // 256), device=full.device) for _ in range(2)]
    return Weight(
        weight=weight,
        master=master,
        residual=beside,
        first=first,
        second=second,
        first_scale=scales[0],
        second_scale=scales[1],
        step=torch.zeros((), device=full.device),
        group=group,
    )


def weights_of(dtype, master, moments):
    generator = torch.Generator().manual_seed(0)
    return [
        weight_of(
            torch.randn(n, generator=generator).to(DEVICE), dtype, master, moments, group=i % 2
        )
        for i, n in enumerate(SIZES)
    ]


def averaged(weights):
    """The same weights, with averages that are not where they are."""
    return [dataclasses.replace(w, average=full_of(w) * 1.25 + 0.1) for w in weights]


def tensors_of(w):
    return [value for value in vars(w).values() if isinstance(value, torch.Tensor)]


def kernel_of(weights, *, chunk=512):
    tiling = Tiling(chunk=chunk, warps=4)
    kernel = AdamKernel(weights, device=DEVICE, groups=2, share=SHARE, tiling=tiling)
    kernel.write_hyper([ADAMW, ADAM])
    return kernel


def twin_of(weights):
    twin = AdamTwin(weights, share=SHARE)
    twin.write_hyper([ADAMW, ADAM])
    return twin


def gradients_of(generator, dtype, *, size=1.0):
    return [(torch.randn(n, generator=generator) * size).to(DEVICE, dtype) for n in SIZES]


def full_of(w):
    match w.master:
        case "fp32":
            return w.residual
        case "split":
            return join(w.weight, w.residual)
        case "kahan":
            return w.weight.float() + w.residual.float()
        case _:
            return w.weight.float()


@pytest.mark.pairwise
@pytest.mark.parametrize("gradient", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("dtype", "master", "moments"), MAKES)
def test_one_step_of_the_kernel_is_one_of_its_twin(dtype, master, moments, gradient):
    """Moments agree bit for bit; a root or a quotient may differ by its last bit (2⁻²³)."""
    first, second = (averaged(weights_of(dtype, master, moments)) for _ in range(2))
    given = gradients_of(torch.Generator().manual_seed(1), gradient)
    given[3] = None
    factor = torch.linspace(0.5, 1.5, len(SIZES), device=DEVICE)
    yes = torch.tensor(True, device=DEVICE)
    lost = [
        each.step(given, factor=factor, finite=yes, metered=True)
        for each in (kernel_of(first), twin_of(second))
    ]
    # An update that is a last bit away from being lost may be lost in one of them.
    assert abs(float(lost[0]) - float(lost[1])) <= 2 / sum(SIZES)
    # A few fused operations may round a GPU's moments to a neighbour, by chance further.
    spacing = (
        0.0 if DEVICE.type == "cpu" else {"fp32": 2.0**-21, "bf16": 2.0**-7, "int8": 0.05}[moments]
    )
    digits = {torch.float32: 24, torch.bfloat16: 8, torch.float16: 11}[dtype]
    digits = {"fp32": 24, "split": 24, "kahan": 2 * digits - 1}.get(master, digits)
    for a, b in zip(first, second, strict=True):
        assert float(a.step) == float(b.step)
        for one, other in ((a.first, b.first), (a.second, b.second)):
            gap = (one.double() - other.double()).abs()
            assert (gap <= spacing * other.double().abs() + (spacing > 0) * 1.0).all()
        # Updates are at most lr times a few, weights of the order of one. What fp16 keeps of a
        # rounding error is a multiple of its smallest value.
        gap = (full_of(a) - full_of(b)).abs()
        smallest = 2.0**-24 if (dtype, master) == (torch.float16, "kahan") else 0.0
        allowed = 2.0 ** (1 - digits) * full_of(b).abs() + 2.0**-21 * 1e-2 + smallest
        assert (gap <= allowed).all()
        # As far apart as their shares of the weights are, and three roundings.
        gap = (a.average - b.average).abs()
        assert (gap <= SHARE * allowed + 3 * 2.0**-24 * b.average.abs()).all()


def test_a_group_s_weight_decay_may_become_coupled_between_steps():
    """It is compiled in: twice without it, then with it in one group of two."""
    first, second = (weights_of(torch.float32, "none", "fp32") for _ in range(2))
    kernel, twin = kernel_of(first), twin_of(second)
    generator = torch.Generator().manual_seed(1)
    for groups in ([ADAMW, ADAMW], [ADAMW, ADAMW], [ADAMW, ADAM]):
        given = gradients_of(generator, torch.float32)
        for each in (kernel, twin):
            each.write_hyper(groups)
            each.step(given, factor=None, finite=None, metered=False)
        for a, b in zip(first, second, strict=True):
            assert torch.allclose(a.weight, b.weight, rtol=2.0**-21, atol=2.0**-21 * 1e-2)
            assert torch.allclose(a.first, b.first, rtol=2.0**-20, atol=2.0**-24)


@pytest.mark.gpu
def test_weight_decay_that_a_captured_step_does_not_have_is_refused():
    weights = weights_of(torch.float32, "none", "fp32")
    kernel, given = kernel_of(weights), gradients_of(torch.Generator(), torch.float32)
    kernel.write_hyper([ADAMW, ADAMW])
    kernel.step(given, factor=None, finite=None, metered=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.step(given, factor=None, finite=None, metered=False)
    kernel.write_hyper([dataclasses.replace(ADAMW, lr=0.0), ADAMW])
    graph.replay()
    with pytest.raises(UnsupportedError, match="decoupled_weight_decay of a group changed"):
        kernel.write_hyper([ADAMW, ADAM])


@pytest.mark.parametrize("moments", ["fp32", "int8"])
@pytest.mark.parametrize(("dtype", "master"), list(dict.fromkeys(make[:2] for make in MAKES)))
def test_a_weight_that_somebody_has_written_to_counts_without_what_is_beside_it(
    dtype, master, moments
):
    """Zeros, of both signs, and numbers far away; half of the weights stay what they were."""
    torch.manual_seed(0)
    first, second = (weights_of(dtype, master, moments) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        values = torch.tensor([0.0, -0.0, 3.0, -100.0], dtype=dtype, device=DEVICE)
        chosen = torch.randint(4, a.weight.shape, device=DEVICE)
        mask = torch.rand(a.weight.shape, device=DEVICE) < 0.5
        for w in (a, b):
            w.weight.copy_(torch.where(mask, values[chosen], w.weight))
    then = [w.weight.float() for w in first]
    still = [torch.zeros(n, dtype=dtype, device=DEVICE) for n in SIZES]
    for each in (kernel_of(first), twin_of(second)):
        each.write_hyper([dataclasses.replace(ADAMW, weight_decay=0.0)] * 2)
        each.step(still, factor=None, finite=None, metered=False)
    for a, b, written in zip(first, second, then, strict=True):
        assert all(map(torch.equal, tensors_of(a), tensors_of(b)))
        # Low bits are less than half a spacing of any number, but they may round it up or down.
        assert torch.allclose(full_of(a), written, rtol=2.0**-7 if master == "split" else 2.0**-8)
        assert (full_of(a)[written == 0] == 0).all()


@pytest.mark.parametrize(("dtype", "master"), list(dict.fromkeys(make[:2] for make in MAKES)))
def test_an_average_moves_as_it_does_by_itself_and_changes_nothing_else(dtype, master):
    """Steps of all kinds: clipped, skipped, without some gradients, plain."""
    plain, weights = weights_of(dtype, master, "fp32"), weights_of(dtype, master, "fp32")
    parameters = [torch.nn.Parameter(w.weight.float()) for w in weights]
    held = dict(zip(parameters, weights, strict=True))
    alone = WeightAverage(parameters, lambda p: full_of(held[p]), decay=0.9)
    mine = [a.clone() for a in alone.averages]
    weights = [dataclasses.replace(w, average=a) for w, a in zip(weights, mine, strict=True)]
    kernels, generator = (kernel_of(plain), kernel_of(weights)), torch.Generator().manual_seed(1)
    for factor, good, absent in (
        (0.5, True, None),
        (1.0, False, None),
        (1.0, True, 5),
        (1.0, True, None),
    ):
        given = gradients_of(generator, dtype)
        if absent is not None:
            given[absent] = None
        finite, by = torch.tensor(good, device=DEVICE), torch.tensor(factor, device=DEVICE)
        for kernel in kernels:
            kernel.step(given, factor=by, finite=finite, metered=False)
        before = [a.clone() for a in alone.averages]
        alone.update(
            [i for i in range(len(SIZES)) if i != absent], lambda p: full_of(held[p]), finite=finite
        )
        for now, there, then in zip(mine, alone.averages, before, strict=True):
            # A GPU multiplies and adds at once: what it saves is a rounding of the way, and so
            # perhaps one of the sum.
            fused = 2.0**-24 * ((there - then).abs() + 2 * there.abs()) * (DEVICE.type != "cpu")
            assert ((now - there).abs() <= fused).all()
            there.copy_(now)
    for a, b in zip(plain, weights, strict=True):
        others = tensors_of(dataclasses.replace(b, average=None))
        assert all(map(torch.equal, tensors_of(a), others))
    assert not torch.equal(mine[5], full_of(weights[5]))


def test_weights_with_and_without_an_average_are_updated_side_by_side():
    plain, weights = (weights_of(torch.bfloat16, "split", "fp32") for _ in range(2))
    mixed = [w if i % 2 else averaged([w])[0] for i, w in enumerate(weights)]
    before = copy.deepcopy([w.average for w in mixed])
    given = gradients_of(torch.Generator().manual_seed(1), torch.bfloat16)
    for kernel in (kernel_of(plain), kernel_of(mixed)):
        kernel.step(given, factor=None, finite=None, metered=False)
    for a, b, then in zip(plain, mixed, before, strict=True):
        assert all(
            map(torch.equal, tensors_of(a), tensors_of(dataclasses.replace(b, average=None)))
        )
        if then is not None:
            expected = then + SHARE * (full_of(b) - then)
            torch.testing.assert_close(b.average, expected, rtol=2.0**-22, atol=2.0**-22)


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("make", ["plain", "fp32", "split"])
def test_a_hundred_steps_follow_torchs_adamw_in_fp32(make, decoupled):
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    hyper = dataclasses.replace(ADAMW, decoupled=decoupled)
    generator = torch.Generator().manual_seed(0)
    full = torch.randn(1000, generator=generator).to(DEVICE)
    theirs = torch.nn.Parameter(full.double())
    optimizer = kind([theirs], lr=1e-2, weight_decay=0.1)
    dtype = torch.float32 if make == "plain" else torch.bfloat16
    mine = weight_of(full, dtype, "none" if make == "plain" else make, "fp32")
    # On a CPU the twin is what runs, and each of the kernel's steps is one of the twin's.
    ours = twin_of([mine]) if DEVICE.type == "cpu" else kernel_of([mine], chunk=1024)
    ours.write_hyper([hyper, ADAM])
    for _ in range(100):
        theirs.grad = torch.randn(1000, generator=generator).to(DEVICE).double()
        ours.step([theirs.grad.float()], factor=None, finite=None, metered=False)
        optimizer.step()
    # Against fp64: each of a hundred updates of about lr errs by 2⁻²⁰ of itself at most (eight
    # roundings and a quotient), and the sum rounds each time to 2⁻²⁴ of a weight below 4.
    assert (full_of(mine).double() - theirs).abs().max() < 100 * (1e-2 * 2.0**-20 + 4 * 2.0**-24)
    assert float(mine.step) == 100


def test_a_split_weight_is_the_fp32_one_taken_apart():
    """The same arithmetic: every bit of the fp32 master is in the two halves."""
    generator = torch.Generator().manual_seed(0)
    full = torch.randn(2048, generator=generator).to(DEVICE)
    halves = weight_of(full, torch.bfloat16, "split", "fp32")
    whole = weight_of(full, torch.bfloat16, "fp32", "fp32")
    kernel = kernel_of([halves, whole])
    for _ in range(5):
        gradient = torch.randn(2048, generator=generator).to(DEVICE, torch.bfloat16)
        kernel.step([gradient, gradient], factor=None, finite=None, metered=False)
    high, low = split(whole.residual)
    assert torch.equal(halves.weight, high)
    assert torch.equal(halves.residual, low)


@pytest.mark.parametrize(("dtype", "master", "moments"), MAKES)
def test_a_step_that_is_not_finite_writes_nothing(dtype, master, moments):
    weights = averaged(weights_of(dtype, master, moments))
    kernel = kernel_of(weights)
    generator = torch.Generator().manual_seed(1)
    kernel.step(gradients_of(generator, dtype), factor=None, finite=None, metered=False)
    before = copy.deepcopy([tensors_of(w) for w in weights])
    no = torch.tensor(False, device=DEVICE)
    share = kernel.step(gradients_of(generator, dtype), factor=None, finite=no, metered=True)
    assert float(share) == 0.0
    for w, kept in zip(weights, before, strict=True):
        for now, then in zip(tensors_of(w), kept, strict=True):
            assert now.dtype == then.dtype
            assert torch.equal(now, then)


@pytest.mark.parametrize(("dtype", "master", "moments"), MAKES[:3] + MAKES[9:12])
def test_gradients_that_begin_anywhere_are_read_the_same(dtype, master, moments):
    """A view into a bucket need not begin at a multiple of sixteen bytes."""
    first, second = (averaged(weights_of(dtype, master, moments)) for _ in range(2))
    given = gradients_of(torch.Generator().manual_seed(1), torch.bfloat16)
    moved = [torch.cat([torch.zeros(3, device=DEVICE, dtype=g.dtype), g])[3:] for g in given]
    kernels = kernel_of(first), kernel_of(second)
    for _ in range(2):
        for kernel, gradients in zip(kernels, (given, moved), strict=True):
            kernel.step(gradients, factor=None, finite=None, metered=False)
    for a, b in zip(first, second, strict=True):
        assert all(map(torch.equal, tensors_of(a), tensors_of(b)))


def test_lost_updates_are_counted_over_every_weight():
    full = torch.ones(3000, device=DEVICE)
    weights = [weight_of(full, torch.bfloat16, "none", "fp32") for _ in range(2)]
    given = [torch.ones(3000, device=DEVICE), torch.zeros(3000, device=DEVICE)]
    given[0][:1000] = 0.0
    kernel = kernel_of(weights)
    # 1 - 1e-3 lies between two bf16 values 2⁻⁸ apart, and rounds to 1: all 2000 are lost.
    kernel.write_hyper([dataclasses.replace(ADAMW, lr=1e-3, weight_decay=0.0), ADAM])
    assert float(kernel.step(given, factor=None, finite=None, metered=True)) == 1.0
    kernel.write_hyper([dataclasses.replace(ADAMW, lr=1e-2, weight_decay=0.0), ADAM])
    assert float(kernel.step(given, factor=None, finite=None, metered=True)) == 0.0


def test_a_learning_rate_on_the_device_is_read_there():
    full = torch.randn(100, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    pair = [weight_of(full, torch.float32, "none", "fp32") for _ in range(2)]
    gradient = torch.ones(100, device=DEVICE)
    for w, lr in zip(pair, (3e-3, torch.tensor(3e-3, device=DEVICE)), strict=True):
        kernel = kernel_of([w])
        kernel.write_hyper([dataclasses.replace(ADAMW, lr=lr), ADAM])
        kernel.step([gradient], factor=None, finite=None, metered=False)
    # The tensor is fp32, the number fp64.
    assert (pair[0].weight - pair[1].weight).abs().max() < 3e-3 * 2.0**-20


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_by_chance_is_right_on_average(dtype):
    generator = torch.Generator().manual_seed(0)
    draws = 4096
    for value in (1.0003, -0.7, 3e-6, -5e-5, 1e4 + 1.3):
        x = torch.full((draws,), value)
        random = torch.randint(0, 65536, (draws,), generator=generator)
        rounded = randomly(x, random, dtype).double()
        low, high = rounded.min(), rounded.max()
        assert rounded.unique().numel() <= 2
        deviation = float(high - low) / 2 / math.sqrt(draws)
        exact = float(torch.tensor(value))
        # fp16's chances are known to 2⁻¹³ of a spacing.
        assert abs(float(rounded.mean()) - exact) <= 5 * deviation + float(high - low) * 2.0**-13


@pytest.mark.parametrize("signed", [True, False])
def test_codes_of_eight_bits_are_right_on_average(signed):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(256, generator=generator).pow(3)
    values = values if signed else values.abs()
    draws = 1024
    total, square = torch.zeros(256, dtype=torch.float64), torch.zeros(256, dtype=torch.float64)
    for _ in range(draws):
        random = torch.randint(0, 65536, (256,), generator=generator)
        decoded = decode(*encode(values, random, signed=signed)).double()
        total += decoded
        square += (decoded - values).square()
    mean, deviation = total / draws, (square / draws / draws).sqrt()
    # Below the smallest code a second moment is never zero, and so too large by design.
    fair = values.abs() > 0 if signed else values > values.max() / 254**4
    # fp32 arithmetic, and chances known to 2⁻¹⁶ of a spacing that is at most 4/255.
    slack = 2.0**-16 * 0.016 * values.abs().max() + 2.0**-20 * values.abs()
    assert ((mean - values).abs() <= 5 * deviation + slack)[fair].all()


def test_a_second_moment_above_zero_is_never_kept_as_zero():
    values = torch.tensor([1.0, 1e-12, 1e-30, 1e-45, 0.0]).repeat(60)
    for random in (0, 65535):
        codes, _ = encode(values, torch.full((300,), random), signed=False)
        assert (codes > 0).all()


@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e-38, 1e30])
def test_the_largest_of_a_block_is_kept_and_nothing_overflows(scale):
    values = torch.linspace(-1, 1, 300) * scale
    for random in (0, 65535):
        codes, scales = encode(values, torch.full((300,), random), signed=True)
        back = decode(codes, scales)
        assert back.isfinite().all()
        # Two neighbours of (code / 127)² are at most 2/127 apart; no scale is below 2⁻⁹⁰.
        widest = max(scale, 2.0**-90) * 2 / 127 * (1 + 2.0**-18)
        assert (back - values).abs().max() <= widest * (1 + 2.0**-20)


def test_seeds_are_murmurs_hash():
    # From the reference implementation: fmix32 of 1 and of 0xDEADBEEF.
    assert mix(torch.tensor([1])).item() == 0x514E28B7
    assert mix(torch.tensor([0xDEADBEEF])).item() == 0x0DE5C6A9


@pytest.mark.parametrize("field", [7, 16])
@pytest.mark.parametrize(("step", "place"), [(1, 0), (7, 3), (5000, 291)])
def test_chances_are_even_and_know_nothing_of_neighbours_steps_or_tensors(field, step, place):
    """In 256 equal parts, and by correlation: within what chance allows."""
    count = 1 << 20

    def chances(step, place):
        bits = random_bits(count, step=step, position=place, device=torch.device("cpu"))
        return ((bits >> field) & 0xFFFF).double()

    chance = chances(step, place)
    found = torch.histc(chance, bins=256, min=0, max=65536)
    assert (found - count / 256).abs().max() < 5 * math.sqrt(count / 256)
    near = [chance.roll(lag) for lag in (1, 2, 3, 8, 64, 256, 1024, 4096)]
    for other in (*near, chances(step + 1, place), chances(step, place + 1)):
        correlation = torch.corrcoef(torch.stack([chance, other]))[0, 1]
        assert abs(correlation) < 5 / math.sqrt(count)


@pytest.mark.gpu
def test_a_graph_replays_the_step_with_the_learning_rate_of_the_moment():
    pair = [averaged(weights_of(torch.bfloat16, "split", "int8")) for _ in range(2)]
    kernels = [kernel_of(weights) for weights in pair]
    given = gradients_of(torch.Generator().manual_seed(1), torch.bfloat16)
    finite = torch.tensor(True, device=DEVICE)
    for kernel in kernels:
        kernel.step(given, factor=None, finite=finite, metered=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels[0].step(given, factor=None, finite=finite, metered=False)
    for lr, good in ((1e-2, True), (3e-3, True), (1e-3, False), (1e-3, True)):
        finite.fill_(good)
        for kernel in kernels:
            kernel.write_hyper([dataclasses.replace(ADAMW, lr=lr), ADAM])
        graph.replay()
        kernels[1].step(given, factor=None, finite=finite, metered=False)
    for a, b in zip(*pair, strict=True):
        assert all(map(torch.equal, tensors_of(a), tensors_of(b)))
    assert float(pair[0][2].step) == 4


@pytest.mark.parametrize("make", ["kernel", "twin"])
def test_weights_cut_into_several_kernels_are_updated_as_in_one(make):
    """Chance draws by a weight's place among all of them."""
    whole, cut = (weights_of(torch.bfloat16, "stochastic", "int8") for _ in range(2))
    given = gradients_of(torch.Generator().manual_seed(1), torch.bfloat16)
    yes, middle = torch.tensor(True, device=DEVICE), len(SIZES) // 2

    def stepped(weights, gradients, before):
        if make == "kernel":
            each = AdamKernel(weights, device=DEVICE, groups=2, before=before)
        else:
            each = AdamTwin(weights, before=before)
        each.write_hyper([ADAMW, ADAM])
        each.step(gradients, factor=None, finite=yes, metered=True)
        return each.counts()

    counts = stepped(whole, given, 0)
    parts = stepped(cut[:middle], given[:middle], 0), stepped(cut[middle:], given[middle:], middle)
    assert torch.equal(parts[0] + parts[1], counts)
    for one, other in zip(whole, cut, strict=True):
        assert all(map(torch.equal, tensors_of(one), tensors_of(other)))
