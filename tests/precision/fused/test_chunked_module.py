import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import narrowcast as nc
from narrowcast.errors import UnsupportedError
from narrowcast.kernels.launch import interpreted
from narrowcast.precision.fp8.linear import Fp8Linear
from narrowcast.precision.fused.chunked_pass import LossTerms
from narrowcast.precision.fused.linear_cross_entropy import chunked_module_loss
from narrowcast.precision.plan.policy import PRESETS
from narrowcast.precision.products.operands import ProductFormats
from narrowcast.precision.swap import swap

DEVICE = "cpu" if interpreted() else "cuda"


def drawn(rows=11, width=12, columns=50):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, generator=generator)
    head = nn.Linear(width, columns)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    targets = torch.randint(0, columns, (rows,), generator=generator)
    targets[3] = -100
    return hidden.to(DEVICE).requires_grad_(), head.to(DEVICE), targets.to(DEVICE)


def terms(reduction="mean", *, label_smoothing=0.0, chunk_rows=4):
    return LossTerms(-100, label_smoothing, 0.0, reduction, chunk_rows)


@pytest.mark.pairwise
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("chunk_rows", [1, 4, 11, 20])
@pytest.mark.parametrize("frozen", ["", "hidden", "weight", "bias"])
def test_the_loss_and_its_gradients_are_those_of_float64(reduction, chunk_rows, frozen):
    hidden, head, targets = drawn()
    wide, wide_head, _ = (t.double() if isinstance(t, nn.Module) else t for t in drawn())
    wide = wide.detach().double().requires_grad_()
    tensors = {"hidden": hidden, "weight": head.weight, "bias": head.bias}
    exact = {"hidden": wide, "weight": wide_head.weight, "bias": wide_head.bias}
    for name in tensors:
        tensors[name].requires_grad_(name != frozen)
    asked = terms(reduction, label_smoothing=0.1, chunk_rows=chunk_rows)
    loss = chunked_module_loss(hidden, head, targets, terms=asked)
    expected = F.cross_entropy(wide_head(wide), targets, reduction=reduction, label_smoothing=0.1)
    assert loss.item() == pytest.approx(expected.item(), rel=50 * 2.0**-24)
    loss.backward()
    expected.backward()
    for name, tensor in tensors.items():
        if name == frozen:
            assert tensor.grad is None
        else:
            difference = (tensor.grad.double() - exact[name].grad).norm()
            assert difference <= 50 * 2.0**-24 * exact[name].grad.norm()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_chunked_loss_without_gradients_computes_only_losses(reduction):
    hidden, head, targets = drawn()
    with torch.no_grad():
        loss = chunked_module_loss(hidden, head, targets, terms=terms(reduction))
        expected = F.cross_entropy(head(hidden), targets, reduction=reduction)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, expected)


def test_a_checkpointed_loss_gives_the_same_gradients():
    hidden, head, targets = drawn()

    def loss(states):
        return chunked_module_loss(states.tanh(), head, targets, terms=terms())

    inputs = [hidden, *head.parameters()]
    plain = torch.autograd.grad(loss(hidden), inputs)
    again = torch.autograd.grad(checkpoint(loss, hidden, use_reentrant=False), inputs)
    assert all(map(torch.equal, plain, again))


def test_a_second_derivative_is_refused():
    hidden, head, targets = drawn()
    loss = chunked_module_loss(hidden, head, targets, terms=terms())
    with pytest.raises(UnsupportedError, match="no second derivative"):
        torch.autograd.grad(loss, [hidden], create_graph=True)


FP8_HEADS = {"fp8-tensor": Fp8Linear, "fp8-row": Fp8Linear}


@pytest.mark.parametrize("preset", FP8_HEADS)
def test_an_fp8_head_gives_the_loss_and_gradients_of_its_whole_logits(preset):
    if DEVICE == "cpu" and torch.__version__ < "2.13":
        pytest.skip("needs torch 2.13, whose CPU has row-scaled fp8 products")
    rows, width, columns = 64, 64, 96
    hidden, head, targets = drawn(rows, width, columns)
    formats = ProductFormats.of(PRESETS[preset])
    swap(head, FP8_HEADS[preset], nc_formats=formats, nc_history=None)
    losses = (
        # One chunk, whose scales are those of one call.
        nc.linear_cross_entropy(hidden, head, targets, chunk_rows=rows),
        F.cross_entropy(head(hidden).float(), targets),
    )
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=96 * 2.0**-24)
    inputs = [hidden, *head.parameters()]
    for mine, plain in zip(*(torch.autograd.grad(loss, inputs) for loss in losses), strict=True):
        # A mean over 63 rows is rounded to e5m2 (2⁻³ at worst) at other places than a sum.
        assert (mine.float() - plain.float()).norm() <= 2.0**-3 * plain.float().norm()


def test_an_fp8_head_is_called_for_each_chunk():
    hidden, head, targets = drawn(64, 64, 96)
    formats = ProductFormats.of(PRESETS["fp8-tensor"])
    swap(head, Counted, nc_formats=formats, nc_history=None, seen=[])
    nc.linear_cross_entropy(hidden, head, targets, chunk_rows=48).backward()
    assert head.seen == [48, 16]


class Counted(Fp8Linear):
    seen: list[int]

    def forward(self, input):  # noqa: A002  # torch's own name
        self.seen.append(len(input))
        return super().forward(input)
