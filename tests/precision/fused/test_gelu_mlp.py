"""Two linear layers and a GELU run as one, against torch's own module."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import narrowcast as nc
from narrowcast.kernels import launch
from narrowcast.precision.fused.gelu_mlp import GeluMlp, can_fuse
from narrowcast.precision.swap import restore, swap

interpreter = pytest.mark.skipif(
    not launch.interpreted(), reason="a GPU is there, so kernels are not interpreted"
)
pytestmark = pytest.mark.interpreted


class Feed(nn.Module):
    fused_mlp = ("up", "gelu", "down")

    def __init__(self, *, bias=True):
        super().__init__()
        self.up = nn.Linear(64, 256, bias=bias)
        self.down = nn.Linear(256, 64, bias=bias)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Doubled(Feed):
    def forward(self, x):
        return 2 * super().forward(x)


def made(dtype, *, device, bias=True):
    torch.manual_seed(0)
    module = Feed(bias=bias).to(device)
    swap(module, GeluMlp, nc_layers=("up", "down"), nc_dtype=dtype)
    return module


def results(module, x, grad):
    module.zero_grad()
    x = x.clone().requires_grad_()
    y = module(x)
    y.backward(grad.to(y.dtype))
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize(
    ("device", "dtype", "step"),
    [
        # fp32 stands for 16 bits where their products are not to be had.
        pytest.param("cpu", torch.float32, 2.0**-18, marks=interpreter),
        pytest.param("cuda", torch.bfloat16, 2.0**-6, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.float16, 2.0**-9, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(40, 64), (2, 3, 64)])
def test_output_and_gradients_are_those_of_the_module_in_float64(device, dtype, step, bias, shape):
    module = made(dtype, device=device, bias=bias)
    exact = copy.deepcopy(module)
    restore(exact)
    exact.double()
    generator = torch.Generator(device).manual_seed(1)
    x, grad = (torch.randn(*shape, generator=generator, device=device) for _ in range(2))
    found = results(module, x, grad)
    for a, b in zip(found, results(exact, x.double(), grad.double()), strict=True):
        assert a.shape == b.shape
        assert (a.double() - b).norm() <= step * b.norm()


@interpreter
def test_one_wide_tensor_is_kept_for_the_backward_pass():
    module, kept = made(torch.float32, device="cpu"), []
    x = torch.randn(40, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        module(x)
    assert [tuple(t.shape) for t in kept].count((40, 256)) == 1


def test_somebody_who_watches_a_layer_sees_what_goes_through_it():
    module, seen = made(torch.float32, device="cpu"), []
    module.down.register_forward_pre_hook(lambda layer, given: seen.append(given[0]))
    x = torch.randn(4, 64)
    module(x)
    assert torch.equal(seen[0], F.gelu(module.up(x)))


def test_only_chains_of_plain_layers_on_a_gpu_are_joined():
    cuda = torch.device("cuda")
    possible = not launch.unsupported_reason(cuda)
    assert can_fuse(Feed(), device=cuda) == possible
    assert not can_fuse(Feed(), device=torch.device("cpu"))
    assert not can_fuse(Doubled(), device=cuda)
    assert not can_fuse(nn.Linear(4, 4), device=cuda)
    narrowed = Feed()
    nc.prepare(narrowed, torch.optim.SGD(narrowed.parameters(), lr=0.1), policy="fp8-tensor")
    assert not can_fuse(narrowed, device=cuda)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("policy", "kind"),
    [
        ("bf16", GeluMlp),
        ("fp16", GeluMlp),
        ("bf16, params=bf16, master=split", GeluMlp),
        ("fp32", Feed),
        ("tf32", Feed),
        ("bf16; *.up: fp32", Feed),
    ],
)
def test_a_policy_of_16_bits_joins_two_layers_and_a_gelu_on_a_gpu(policy, kind):
    model = nn.Sequential(Feed()).cuda()
    run = nc.prepare(model, torch.optim.AdamW(model.parameters()), policy=policy)
    assert isinstance(model[0], GeluMlp) == (kind is GeluMlp)
    x = torch.randn(32, 64, device="cuda")
    with run.autocast():
        loss = model(x).float().square().mean()
    run.backward(loss)
    assert run.step().applied
