"""A frozen base in e4m3, against plain layers with the same numbers and exact arithmetic."""

import copy
import io
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

import narrowcast as nc
from narrowcast.errors import CheckpointError, ConfigError, UnsupportedError
from narrowcast.precision import quantized_frozen
from narrowcast.precision.quantized_frozen import QuantizedFrozenLayer

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def frozen(inputs=32, outputs=48, *, bias=True, seed=0, dtype=torch.float32, device="cpu"):
    torch.manual_seed(seed)
    layer = nn.Linear(inputs, outputs, bias=bias)
    return nn.Sequential(layer).requires_grad_(False).to(device, dtype)


def twin_of(model, dtype=None):
    """Return plain layers with the numbers that were kept."""
    twin = copy.deepcopy(model)
    nc.dequantize_frozen(twin, dtype)
    return twin


@settings(max_examples=60)
@given(
    rows=st.integers(1, 20),
    columns=st.integers(1, 40),
    power=st.integers(-120, 120),
    seed=st.integers(0, 999),
)
def test_a_weight_is_within_half_a_spacing_of_e4m3_at_the_scale_of_its_row(
    rows, columns, power, seed
):
    generator = torch.Generator().manual_seed(seed)
    spread = 2.0 ** torch.randint(-12, 4, (rows, columns), generator=generator)
    weight = torch.randn(rows, columns, generator=generator) * spread * 2.0**power
    weight[torch.rand(rows, generator=generator) < 0.2] = 0.0
    model = nn.Sequential(nn.Linear(columns, rows, bias=False)).requires_grad_(False)
    model[0].weight.data = weight
    nc.quantize_frozen(model)
    scale = model[0].weight_scale.double()[:, None]
    assert torch.equal(torch.frexp(scale)[0], torch.full_like(scale, 0.5))  # powers of two
    scaled, back = weight.double() / scale, model[0].weight.double() / scale
    assert back.isfinite().all()
    assert back.abs().max() <= 448
    # e4m3: three bits after the leading one, none smaller than 2⁻⁹.
    exponent = torch.frexp(scaled)[1] - 1
    spacing = 2.0 ** (exponent.clamp(min=-6) - 3).double()
    assert ((scaled - back).abs() <= spacing / 2).all()


def test_the_scale_of_a_row_is_the_smallest_that_holds_it():
    model = frozen()
    before = model[0].weight.abs().amax(1)
    nc.quantize_frozen(model)
    scale = model[0].weight_scale
    assert (before <= 448 * scale).all()
    assert (before > 448 * scale / 2).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_takes_a_byte_a_weight_and_says_what_was_lost(dtype, device):
    model = frozen(dtype=dtype, device=device)
    weight = model[0].weight.double()
    found = nc.quantize_frozen(model, "e4m3")
    layer = model[0]
    assert layer.weight_e4m3.dtype == torch.float8_e4m3fn
    assert layer.weight_e4m3.nbytes == weight.numel()
    assert layer.weight_scale.nbytes == 4 * layer.out_features
    noise = (weight - layer.weight.double()).square().sum()
    expected = 10 * math.log10(weight.square().sum() / noise)
    assert found == {"0": pytest.approx(expected, abs=1e-4)}
    assert layer.weight.dtype == dtype
    assert layer.weight.shape == (48, 32)
    assert "weight stored in e4m3" in repr(model)


def test_a_weight_that_e4m3_holds_loses_nothing():
    model = frozen(4, 2, bias=False)
    model[0].weight.data = torch.tensor([[1.0, -0.5, 448, 0], [0, 0, 0, 0]])
    assert nc.quantize_frozen(model) == {"0": math.inf}
    assert model[0].weight.tolist() == [[1.0, -0.5, 448, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_output_and_gradients_are_those_of_the_plain_layer(bias, dtype, device):
    if device == "cpu" and dtype == torch.bfloat16 and not _multiplies_bf16():
        pytest.skip("needs a CPU that multiplies bf16")
    model = frozen(bias=bias, dtype=dtype, device=device)
    nc.quantize_frozen(model)
    if bias:
        model[0].bias.requires_grad_()
    twin = twin_of(model)
    assert type(twin[0]) is nn.Linear
    results = []
    for each in (model, twin):
        torch.manual_seed(1)
        x = torch.randn(2, 5, 32, device=device, dtype=dtype, requires_grad=True)
        output = each(x)
        output.square().sum().backward()
        results.append((output, x.grad, each[0].bias.grad if bias else None))
    for mine, plain in zip(*results, strict=True):
        assert mine is plain is None or torch.equal(mine, plain)


@pytest.mark.parametrize("shape", [(32,), (0, 32), (1, 1, 32)])
@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp8-row"])
def test_inputs_of_any_shape_have_gradients(shape, policy):
    model = nn.Sequential(frozen()[0], nn.Linear(48, 4))
    nc.quantize_frozen(model)
    model[0].bias.requires_grad_()
    run = nc.prepare(model, trained_beside(model), policy=policy)
    x = torch.randn(shape, requires_grad=True)
    with run.autocast():
        run.backward(model(x).float().sum())
    assert x.grad.shape == shape
    assert model[0].bias.grad.shape == (48,)


def test_nothing_wide_is_kept_for_the_backward_pass():
    model = frozen(256, 512, bias=False)
    nc.quantize_frozen(model)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        model(torch.randn(1, 256, requires_grad=True))
    assert sum(t.nbytes for t in kept) <= 256 * 512 + 4 * 512


def test_second_derivatives_and_transforms_go_through():
    model = frozen()
    nc.quantize_frozen(model)
    twin = twin_of(model)
    x = torch.randn(3, 32)
    vectors = [
        torch.func.vmap(torch.func.jacrev(lambda r, m=m: m(r).sin()))(x) for m in (model, twin)
    ]
    assert torch.allclose(*vectors, rtol=1e-5, atol=1e-6)
    seconds = []
    for each in (model, twin):
        point = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(each(point).sin().sum(), point, create_graph=True)
        seconds.append(torch.autograd.grad(first.square().sum(), point)[0])
    assert torch.allclose(*seconds, rtol=1e-5, atol=1e-6)


def test_only_frozen_weights_that_nobody_shares_are_kept():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(10, 16)
            self.tied = nn.Linear(16, 10, bias=False)
            self.tied.weight = self.embedding.weight
            self.norm = nn.LayerNorm(16)
            self.frozen = nn.Linear(16, 16)
            self.trained = nn.Linear(16, 16)
            self.left = nn.ModuleDict({"inside": nn.Linear(16, 16)})
            self.lm_head = nn.Linear(16, 10)
            self.attention = nn.MultiheadAttention(16, 2)

    model = Model().requires_grad_(False)
    model.trained.requires_grad_(True)
    found = nc.quantize_frozen(model, skip=("le*",))
    assert found.keys() == {"frozen"}
    assert [n for n, m in model.named_modules() if isinstance(m, QuantizedFrozenLayer)] == [
        "frozen"
    ]


def test_the_largest_weight_stays_finite():
    model = frozen(2, 1, bias=False)
    model[0].weight.data = torch.tensor([[2.9e38, 0.0]])
    nc.quantize_frozen(model)
    assert model[0].weight.tolist() == [[pytest.approx(2.9e38, rel=2**-4), 0.0]]


def test_casts_leave_bytes_and_scales_alone():
    model = frozen()
    nc.quantize_frozen(model)
    before = model[0].weight.clone()
    bytes_before = model[0].weight_e4m3.data.view(torch.uint8).clone()
    model.half().bfloat16().to("cpu", torch.float64)
    assert model[0].weight_e4m3.dtype == torch.float8_e4m3fn
    assert model[0].weight_scale.dtype == torch.float32
    assert torch.equal(model[0].weight_e4m3.data.view(torch.uint8), bytes_before)
    assert torch.equal(model[0].weight, before)
    assert model[0].bias.dtype == torch.float64


@pytest.mark.gpu
def test_bytes_move_to_a_gpu_and_back(cuda):
    model = frozen()
    nc.quantize_frozen(model)
    before = model[0].weight.clone()
    model.to(cuda, torch.bfloat16)
    assert model[0].weight_e4m3.is_cuda
    assert model[0].weight_scale.is_cuda
    assert torch.equal(model[0].weight.cpu(), before)  # by the kernel, there
    assert torch.equal(model.cpu()[0].weight, before)


def test_a_matrix_that_is_cast_piece_by_piece_is_the_same(monkeypatch):
    whole, pieces = frozen(40, 33), frozen(40, 33)
    expected = nc.quantize_frozen(whole)
    monkeypatch.setattr(quantized_frozen, "_PIECE", 7 * 40)
    assert nc.quantize_frozen(pieces) == {"0": pytest.approx(expected["0"], rel=1e-9)}
    assert torch.equal(pieces[0].weight, whole[0].weight)
    assert torch.equal(pieces[0].weight_scale, whole[0].weight_scale)


@pytest.mark.gpu
def test_weights_are_let_go_layer_by_layer(cuda):
    layers = [nn.Linear(2048, 2048, False, cuda, torch.bfloat16) for _ in range(16)]
    model = nn.Sequential(*layers).requires_grad_(False)
    del layers
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    nc.quantize_frozen(model)
    one = 2048 * 2048
    # One layer in fp32, its error, and its casts; of sixteen in bf16.
    assert torch.cuda.max_memory_allocated() < before + 20 * one
    assert torch.cuda.memory_allocated() < before - 15 * one


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: saved_and_loaded(m)])
def test_a_copy_is_kept_as_well_and_shares_nothing(copied):
    model = frozen()
    nc.quantize_frozen(model)
    twin = copied(model)
    assert isinstance(twin[0], QuantizedFrozenLayer)
    x = torch.randn(3, 32)
    assert torch.equal(twin(x), model(x))
    twin[0].weight_scale *= 2
    assert not torch.equal(twin(x), model(x))


def test_a_state_holds_the_bytes_and_passes_through_safetensors(tmp_path):
    model, other = frozen(seed=0), frozen(seed=1)
    nc.quantize_frozen(model)
    nc.quantize_frozen(other)
    save_file(model.state_dict(), tmp_path / "kept.safetensors")
    read = load_file(tmp_path / "kept.safetensors")
    assert {name: t.dtype for name, t in read.items()} == {
        "0.weight_e4m3": torch.float8_e4m3fn,
        "0.weight_scale": torch.float32,
        "0.bias": torch.float32,
    }
    known = model[0].quantized.snr_db
    other.load_state_dict(read)
    model.load_state_dict(read)
    x = torch.randn(3, 32)
    assert torch.equal(other(x), model(x))
    assert model[0].quantized.snr_db == known
    assert other[0].quantized.snr_db is None  # was of the other weight


def test_a_state_with_nan_is_refused():
    model = frozen()
    nc.quantize_frozen(model)
    state = copy.deepcopy(model.state_dict())
    state["0.weight_e4m3"].view(torch.uint8)[3, 4] = 0xFF
    with pytest.raises(CheckpointError, match=r"0\.weight_e4m3 contains NaN"):
        model.load_state_dict(state)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 3.2e38])
def test_what_is_not_finite_is_refused_by_name_before_anything_is_changed(bad):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).requires_grad_(False)
    model[1].weight[2, 3] = bad
    with pytest.raises(UnsupportedError, match=r"weight of 1 has values that e4m3 cannot store"):
        nc.quantize_frozen(model)
    assert all(type(layer) is nn.Linear for layer in model)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda m: nc.quantize_frozen(m, "int8"),
            "only supports e4m3, got int8",
        ),
        (lambda m: nc.quantize_frozen(m, products="narrow"), "products must be auto, fp8 or wide"),
        (lambda m: nc.quantize_frozen(m, skip=("1",)), "skip: '1' matches no module"),
        (
            lambda m: nc.quantize_frozen(m.requires_grad_(True)),
            "no linear layer with a frozen weight",
        ),
    ],
)
def test_what_cannot_be_is_refused(call, message):
    with pytest.raises(ConfigError, match=message):
        call(frozen())


def test_a_weight_that_is_written_to_makes_a_plain_layer(caplog):
    model = frozen()
    nc.quantize_frozen(model)
    expected = model[0].weight + 1
    with caplog.at_level("INFO"):
        model[0].weight.data += 1
    assert type(model[0]) is nn.Linear
    assert torch.equal(model[0].weight, expected)
    assert isinstance(model[0].weight, nn.Parameter)
    assert not model[0].weight.requires_grad
    assert "it is now a plain weight in torch.float32" in caplog.text
    assert model.state_dict().keys() == {"0.weight", "0.bias"}


@pytest.mark.parametrize("write", [lambda w: w.add_(1), lambda w: w.__setitem__(0, 1.0)])
def test_a_write_that_would_be_lost_is_refused(write):
    model = frozen()
    nc.quantize_frozen(model)
    with pytest.raises(UnsupportedError, match="cannot be written to"):
        write(model[0].weight)


def trained_beside(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def test_a_prepared_model_is_not_merged_into():
    model = nn.Sequential(frozen()[0], nn.Linear(48, 4))
    nc.quantize_frozen(model)
    run = nc.prepare(model, trained_beside(model), policy="fp32")
    with pytest.raises(UnsupportedError, match="while its model is prepared"):
        model[0].weight.data += 1
    twin = copy.deepcopy(model)  # of a prepared model is the one it was
    assert type(twin[0]) is type(run.release()[0])
    model[0].weight.data += 1
    assert torch.equal(model[0].weight, twin[0].weight + 1)


@pytest.mark.parametrize("thawed", [True, False])
def test_what_is_kept_is_not_trained(thawed):
    model = nn.Sequential(frozen()[0], nn.Linear(48, 4))
    nc.quantize_frozen(model)
    model.requires_grad_(thawed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="weight of 0 is stored in e4m3 and cannot be trained"):
        nc.prepare(model, optimizer, policy="fp32")


def test_a_weight_that_somebody_computes_is_left_alone():
    model = nn.Sequential(frozen()[0], nn.utils.parametrizations.weight_norm(nn.Linear(48, 4)))
    model.requires_grad_(False)
    assert nc.quantize_frozen(model).keys() == {"0"}


def test_what_is_given_back_has_the_dtype_asked_for():
    model = frozen(dtype=torch.bfloat16)
    nc.quantize_frozen(model)
    twin = twin_of(model, torch.float32)
    assert twin[0].weight.dtype == torch.float32
    # bf16 holds all that e4m3 kept.
    assert torch.equal(twin[0].weight, twin_of(model)[0].weight.float())


def test_a_model_without_numbers_is_kept_for_its_plan():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(32, 48)).requires_grad_(False)
    assert nc.quantize_frozen(model) == {}
    assert model[0].weight_e4m3.is_meta
    assert model[0].weight.shape == (48, 32)


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _multiplies_bf16():
    return nc.detect_hardware("cpu").support("bf16").how == "native"


@pytest.mark.parametrize("backend", [None, "aot_eager_decomp_partition"])
def test_only_bytes_of_a_kept_weight_wait_for_the_backward_pass(backend):
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 48, bias=False), nn.ReLU())
    model[1].requires_grad_(False)
    nc.quantize_frozen(model)
    run = nc.prepare(model, torch.optim.SGD(model[0].parameters(), lr=0.1), policy="fp32")
    called, saved = model if backend is None else torch.compile(model, backend=backend), []

    def note(tensor):
        saved.append((tuple(tensor.shape), tensor.dtype))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = called(torch.randn(4, 32)).sum()
    run.step(loss)
    assert ((48, 32), torch.float8_e4m3fn) in saved
    assert not {((48, 32), torch.float32), ((32, 48), torch.float32)} & set(saved)
