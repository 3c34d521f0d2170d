"""Products of kept weights in narrow formats, against plain layers, torch's casts and peft."""

import copy
import gc

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import narrowcast as nc
from narrowcast.precision.fp8.quantized_frozen_products import QuantizedFrozenProducts
from narrowcast.precision.quantized_frozen import QuantizedFrozenLayer

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Adapted(nn.Module):
    """A frozen layer between two that are trained."""

    def __init__(self, width=32):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(16, width)
        self.base = nn.Linear(width, 48).requires_grad_(False)
        self.last = nn.Linear(48, 16)

    def forward(self, x):
        return self.last(self.base(self.first(x)))


def prepared(model, policy, **options):
    weights = [p for p in model.parameters() if p.requires_grad]
    return nc.prepare(model, torch.optim.SGD(weights, lr=0.1), policy=policy, **options)


def gradients(model, run, device="cpu"):
    x = torch.randn(6, 16, generator=torch.Generator().manual_seed(1)).to(device)
    with run.autocast():
        output = model(x)
        loss = output.float().square().sum()
    run.backward(loss)
    return output.detach(), [p.grad.clone() for p in run.engine.weights.all]


@pytest.mark.parametrize(
    "policy", ["fp32", "tf32", "bf16", "fp16", "bf16; base: fp32", "bf16-pure"]
)
def test_outputs_and_gradients_are_those_of_a_plain_layer_with_the_same_numbers(policy, guarded):
    model = Adapted()
    nc.quantize_frozen(model)
    twin = copy.deepcopy(model)
    nc.dequantize_frozen(twin)
    mine = gradients(model, prepared(model, policy))
    plain = gradients(twin, prepared(twin, policy))
    assert torch.equal(mine[0], plain[0])
    assert all(map(torch.equal, mine[1], plain[1]))


@pytest.mark.parametrize("policy", ["fp8-row", "fp8-tensor", "fp8-delayed", "fp8-block"])
def test_fp8_products_multiply_the_bytes_with_inputs_scaled_by_row(policy, guarded):
    model = Adapted()
    nc.quantize_frozen(model)
    twin = copy.deepcopy(model)
    nc.dequantize_frozen(twin)
    # Kept weights are scaled by row whatever the policy; their bytes rounded again are the same.
    run, other = prepared(model, policy), prepared(twin, "fp8-row")
    assert isinstance(model.base, QuantizedFrozenProducts)
    x = torch.randn(6, 32)
    with run.autocast(), torch.no_grad():
        mine = model.base(x)
    with other.autocast(), torch.no_grad():
        assert torch.equal(mine, twin.base(x))


@pytest.mark.parametrize(("target", "largest"), [("e5m2", 57344.0), ("e4m3", 448.0)])
def test_a_gradient_is_scaled_by_output_and_cast_by_row(target, largest, guarded):
    model = Adapted()
    nc.quantize_frozen(model)
    codes, scale = model.base.weight_e4m3.double(), model.base.weight_scale.double()
    roles = f"forward=e4m3, grad_input={target}, grad_weight=e5m2, scaling=row"
    run = prepared(model, f"fp32; base: {roles}")
    x = torch.randn(5, 32, requires_grad=True)
    grad = torch.randn(5, 48).bfloat16().float()
    with run.autocast():
        output = model.base(x)
    (found,) = torch.autograd.grad(output, x, grad.to(output.dtype))
    scaled = grad.double() * scale
    power = 2.0 ** torch.floor(torch.log2(largest / scaled.abs().amax(1, keepdim=True)))
    dtype = {"e5m2": torch.float8_e5m2, "e4m3": torch.float8_e4m3fn}[target]
    cast = (scaled * power).to(dtype).double() / power
    # The sum in fp32, then bf16: half a unit of its last place, and the order of summation.
    expected = cast @ codes
    assert torch.allclose(found.double(), expected, rtol=2**-8, atol=2**-16)


class Counted(TorchDispatchMode):
    """Counts the products that torch itself makes of fp8 operands."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += func.overloadpacket is torch.ops.aten._scaled_mm
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("backward", "calls"), [("e5m2", 2), ("e4m3", 2), ("bf16", 1)])
def test_products_of_torch_are_the_emulated_ones(backward, calls):
    """On a CPU torch multiplies fp8 too, slowly, and so tells whether operands are put right."""
    roles = f"forward=e4m3, grad_input={backward}, grad_weight={backward}, scaling=row"
    results = []
    for native in (True, False):
        model = Adapted(64)
        nc.quantize_frozen(model)
        run = prepared(model, f"fp32; base: {roles}")
        model.base.nc_native = native
        with Counted() as counted:
            results.append(gradients(model, run))
        assert counted.calls == (calls if native else 0)
    for mine, other in zip(*[(r[0], *r[1]) for r in results], strict=True):
        # Rounded to bf16 after each product; sums may differ in their order.
        assert (mine - other).norm() <= 2**-7 * other.norm()


def test_a_compiled_model_has_the_products_in_its_graph():
    model = Adapted()
    nc.quantize_frozen(model)
    run = prepared(model, "fp32")
    eager = gradients(model, run)
    run.zero_grad()
    compiled = gradients(torch.compile(model, backend="aot_eager", fullgraph=True), run)
    assert torch.equal(eager[0], compiled[0])
    assert all(map(torch.equal, eager[1], compiled[1]))


@pytest.mark.gpu
@pytest.mark.parametrize("backward", ["e5m2", "e4m3", "bf16"])
def test_native_products_are_the_emulated_ones(cuda, backward):
    if torch.cuda.get_device_capability(cuda) < (8, 9):
        pytest.skip("needs a GPU of compute capability 8.9")
    roles = f"forward=e4m3, grad_input={backward}, grad_weight={backward}, scaling=row"
    results = []
    for emulate in (None, True):
        model = Adapted(64).to(cuda)
        nc.quantize_frozen(model)
        weights = [p for p in model.parameters() if p.requires_grad]
        hardware = nc.detect_hardware("cuda")
        plan = nc.plan(
            model, f"bf16; base: {roles}", hardware=hardware, emulate=emulate, skip_slow_fp8=False
        )
        run = nc.prepare(model, torch.optim.SGD(weights, lr=0.1), policy=plan)
        assert model.base.nc_native == (emulate is None)
        results.append(gradients(model, run, device=cuda))
    for mine, other in zip(*[(r[0], *r[1]) for r in results], strict=True):
        # Both are rounded to bf16 after each product; sums differ in their order.
        error = (mine.float() - other.float()).norm() / other.float().norm()
        assert error < 2**-7


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_kept_layer_computes_as_the_eager_one(cuda):
    model = Adapted(64).to(cuda)
    nc.quantize_frozen(model, products="wide")
    run = prepared(model, "bf16")
    eager = gradients(model, run, device=cuda)
    run.zero_grad()
    model.base.compile()
    compiled = gradients(model, run, device=cuda)
    for mine, other in zip((eager[0], *eager[1]), (compiled[0], *compiled[1]), strict=True):
        error = (mine.float() - other.float()).norm() / other.float().norm()
        assert error < 2**-7


@pytest.mark.parametrize("device", DEVICES)
def test_an_island_of_fp32_is_one(device):
    model = Adapted().to(device)
    nc.quantize_frozen(model)
    run = prepared(model, "bf16", emulate=True)
    x = torch.randn(4, 32, device=device)
    exact = nn.functional.linear(x, model.base.weight.data, model.base.bias)
    with run.autocast(), torch.autocast(torch.device(device).type, enabled=False):
        assert torch.equal(model.base(x), exact)


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=32,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def with_adapters(model):
    layers = ["c_attn", "c_proj"] if isinstance(model, GPT2LMHeadModel) else ["q_proj", "down_proj"]
    torch.manual_seed(1)
    fan = isinstance(model, GPT2LMHeadModel)
    config = LoraConfig(r=4, target_modules=layers, init_lora_weights=False, fan_in_fan_out=fan)
    return get_peft_model(model, config)


MODELS = pytest.mark.parametrize("build", [llama, gpt2])
TOKENS = torch.arange(32).view(2, 16)


@MODELS
@pytest.mark.parametrize("first", ["adapters", "kept"])
def test_adapters_of_peft_compute_as_on_plain_layers_in_either_order(build, first):
    if first == "kept":
        base = build().requires_grad_(False)
        found = nc.quantize_frozen(base)
        model = with_adapters(base)
    else:
        model = with_adapters(build())
        found = nc.quantize_frozen(model)
    assert len(found) == (8 if build is gpt2 else 14)
    assert all(30 < snr_db < 33 for snr_db in found.values())  # 3 bits: 6.02 · 4 + 7.5 or so
    assert all(p.dtype == torch.float32 for p in model.parameters() if p.requires_grad)
    twin = copy.deepcopy(model)
    nc.dequantize_frozen(twin)
    results = []
    for each in (model, twin):
        loss = each(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        results.append([loss, *(p.grad for p in each.parameters() if p.requires_grad)])
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("policy", ["bf16", "fp8-row"])
def test_passes_that_are_run_again_and_generation_are_as_without(policy, guarded):
    results = []
    for again in (False, True):
        model = with_adapters(llama())
        if again:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        nc.quantize_frozen(model)
        model.train()
        run = prepared(model, policy)
        with run.autocast():
            loss = model(input_ids=TOKENS, labels=TOKENS).loss
        run.backward(loss)
        grads = [p.grad.clone() for p in run.engine.weights.all]
        model.eval()
        told = model.generate(input_ids=TOKENS[:, :4], max_new_tokens=3, do_sample=False)
        results.append([loss.detach(), told, *grads])
    assert all(map(torch.equal, *results))


@MODELS
@pytest.mark.parametrize("safe", [True, False])
def test_peft_merges_into_what_was_kept(build, safe):
    model = with_adapters(build())
    nc.quantize_frozen(model)
    expected = model(input_ids=TOKENS).logits
    merged = model.merge_and_unload(safe_merge=safe)
    assert torch.allclose(merged(input_ids=TOKENS).logits, expected, atol=1e-5)
    nc.dequantize_frozen(merged)  # what had no adapter
    assert not any(isinstance(m, QuantizedFrozenLayer) for m in merged.modules())
    assert torch.allclose(merged(input_ids=TOKENS).logits, expected, atol=1e-5)
    assert merged.state_dict().keys() == build().state_dict().keys()


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16", "fp8-row", "bf16, params=bf16"])
def test_adapters_on_a_kept_base_train_are_saved_and_released(policy, guarded, same_state):
    model = with_adapters(llama())
    nc.quantize_frozen(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    run = nc.prepare(
        model, torch.optim.AdamW(trained, lr=3e-2), policy=policy, ema_decay=0.9, clip_norm=1.0
    )
    before = copy.deepcopy(
        {n: t for n, t in model.state_dict().items() if n.endswith(("e4m3", "scale"))}
    )
    losses = []
    for _ in range(10):
        with run.autocast():
            loss = model(input_ids=TOKENS, labels=TOKENS).loss
        assert run.step(loss).applied
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.1
    after = model.state_dict()
    assert all(
        torch.equal(after[n].view(torch.uint8), t.view(torch.uint8)) for n, t in before.items()
    )
    saved = copy.deepcopy(run.state_dict())
    run.load_state_dict(saved)
    assert same_state(run.state_dict()["optimizer"], saved["optimizer"])
    assert run.ema_state_dict().keys() == run.fp32_state_dict().keys() == after.keys()
    run.set_policy("fp32")
    plain = run.release()
    assert not any(isinstance(m, QuantizedFrozenProducts) for m in plain.modules())
    assert isinstance(plain.base_model.model.model.layers[0].mlp.up_proj, QuantizedFrozenLayer)
    assert plain(input_ids=TOKENS, labels=TOKENS).loss.isfinite()


@pytest.mark.gpu
@pytest.mark.parametrize("products", ["wide", "fp8"])
def test_a_kept_base_takes_half_the_memory_of_a_bf16_one_on_a_gpu(cuda, products):
    def peak(kept):
        torch.manual_seed(0)
        gc.collect()
        others = torch.cuda.memory_allocated()  # of tests before this one
        with cuda:
            layers = [nn.Linear(2048, 2048, bias=False, dtype=torch.bfloat16) for _ in range(16)]
            model = nn.Sequential(*layers).requires_grad_(False)
        if kept:
            nc.quantize_frozen(model, products=products)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        x = torch.randn(64, 2048, device=cuda, dtype=torch.bfloat16, requires_grad=True)
        model(x).sum().backward()
        return torch.cuda.max_memory_allocated() - others

    assert peak(kept=True) < 0.75 * peak(kept=False)
