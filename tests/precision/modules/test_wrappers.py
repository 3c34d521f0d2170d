import collections
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import narrowcast as nc
from narrowcast.errors import UnsupportedError
from narrowcast.precision.gradients.loss_scale import LossScale, RunningScale
from narrowcast.precision.modules.wrappers import Fp32Norm, MatchingInput, OwnLossScale, RoundedNorm
from narrowcast.precision.swap import is_swapped, restore, swap

Pair = collections.namedtuple("Pair", "first second")


def test_a_swapped_module_is_restored_to_exactly_what_it_was():
    layer = nn.LayerNorm(4)
    before = set(layer.__dict__)
    swap(layer, Fp32Norm)
    swap(layer, OwnLossScale, nc_scale=object())
    assert is_swapped(layer)
    restore(layer)
    assert type(layer) is nn.LayerNorm
    assert set(layer.__dict__) == before
    assert not is_swapped(layer)


def test_a_swapped_module_keeps_its_hooks_parameters_and_keys():
    layer = nn.LayerNorm(4)
    calls = []
    layer.register_forward_hook(lambda *a: calls.append(a))
    weight, keys = layer.weight, list(layer.state_dict())
    swap(layer, Fp32Norm)
    layer(torch.ones(4))
    assert layer.weight is weight
    assert list(layer.state_dict()) == keys
    assert len(calls) == 1


@pytest.mark.parametrize("how", ["positional", "keyword"])
def test_a_wide_norm_computes_in_fp32_and_returns_what_came_in(how):
    layer = nn.LayerNorm(64)
    x = torch.randn(3, 64).bfloat16()
    expected = layer(x.float()).bfloat16()
    swap(layer, Fp32Norm)
    result = layer(x) if how == "positional" else layer(input=x)
    assert torch.equal(result, expected)


class DomainNorm(nn.Module):
    """Has a weight for each domain, of which it is told first."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 16))

    def forward(self, domain, x):
        return F.layer_norm(x, (16,)) * self.weight[domain]


class PrenormNorm(nn.Module):
    """Returns the sum that it normalises as well, as those of fused kernels do."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, xs):
        total = xs[0] + xs[1]
        return {"normed": F.rms_norm(total, (16,), self.weight), "total": total, "count": len(xs)}


@pytest.mark.parametrize(
    "settings", [(Fp32Norm, {}), (RoundedNorm, {"nc_dtype": torch.bfloat16})], ids=["wide", "round"]
)
def test_a_norm_of_ones_own_takes_and_returns_what_it_likes(settings):
    kind, given = settings
    torch.manual_seed(0)
    domain, x = torch.tensor([2, 0, 1]), torch.randn(3, 16).bfloat16()
    by_domain, prenorm = DomainNorm(), PrenormNorm()
    wanted = by_domain(domain, x.float()).bfloat16(), prenorm([x.float(), x.float()])
    for each in (by_domain, prenorm):
        swap(each, kind, **given)
    assert torch.equal(by_domain(domain, x), wanted[0])  # and no numbers of the index's dtype
    found = prenorm([x, x])
    assert torch.equal(found["normed"], wanted[1]["normed"].bfloat16())
    assert torch.equal(found["total"], wanted[1]["total"])  # as it was computed
    assert found["count"] == 2


@pytest.mark.parametrize("policy", ["bf16", "bf16, params=bf16, master=split", "fp16, params=fp16"])
def test_a_norm_that_is_told_a_domain_first_learns(policy):
    torch.manual_seed(0)
    layer, norm = nn.Linear(16, 16), DomainNorm()
    model = nn.ModuleDict({"layer": layer, "norm": norm})
    run = nc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy=policy)
    domain, x = torch.tensor([2, 0, 1]), torch.randn(3, 16)
    before = norm.weight.detach().clone()
    with run.autocast():
        loss = norm(domain, layer(x)).float().square().mean()
    assert run.step(loss).applied
    assert not torch.equal(norm.weight, before)


@pytest.mark.parametrize(
    "policy",
    ["bf16", "bf16, params=bf16, master=split", "fp8-tensor", "fp16", "fp32; encoder: bf16"],
)
def test_a_padded_batch_is_evaluated_by_torchs_encoder(policy):
    """Whose fast path, on a CPU with native bf16, would end in an error about dtypes."""
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    model = nn.ModuleDict({"encoder": nn.TransformerEncoder(block, 2)})
    x, padding = torch.randn(3, 6, 16), torch.arange(6) >= torch.tensor([[4], [6], [2]])
    run = nc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy=policy)
    found = []
    for training in (True, False):
        model.train(training)
        with torch.no_grad(), run.autocast():
            found.append(model["encoder"](x, src_key_padding_mask=padding))
    assert torch.equal(found[1], found[0])  # without dropout they are the same
    assert run.release()["encoder"].layers[0].activation_relu_or_gelu == 1  # as it was


class Casts(TorchDispatchMode):
    """Counts the copies of whole tensors into another dtype."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.count += op is torch.ops.aten._to_copy.default
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("affine", [True, False])
def test_a_batch_norm_of_torch_reads_16_bits_without_a_cast(form, affine):
    torch.manual_seed(0)
    plain = nn.BatchNorm2d(8, affine=affine)
    wide = copy.deepcopy(plain)
    swap(plain, Fp32Norm, nc_widens_itself=True)
    drawn = torch.randn(4, 8, 5, 5).bfloat16()
    x, exactly = (t.contiguous(memory_format=form).requires_grad_() for t in (drawn, drawn.float()))
    down = torch.randn(4, 8, 5, 5).bfloat16()
    with Casts() as casts:
        result = plain(x)
        result.backward(down)
    assert casts.count == 0
    expected = wide(exactly)
    expected.backward(down.float())
    # Computed in fp32 and rounded once: half a unit in the last of 8 bits, and what fp32 sums lose.
    torch.testing.assert_close(result, expected.bfloat16(), rtol=2**-7, atol=2**-20)
    # A difference of three terms, each of them read in 16 bits.
    torch.testing.assert_close(x.grad, exactly.grad.bfloat16(), rtol=2**-6, atol=2**-9)
    torch.testing.assert_close(plain.running_mean, wide.running_mean)
    torch.testing.assert_close(plain.running_var, wide.running_var)
    assert plain.running_mean.dtype == torch.float32
    if affine:
        torch.testing.assert_close(plain.weight.grad, wide.weight.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_batch_norm_that_torch_would_not_compute_in_fp32_is_widened(dtype):
    """Without weights and statistics nothing tells it to, and float64 it would refuse."""
    torch.manual_seed(0)
    layers = [nn.BatchNorm1d(8, affine=False, track_running_stats=False), nn.BatchNorm1d(8)]
    layer = layers[dtype == torch.float64]
    x = (torch.randn(64, 8) + 10).to(dtype)
    expected = copy.deepcopy(layer)(x.float()).to(dtype)
    swap(layer, Fp32Norm, nc_widens_itself=True)
    assert torch.equal(layer(x), expected)


def test_a_batch_norm_under_a_transform_is_widened():
    layer = nn.BatchNorm1d(8).eval()
    swap(layer, Fp32Norm, nc_widens_itself=True)
    x = torch.randn(5, 4, 8).bfloat16()
    expected = torch.stack([layer(each) for each in x])
    torch.testing.assert_close(torch.func.vmap(layer)(x), expected, rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_only_a_gpu_reads_16_bits_in_batch_norms_of_torch(device):
    """On a CPU torch's compiler would round their mean and deviation to 16 bits."""
    kinds = (nn.BatchNorm2d, OwnBatchNorm, nn.SyncBatchNorm)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), *[kind(8) for kind in kinds]).to(device)
    policy = "bf16, params=bf16, master=split"
    nc.prepare(model, torch.optim.AdamW(model.parameters()), policy=policy)
    assert [norm.nc_widens_itself for norm in model[1:]] == [device == "cuda", False, False]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_compiled_batch_norm_has_the_gradients_of_fp32(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)).to(device)
    policy = "bf16, params=bf16, master=split"
    nc.prepare(model, torch.optim.SGD(model.parameters(), 0.1), policy=policy)
    x = (torch.randn(32, 8, 16, 16, device=device) + 10).bfloat16().requires_grad_()
    down = torch.randn(32, 8, 16, 16, device=device).bfloat16() + 1
    exactly, wide = nn.BatchNorm2d(8).double().to(device), x.detach().double().requires_grad_()
    exactly(wide).backward(down.double())
    backend = "inductor" if device == "cuda" else "aot_eager_decomp_partition"
    torch.compile(model[1], backend=backend)(x).backward(down)
    found, expected = model[1].weight.grad.double(), exactly.weight.grad
    # Sums of 8,192 products in fp32, of numbers that cancel to a tenth.
    assert (found - expected).abs().max() <= 8192 * 10 * 2.0**-24 * expected.abs().max()


WRAPPED = {
    "widened": (Fp32Norm, {}),
    "widens itself": (Fp32Norm, {"nc_widens_itself": True}),
    "rounded": (RoundedNorm, {"nc_dtype": torch.bfloat16}),
}


class Watched(nn.BatchNorm1d):
    """Says whether autocast is on inside, and fails where it is told to."""

    def forward(self, input):  # noqa: A002  # torch's own name
        self.autocast = torch.is_autocast_enabled("cpu")
        if input.shape[0] == 0:
            raise ValueError("an empty batch")
        return super().forward(input)


@pytest.mark.parametrize(("kind", "settings"), WRAPPED.values(), ids=WRAPPED)
def test_autocast_is_off_inside_a_norm_and_on_again_whatever_happens(kind, settings):
    layer = Watched(8)
    swap(layer, kind, **settings)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer(torch.randn(4, 8).bfloat16())
        assert not layer.autocast
        with pytest.raises(ValueError, match="an empty batch"):
            layer(torch.randn(0, 8).bfloat16())
        assert torch.is_autocast_enabled("cpu")
    layer(torch.randn(4, 8).bfloat16())
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize(("kind", "settings"), WRAPPED.values(), ids=WRAPPED)
def test_a_compiled_norm_is_one_graph_for_all_calls_alike(kind, settings, autocast):
    torch._dynamo.reset()
    torch.manual_seed(0)
    layers = [nn.BatchNorm2d(8) for _ in range(3)]
    eager = copy.deepcopy(layers)
    for each in (*layers, *eager):
        swap(each, kind, **settings)
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(nn.Sequential(*layers), backend=backend, fullgraph=True)
    x = torch.randn(4, 8, 5, 5).bfloat16()
    for _ in range(3):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            assert torch.equal(compiled(x), nn.Sequential(*eager)(x))
    assert len(graphs) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", [Fp32Norm, MatchingInput], ids=lambda c: c.__name__)
def test_a_norm_computes_in_the_dtype_of_whichever_weight_it_has(kind, dtype):
    """A frozen one, one without a weight, and one whose weights are made by a parametrization."""
    x = torch.randn(4, 8)
    plain = nn.LayerNorm(8, bias=False, dtype=dtype)
    without = nn.LayerNorm(8, dtype=dtype)
    without.weight = None
    made = nn.LayerNorm(8, dtype=dtype)
    for name in ("weight", "bias"):
        nn.utils.parametrize.register_parametrization(made, name, nn.Identity())
    for layer in (plain.requires_grad_(False), without, made):
        expected = layer(x.to(dtype))
        swap(layer, kind)
        assert torch.equal(layer(x), expected.float() if kind is Fp32Norm else expected)


class OwnBatchNorm(nn.BatchNorm2d):
    def forward(self, input):  # noqa: A002  # torch's own name
        return input * self.weight[:, None, None]


def test_a_batch_norm_that_computes_something_else_is_widened():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), OwnBatchNorm(8))
    policy = "bf16, params=bf16, master=split"
    nc.prepare(model, torch.optim.AdamW(model.parameters()), policy=policy)
    x = torch.randn(4, 8, 5, 5).bfloat16()
    with Casts() as casts:
        assert model[1](x).dtype == torch.bfloat16
    assert casts.count == 2


def test_a_narrow_norm_rounds_what_goes_in_and_what_comes_out():
    layer = nn.LayerNorm(64)
    x = torch.randn(3, 64)
    expected = layer(x.bfloat16().float()).bfloat16().float()
    swap(layer, RoundedNorm, nc_dtype=torch.bfloat16)
    assert torch.equal(layer(x), expected)


def test_a_packed_sequence_is_cast_like_any_input():
    layer = nn.LSTM(4, 4).to(torch.bfloat16)
    seen = []
    layer.register_forward_pre_hook(lambda *a: None)

    class Record(nn.Module):
        def forward(self, given, hx=None):
            seen.append(given)

    recorder = Record()
    recorder.weight = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    swap(recorder, MatchingInput)
    recorder(nn.utils.rnn.pack_sequence([torch.ones(3, 4), torch.ones(2, 4)]))
    assert seen[0].data.dtype == torch.bfloat16
    assert isinstance(seen[0], nn.utils.rnn.PackedSequence)


class Returns(nn.Module):
    def __init__(self, shape_output):
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), 3.0))
        self.shape_output = shape_output

    def forward(self, x):
        return self.shape_output(x * self.weight)


def first(output):
    while not isinstance(output, torch.Tensor):
        output = output[0] if isinstance(output, tuple | list) else output["y"]
    return output


OUTPUTS = {
    "tensor": lambda y: y,
    "tuple": lambda y: (y, None),
    "list": lambda y: [y],
    "dict": lambda y: {"y": y, "n": 1},
    "named tuple": lambda y: Pair(y, 2),
    "nested": lambda y: ({"y": [y]}, "text"),
}


def gradients(part, x, **keywords):
    x.grad = part.weight.grad = None
    first(part(x)).sum().backward()
    return x.grad.clone(), part.weight.grad.clone()


@pytest.mark.parametrize("shape_output", OUTPUTS.values(), ids=OUTPUTS)
def test_a_parts_own_scale_is_on_its_weights_and_on_nothing_outside(shape_output):
    part = Returns(shape_output)
    x = torch.ones(2, requires_grad=True)
    plain_x, plain_weight = gradients(part, x)
    scale = RunningScale(LossScale(init_scale=256.0), torch.device("cpu"))
    swap(part, OwnLossScale, nc_scale=scale)
    scaled_x, scaled_weight = gradients(part, x)
    assert torch.equal(scaled_x, plain_x)
    assert torch.equal(scaled_weight, plain_weight * 256)


def test_an_output_in_which_no_gradient_is_seen_is_refused_rather_than_left_unscaled():
    class Opaque:
        def __init__(self, y):
            self.y = y

    part = Returns(Opaque)
    swap(part, OwnLossScale, nc_scale=RunningScale(LossScale(), torch.device("cpu")))
    with pytest.raises(UnsupportedError, match="must return tensors that require grad, got Opaque"):
        part(torch.ones(2))


def test_a_frozen_part_may_return_what_it_likes():
    part = Returns(lambda y: y).requires_grad_(False)
    swap(part, OwnLossScale, nc_scale=RunningScale(LossScale(), torch.device("cpu")))
    assert torch.equal(part(torch.ones(2)), torch.full((2,), 3.0))


@pytest.mark.parametrize("policy", ["bf16", "bf16, params=bf16, master=split"])
def test_a_bilinear_layer_multiplies_in_16_bits_whatever_its_inputs_are(policy, cuda):
    layer = nn.Bilinear(32, 16, 8).to(cuda)
    wide = [each.detach().clone() for each in layer.parameters()]
    run = nc.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.1), policy=policy)
    first, second = torch.randn(4, 32, device=cuda), torch.randn(4, 16, device=cuda).bfloat16()
    with run.autocast():
        found = layer(first, second)
    narrow = (each.bfloat16() for each in (first, second, *wide))
    assert torch.equal(found, nn.functional.bilinear(*narrow))
