"""Leads of a lookahead point in the fused optimizer: kernel, twin, and the optimizer without."""

import copy
import dataclasses
import itertools

import pytest
import torch

from narrowcast.kernels.adamw.kernel import AdamKernel, Tiling
from narrowcast.kernels.adamw.twin import AdamTwin, Ahead, Hyper, Weight
from narrowcast.kernels.launch import interpreted
from narrowcast.numerics.rounding import join, split

DEVICE = torch.device("cpu" if interpreted() else "cuda")
SIZES = (0, 1, 17, 256, 777)
MOMENTS = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
ADAMW = Hyper(lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, decoupled=True)
ADAM = dataclasses.replace(ADAMW, betas=(0.8, 0.95), decoupled=False)
PULL, SHARE = 0.9, 0.05
AHEAD = Ahead(back=(1 - PULL) / PULL, left=PULL * (1 - SHARE))
KEPT = [
    (torch.float32, "none"),
    (torch.bfloat16, "split"),
    (torch.bfloat16, "fp32"),
    (torch.float16, "fp32"),
]
MAKES = list(itertools.product(KEPT, MOMENTS, (torch.float32, torch.bfloat16)))


def weight_of(full, kept, moments, lead, *, group=0):
    dtype, master = kept
    weight, beside = (
        split(full)
        if master == "split"
        else (full.to(dtype), full.clone() if master != "none" else None)
    )
    first = torch.zeros_like(full, dtype=MOMENTS[moments])
    second = torch.zeros_like(full, dtype=torch.uint8 if moments == "int8" else first.dtype)
    blocks = -(-full.numel() // 256)
    scales = [torch.zeros(blocks, device=DEVICE) if moments == "int8" else None for _ in range(2)]
    return Weight(
        weight=weight.clone(),
        master=master,
        residual=beside,
        first=first,
        second=second,
        first_scale=scales[0],
        second_scale=scales[1],
        step=torch.zeros((), device=DEVICE),
        group=group,
        lead=None if lead is None else (full.sin() * 0.1).to(lead),
    )


def weights_of(kept, moments="fp32", lead=torch.float32):
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(n, generator=generator).to(DEVICE) for n in SIZES]
    return [weight_of(full, kept, moments, lead, group=i % 2) for i, full in enumerate(drawn)]


def full_of(w):
    if w.master == "split":
        return join(w.weight, w.residual)
    return w.weight.clone() if w.residual is None else w.residual.clone()


def tensors_of(w):
    return [value for value in vars(w).values() if isinstance(value, torch.Tensor)]


def kernel_of(weights):
    tiling = Tiling(chunk=512, warps=4)
    kernel = AdamKernel(weights, device=DEVICE, groups=2, share=0.1, ahead=AHEAD, tiling=tiling)
    kernel.write_hyper([ADAMW, ADAM])
    return kernel


def twin_of(weights):
    twin = AdamTwin(weights, share=0.1, ahead=AHEAD)
    twin.write_hyper([ADAMW, ADAM])
    return twin


def gradients_of(generator, dtype=torch.float32):
    return [torch.randn(n, generator=generator).to(DEVICE, dtype) for n in SIZES]


@pytest.mark.parametrize(("kept", "moments", "lead"), MAKES)
def test_one_step_of_the_kernel_is_one_of_its_twin_with_leads_and_averages_too(kept, moments, lead):
    first, second = (
        [dataclasses.replace(w, average=full_of(w) * 1.25) for w in weights_of(kept, moments, lead)]
        for _ in range(2)
    )
    given = gradients_of(torch.Generator().manual_seed(1), torch.bfloat16)
    given[3] = None
    factor = torch.linspace(0.5, 1.5, len(SIZES), device=DEVICE)
    yes = torch.tensor(True, device=DEVICE)
    for each in (kernel_of(first), twin_of(second)):
        each.step(given, factor=factor, finite=yes, metered=True)
    for a, b in zip(first, second, strict=True):
        # As without leads: roundings of 2⁻²⁴ of a weight, and an update of about lr whose quotient
        # may differ in its last bit. A lead in bf16 may besides be rounded to its neighbour, which
        # the weight makes up for: their sum is where the optimizer is.
        gap = 2.0**-22 * full_of(b).abs() + 2.0**-20 * 1e-2
        coarse = 2.0**-7 * b.lead.float().abs() if lead == torch.bfloat16 else 0.0
        assert ((a.lead.float() - b.lead.float()).abs() <= gap + coarse).all()
        assert ((full_of(a) - full_of(b)).abs() <= gap + coarse).all()
        both = [full_of(w) + w.lead.float() for w in (a, b)]
        assert ((both[0] - both[1]).abs() <= gap + 2.0**-23 * both[1].abs()).all()
        assert ((a.average - b.average).abs() <= 0.1 * (gap + coarse) + 2.0**-22).all()
    assert torch.equal(first[3].lead, weights_of(kept, moments, lead)[3].lead)


@pytest.mark.parametrize(("kept", "moments", "lead"), MAKES)
def test_a_step_of_the_twin_is_one_without_leads_from_the_sum_of_both(kept, moments, lead):
    """To the bit: z is stepped by the same arithmetic, and y and e follow by the recursion."""
    ahead = weights_of(kept, moments, lead)
    answers = [full_of(w) - AHEAD.back * w.lead.float() for w in ahead]
    starts = [full_of(w) + w.lead.float() for w in ahead]
    plain = [
        weight_of(z, (torch.float32, "none"), moments, None, group=i % 2)
        for i, z in enumerate(starts)
    ]
    given = gradients_of(torch.Generator().manual_seed(1))
    for each in (twin_of(ahead), twin_of(plain)):
        each.step(given, factor=None, finite=None, metered=False)
    for w, moved, x in zip(ahead, plain, answers, strict=True):
        expected = (AHEAD.left * (moved.weight - x)).to(lead)
        assert torch.equal(w.lead, expected)
        assert torch.equal(full_of(w), moved.weight - expected.float())
        assert torch.equal(w.first, moved.first)
        assert torch.equal(w.second, moved.second)


@pytest.mark.pairwise
@pytest.mark.parametrize(("kept", "moments", "lead"), MAKES)
@pytest.mark.parametrize("make", [kernel_of, twin_of])
def test_a_step_that_is_not_finite_leaves_weights_and_leads_bit_for_bit(make, kept, moments, lead):
    weights = weights_of(kept, moments, lead)
    each, generator = make(weights), torch.Generator().manual_seed(1)
    each.step(gradients_of(generator), factor=None, finite=None, metered=False)
    before = copy.deepcopy([tensors_of(w) for w in weights])
    no = torch.tensor(False, device=DEVICE)
    each.step(gradients_of(generator), factor=None, finite=no, metered=False)
    for w, then in zip(weights, before, strict=True):
        assert all(map(torch.equal, tensors_of(w), then))


def test_a_split_weight_with_a_lead_is_the_fp32_one_taken_apart():
    halves, whole = (weights_of((torch.bfloat16, master)) for master in ("split", "fp32"))
    generator = torch.Generator().manual_seed(1)
    kernels = kernel_of(halves), kernel_of(whole)
    for _ in range(3):
        given = gradients_of(generator, torch.bfloat16)
        for kernel in kernels:
            kernel.step(given, factor=None, finite=None, metered=False)
    for a, b in zip(halves, whole, strict=True):
        assert torch.equal(full_of(a), full_of(b))
        assert torch.equal(a.lead, b.lead)


def test_weights_with_and_without_a_lead_are_updated_side_by_side():
    alone, mixed = (weights_of((torch.float32, "none"), lead=None) for _ in range(2))
    led = weights_of((torch.float32, "none"))
    mixed = [w if i % 2 else led[i] for i, w in enumerate(mixed)]
    given = gradients_of(torch.Generator().manual_seed(1))
    for kernel in (kernel_of(alone), kernel_of(mixed)):
        kernel.step(given, factor=None, finite=None, metered=False)
    for i, (a, b) in enumerate(zip(alone, mixed, strict=True)):
        assert torch.equal(a.weight, b.weight) is bool(i % 2 or not SIZES[i])


@pytest.mark.parametrize("make", [kernel_of, twin_of])
def test_an_update_that_moves_nothing_is_lost_though_the_weight_follows_its_lead(make):
    """Learning rates of 1e-12 move no fp32 number of the order of one."""
    weights = weights_of((torch.bfloat16, "split"))
    each, before = make(weights), [full_of(w) for w in weights]
    still = dataclasses.replace(ADAMW, lr=1e-12)
    each.write_hyper([still, still])
    given = [torch.ones(n, device=DEVICE) for n in SIZES]
    share = each.step(given, factor=None, finite=None, metered=True)
    assert not torch.equal(full_of(weights[-1]), before[-1])
    moved = [
        (full_of(w) - b).abs().max() for w, b in zip(weights, before, strict=True) if b.numel()
    ]
    assert max(moved) > 1e-3
    # But for the few that are so near zero that they do move.
    assert 0.99 < float(share) <= 1


@pytest.mark.gpu
@pytest.mark.parametrize("lead", [torch.float32, torch.bfloat16])
def test_a_graph_replays_steps_with_leads_and_skips_them(lead):
    pair = [weights_of((torch.bfloat16, "split"), "int8", lead) for _ in range(2)]
    kernels = [kernel_of(weights) for weights in pair]
    given = gradients_of(torch.Generator().manual_seed(1), torch.bfloat16)
    finite = torch.tensor(True, device=DEVICE)
    for kernel in kernels:
        kernel.step(given, factor=None, finite=finite, metered=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels[0].step(given, factor=None, finite=finite, metered=False)
    for good in (True, False, True):
        finite.fill_(good)
        graph.replay()
        kernels[1].step(given, factor=None, finite=finite, metered=False)
    for a, b in zip(*pair, strict=True):
        assert all(map(torch.equal, tensors_of(a), tensors_of(b)))
    assert float(pair[0][2].step) == 3
