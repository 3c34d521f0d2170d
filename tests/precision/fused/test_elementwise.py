"""Norms, gates and turned heads of transformers' models in one pass, against transformers' own.

On a CPU the kernels run in Triton's interpreter, in fp32; it cuts where a GPU rounds to nearest, so
sums and their gradients are off by twice the roundings.
"""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import SGD

import narrowcast as nc
from narrowcast.errors import UnsupportedError
from narrowcast.hardware import Support
from narrowcast.kernels.launch import interpreted
from narrowcast.precision.fused.elementwise import (
    OnePassGate,
    OnePassGelu,
    OnePassLayerNorm,
    OnePassNorm,
    OnePassTurn,
)
from narrowcast.precision.modules.wrappers import Fp32Norm
from narrowcast.precision.plan.known_modules import (
    RmsNorm,
    gelu_approximation,
    looks_like_a_gelu_written_out,
    match_rms_norm,
    reason_not_gelu,
)
from narrowcast.precision.swap import is_swapped, restore, swap

transformers = pytest.importorskip("transformers")

PIECES = ["rms_norm", "rotary", "swiglu"]
KINDS = {"rms_norm": OnePassNorm, "rotary": OnePassTurn, "swiglu": OnePassGate}
HAVE = {
    "Llama": PIECES, "Mistral": PIECES, "Qwen2": PIECES, "Qwen3": PIECES, "Gemma": PIECES,
    "Gemma2": PIECES, "Gemma3Text": PIECES, "Phi": ["rotary"], "Phi3": PIECES, "SmolLM3": PIECES,
    "Olmo": ["rotary", "swiglu"], "Olmo2": PIECES, "Granite": PIECES,
}  # fmt: skip
TERMS = 128
"""More than are summed anywhere in these models, in a layer; there are six layers to go through."""
ROUNDINGS = 6 * TERMS * 2.0**-23
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def fused(model, fuse, **settings):
    trained = [p for p in model.parameters() if p.requires_grad]
    return nc.prepare(model, SGD(trained, 0.1), fuse=fuse, **{"policy": "fp32"} | settings)


def gradients(model, loss):
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, [p for _, p in named])
    return {name: grad for (name, _), grad in zip(named, found, strict=True)}


def assert_same(found, expected):
    for name, grad in expected.items():
        assert (found[name] - grad).abs().max() <= ROUNDINGS * grad.abs().max(), name


@pytest.mark.interpreted
@pytest.mark.parametrize("family", HAVE)
def test_each_family_computes_what_transformers_does(language_model, sentences, family):
    plain, model = (language_model(family).to(DEVICE) for _ in range(2))
    tokens, labels = (each.to(DEVICE) for each in sentences)
    run = fused(model, HAVE[family])
    for piece in HAVE[family]:
        assert any(isinstance(module, KINDS[piece]) for module in model.modules())
    found, expected = (each(tokens, labels=labels) for each in (model, plain))
    scale = expected.logits.abs().max()
    assert (found.logits - expected.logits).abs().max() <= ROUNDINGS * scale
    assert_same(gradients(model, found.loss), gradients(plain, expected.loss))
    run.release()
    assert not is_swapped(model)
    assert [type(each) for each in model.modules()] == [type(each) for each in plain.modules()]


@pytest.mark.interpreted
def test_an_encoder_and_a_decoder_of_t5_compute_what_transformers_does():
    config = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=97, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(transformers.T5ForConditionalGeneration(config).to(DEVICE).train())
    plain, model = models
    tokens = torch.randint(2, 97, (2, 7), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    run = fused(model, ["rms_norm"])
    norms = [each for each in model.modules() if isinstance(each, OnePassNorm)]
    assert len(norms) == 2 * 2 + 2 * 3 + 2  # of each layer, and after the last
    found, expected = (each(input_ids=tokens, labels=tokens).loss for each in (model, plain))
    assert_same(gradients(model, found), gradients(plain, expected))
    run.release()


@pytest.mark.interpreted
def test_adapters_inside_a_gated_mlp_learn_what_they_would(language_model, sentences):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=2, target_modules=["gate_proj", "down_proj"], init_lora_weights=False
    )
    models = []
    for _ in range(2):
        base = language_model("Llama")
        torch.manual_seed(0)
        models.append(peft.get_peft_model(base, config).to(DEVICE).train())
    plain, model = models
    tokens, labels = (each.to(DEVICE) for each in sentences)
    fused(model, [*PIECES, "loss"])
    found, expected = (each(tokens, labels=labels).loss for each in (model, plain))
    assert_same(gradients(model, found), gradients(plain, expected))


@pytest.mark.interpreted
def test_checkpointed_activations_give_the_same_gradients(language_model, sentences):
    plain, model = (language_model("Llama").to(DEVICE) for _ in range(2))
    tokens, labels = (each.to(DEVICE) for each in sentences)
    model.gradient_checkpointing_enable()
    fused(model, PIECES)
    for each in (model, plain):
        each(tokens, labels=labels, use_cache=False).loss.backward()
    pairs = zip(model.named_parameters(), plain.parameters(), strict=True)
    grads = [(name, p.grad, q.grad) for (name, p), q in pairs]
    assert_same({n: g for n, g, _ in grads}, {n: g for n, _, g in grads})


NORMS = {
    "Llama": RmsNorm(1e-6, 0.0, rounds=True, rounds_to_weight_dtype=True, promotes=True),
    "Gemma": RmsNorm(1e-6, 1.0, rounds=False, rounds_to_weight_dtype=False, promotes=False),
    "Olmo2": RmsNorm(1e-5, 0.0, rounds=False, rounds_to_weight_dtype=False, promotes=False),
    "T5": RmsNorm(1e-6, 0.0, rounds=False, rounds_to_weight_dtype=True, promotes=True),
}


@pytest.mark.pairwise
@pytest.mark.interpreted
@pytest.mark.parametrize("widened", [False, True])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", NORMS)
def test_a_norm_has_the_order_and_the_formats_of_its_own(
    language_model, family, dtype, weight_dtype, widened
):
    of_t5 = transformers.models.t5.modeling_t5.T5LayerNorm
    norm = of_t5(32) if family == "T5" else language_model(family).model.norm
    norm = norm.to(DEVICE, weight_dtype)
    known = match_rms_norm(norm)
    assert known == NORMS[family]
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    expected = norm(x.to(weight_dtype) if widened else x)
    expected = expected.to(dtype) if widened else expected
    kind = {"nc_device": DEVICE, "nc_compiled": False}
    swap(norm, OnePassNorm, nc_norm=known, nc_widened=widened, **kind)
    if widened and weight_dtype not in (torch.float32, dtype):
        pytest.skip("left to the module below, which casts what comes in")
    found = norm(x)
    assert found.dtype == expected.dtype
    # One step of the format where the interpreter cuts: the quotient, and then the product.
    rounded = found.dtype == torch.bfloat16 or (dtype == torch.bfloat16 and known.rounds)
    step = 2.0**-6 if rounded else 2.0**-20
    assert ((found - expected).abs() <= step * expected.abs()).all()
    if DEVICE == "cuda" and rounded:
        assert (found == expected).float().mean() > 0.95  # sums in another order move few
    restore(norm)


class Centred(nn.Module):
    """As some of transformers': its weight and one are added in the weight's own format."""

    def __init__(self, width):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(width)), 1e-6

    def forward(self, x):
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (normed * (1 + self.weight)).type_as(x)


def test_a_norm_is_known_whose_weight_of_16_bits_is_rounded_once_more(monkeypatch):
    monkeypatch.setattr(Centred.forward, "__module__", "transformers.models.somebodys")
    known = RmsNorm(1e-6, 1.0, rounds=False, rounds_to_weight_dtype=False, promotes=False)
    assert match_rms_norm(Centred(32)) == known
    assert match_rms_norm(Centred(32).to(torch.bfloat16)) == known


TORCHS = {
    "layer": lambda: nn.LayerNorm(48, device=DEVICE),
    "rms": lambda: nn.RMSNorm(48, device=DEVICE),
    "rms with an epsilon": lambda: nn.RMSNorm(48, eps=0.1, device=DEVICE),
}


@pytest.mark.interpreted
@pytest.mark.parametrize("widened", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", TORCHS)
def test_a_norm_of_torch_gives_and_learns_what_torchs_does(dtype, widened, kind):
    """Below it is fp32 between 16-bit layers, or what autocast makes of it on a GPU: all fp32."""
    norm, plain = (TORCHS[kind]() for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(5, 48, generator=generator).to(DEVICE, dtype) for _ in range(2)]
    for each in (norm, plain):
        each.weight.data = torch.linspace(-1, 2, 48, device=DEVICE)
        if widened:
            swap(each, Fp32Norm)
    where = {"nc_widened": widened, "nc_device": DEVICE, "nc_compiled": True}
    if kind == "layer":
        swap(norm, OnePassLayerNorm, **where)
    else:
        swap(norm, OnePassNorm, nc_norm=match_rms_norm(norm), **where)
    results = []
    for each in (norm, plain):
        x = drawn[0].clone().requires_grad_()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=each is norm):
            y = each(x if each is norm or widened else x.float())
        y.backward(drawn[1].to(y.dtype))
        results.append((y, x.grad, *[weight.grad for weight in each.parameters()]))
    step = 2.0**-6 if dtype == torch.bfloat16 else 2.0**-18
    for found, expected in zip(*results, strict=True):
        assert found.dtype == expected.dtype
        assert (found - expected).abs().max() <= step * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["gelu_new", "gelu_fast", "gelu_accurate", "gelu_python"])
def test_a_gelu_that_is_written_out_is_one_operation_and_the_same(name, dtype):
    act = transformers.activations.ACT2FN[name]
    assert looks_like_a_gelu_written_out(act)
    assert reason_not_gelu(act) == ""
    drawn = (4 * torch.randn(2, 300, generator=torch.Generator().manual_seed(0))).to(dtype)
    x, exactly = drawn.to(DEVICE).requires_grad_(), drawn.double().requires_grad_()
    expected = act(exactly)
    kind = {"nc_device": DEVICE, "nc_compiled": False}
    swap(act, OnePassGelu, nc_approximation=gelu_approximation(act), **kind)
    found = act(x)
    assert found.dtype == dtype
    assert len(found.grad_fn.next_functions) == 1
    assert "Gelu" in type(found.grad_fn).__name__
    grads = [
        torch.autograd.grad(each.sum(), of)[0] for each, of in ((found, x), (expected, exactly))
    ]
    step = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-20
    for ours, theirs in ((found, expected), grads):
        torch.testing.assert_close(ours.double().cpu(), theirs, rtol=step, atol=step)


class PickyGELU(nn.Module):
    """Somebody's own: it remembers, draws, and wants something else than it would be asked with."""

    asked = 0

    def forward(self, x):
        self.asked += 1
        assert x.dim() == 3, "expects (batch, length, width)"
        return 0.5 * x * (1 + torch.tanh(x + torch.rand(())))


def test_somebody_elses_gelu_is_not_asked():
    model = nn.Sequential(nn.Linear(4, 4), PickyGELU())
    nc.prepare(model, torch.optim.SGD(model.parameters(), 0.1), policy="fp32")
    assert model[1].asked == 0


def test_a_gelu_is_known_where_tensors_have_no_numbers():
    with FakeTensorMode():
        assert looks_like_a_gelu_written_out(act := transformers.activations.ACT2FN["gelu_new"])
        assert gelu_approximation(act) == "tanh"


def test_a_cpu_can_have_a_gelu_as_one_operation():
    model = nn.Sequential(nn.Linear(4, 4), transformers.activations.ACT2FN["gelu_new"])
    run = nc.prepare(model, torch.optim.SGD(model.parameters(), 0.1), policy="fp32", fuse=["gelu"])
    x = torch.randn(3, 4)
    assert "Gelu" in type(model(x).grad_fn).__name__
    assert "fused" in str(run.plan)


@pytest.mark.parametrize("name", ["gelu", "gelu_pytorch_tanh", "silu", "relu"])
def test_an_activation_of_one_operation_is_no_piece(name):
    assert not looks_like_a_gelu_written_out(transformers.activations.ACT2FN[name])


@pytest.mark.interpreted
@pytest.mark.parametrize("name", ["gelu_10", "quick_gelu"])
def test_an_activation_that_is_something_else_is_left_alone_and_told(name):
    act = transformers.activations.ACT2FN[name]
    model = nn.Sequential(nn.Linear(4, 4), act)
    with pytest.raises(UnsupportedError, match=f"{type(act).__name__} is not a GELU"):
        nc.prepare(model, torch.optim.SGD(model.parameters(), 0.1), policy="fp32", fuse=["gelu"])


@pytest.mark.interpreted
def test_a_norm_of_torch_without_a_cast_around_it_is_left_to_torch():
    norm = nn.RMSNorm(8, device=DEVICE)
    where = {"nc_widened": False, "nc_device": DEVICE, "nc_compiled": False}
    swap(norm, OnePassNorm, nc_norm=match_rms_norm(norm), **where)
    x = torch.randn(3, 8, device=DEVICE)
    assert torch.equal(norm(x), nn.functional.rms_norm(x, (8,), norm.weight))
    with pytest.raises(RuntimeError):  # torch's own error for other shapes
        norm(x[:, :4])


@pytest.mark.interpreted
@pytest.mark.parametrize("kind", ["torch", "transformers"])
def test_a_norm_has_the_epsilon_that_it_has_now(kind, language_model):
    norm = nn.RMSNorm(32) if kind == "torch" else language_model("Llama").model.norm
    norm = norm.to(DEVICE)
    model = nn.Sequential(nn.Linear(32, 32, device=DEVICE), norm)
    fused(model, ["rms_norm"])
    x = torch.randn(3, 32, device=DEVICE)
    setattr(norm, "eps" if kind == "torch" else "variance_epsilon", 0.5)
    expected = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 0.5)
    torch.testing.assert_close(norm(x), expected * norm.weight)


class OwnNorm(nn.RMSNorm):
    def forward(self, x):
        return x * self.weight


@pytest.mark.parametrize(
    ("norm", "why"),
    [
        (nn.RMSNorm(8, elementwise_affine=False), "it has no weight"),
        (nn.RMSNorm((2, 4)), "its rows have several dimensions"),
        (nn.RMSNorm(40000), "its rows of 40000 are too wide"),
        (OwnNorm(8), "OwnNorm overrides forward"),
    ],
)
def test_a_norm_of_torch_that_is_something_else_is_not_known(norm, why):
    assert match_rms_norm(norm) == why


@pytest.mark.interpreted
def test_a_layer_norm_runs_as_torchs_where_the_kernel_would_do_something_else():
    norm = torch.nn.LayerNorm(8, device=DEVICE)
    swap(norm, OnePassLayerNorm, nc_widened=False, nc_device=DEVICE, nc_compiled=False)
    x = torch.randn(3, 8, device=DEVICE)
    assert torch.equal(norm(x), torch.nn.functional.layer_norm(x, (8,), norm.weight, norm.bias))
    with pytest.raises(RuntimeError):  # no autocast: torch's own error for two dtypes, or shapes
        norm(x[:, :4])


@pytest.mark.interpreted
def test_transforms_of_torch_func_are_left_to_torch():
    norm = torch.nn.LayerNorm(8, device=DEVICE)
    swap(norm, OnePassLayerNorm, nc_widened=True, nc_device=DEVICE, nc_compiled=True)
    x = torch.randn(3, 8, device=DEVICE)

    def loss(row):
        return norm(row).square().sum()

    found = torch.func.vmap(torch.func.grad(loss))(x)
    restore(norm)
    assert torch.equal(found, torch.func.vmap(torch.func.grad(loss))(x))


def test_layer_norms_are_told_which_are_known():
    class Shifted(torch.nn.LayerNorm):
        def forward(self, x):
            return super().forward(x) + 1

    layers = (
        torch.nn.LayerNorm(4), Shifted(4), torch.nn.LayerNorm(4, elementwise_affine=False),
        torch.nn.LayerNorm((64, 64, 16)),
    )  # fmt: skip
    model, native = torch.nn.Sequential(*layers), Support(how="native", reason="some GPU")
    gpu = nc.Hardware(
        device="cuda:0", name="some GPU", memory_bytes=2**30, products={"bf16": native}
    )
    told = {each.modules: each.reason for each in nc.plan(model, "bf16", hardware=gpu).fused}
    assert told == {
        ("0",): "one pass over memory, except in compiled code",
        ("1",): "Shifted overrides forward",
        ("2",): "it has no weight",
        ("3",): "its rows of 65536 are too wide",
    }
    # On a machine that has no kernels it is no news that there is none for these.
    assert nc.plan(model, "bf16", hardware=nc.detect_hardware("cpu")).fused == ()


class OwnNorm(torch.nn.Module):
    """What is called a norm, and is none that is known."""

    def __init__(self, like):
        super().__init__()
        self.weight, self.variance_epsilon = like.weight, like.variance_epsilon


class OtherRMSNorm(OwnNorm):
    def forward(self, x):
        return self.weight * x


def test_a_norm_of_somebodys_own_is_left_alone_and_told(language_model):
    model = language_model("Llama")
    model.model.norm = OtherRMSNorm(model.model.norm)
    plan = nc.plan(model, "bf16", hardware=nc.detect_hardware("cpu"))
    left = {each.reason: each.modules for each in plan.fused if each.piece == "rms_norm"}
    assert left["OtherRMSNorm overrides forward"] == ("model.norm",)


def test_an_activation_that_has_no_kernel_is_left_alone(language_model):
    model = language_model("Llama", hidden_act="relu")
    plan = nc.plan(model, "fp32", hardware=nc.detect_hardware("cpu"))
    (told,) = [each for each in plan.fused if each.piece == "swiglu"]
    assert told.reason == "LlamaMLP computes something else"


def test_heads_of_neighbours_are_left_alone():
    config = transformers.CohereConfig(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = transformers.CohereForCausalLM(config)
    plan = nc.plan(model, "fp32", hardware=nc.detect_hardware("cpu"))
    (told,) = [each for each in plan.fused if each.piece == "rotary"]
    assert told.reason == "CohereAttention rotates its heads in a different way"


@pytest.mark.skipif(DEVICE == "cuda", reason="needs a machine without kernels")
@pytest.mark.parametrize("piece", PIECES)
def test_without_kernels_a_named_piece_is_refused(language_model, piece):
    with pytest.raises(UnsupportedError, match=r"Triton has no kernels for cpu\. Leave"):
        nc.plan(language_model("Llama"), "fp32", hardware=nc.detect_hardware("cpu"), fuse=[piece])


@pytest.mark.interpreted
def test_an_activation_that_is_watched_is_called(language_model, sentences):
    model = language_model("Llama").to(DEVICE)
    fused(model, ["swiglu"])
    seen = []
    act = model.model.layers[0].mlp.act_fn
    handle = act.register_forward_hook(lambda *given: seen.append(given[2].shape))
    model(sentences[0].to(DEVICE))
    assert seen == [(2, 9, 48)]
    handle.remove()
    model(sentences[0].to(DEVICE))
    assert len(seen) == 1


@pytest.mark.interpreted
@pytest.mark.parametrize("fuse", [PIECES, "auto"])
def test_a_compiler_breaks_nowhere(language_model, sentences, fuse):
    model = language_model("Llama", num_hidden_layers=1).to(DEVICE)
    tokens, labels = (each.to(DEVICE) for each in sentences)
    policy = "fp32" if DEVICE == "cpu" else "bf16"
    run = fused(model, fuse, policy=policy)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with run.autocast():
        found, expected = (
            each(tokens, labels=labels, use_cache=False).loss for each in (compiled, model)
        )
    assert abs(found - expected) <= (ROUNDINGS if policy == "fp32" else 2.0**-7) * expected


def test_a_cpu_is_told_to_have_no_kernels_by_the_plan(language_model):
    if interpreted() or DEVICE == "cuda":
        pytest.skip("needs a machine without kernels")
    plan = nc.plan(language_model("Llama"), "fp32", hardware=nc.detect_hardware("cpu"))
    assert "unfused  loss, mask: on CPU only if fuse names it" in str(plan)
    assert "unfused  rms_norm, rotary, swiglu: Triton has no kernels for cpu" in str(plan)


@pytest.mark.gpu
def test_a_cuda_graph_holds_a_layer(language_model):
    model = language_model("Llama").cuda()
    run = fused(model, "auto", policy="bf16")
    layer, generator = model.model.layers[0], torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(2, 9, 32, device="cuda", generator=generator).requires_grad_()
    angles = torch.randn(2, 1, 9, 8, device="cuda", generator=generator)

    def work():
        with run.autocast():
            result = layer(hidden, position_embeddings=(angles[0], angles[1]))
        return torch.autograd.grad(result.float().square().sum(), [hidden, *layer.parameters()])

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            expected = work()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = work()
    graph.replay()
    for a, b in zip(found, expected, strict=True):
        assert (a - b).abs().max() <= 2.0**-7 * b.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["bf16", "bf16, params=bf16, master=split", "fp8-delayed"])
@pytest.mark.parametrize("family", HAVE)
def test_on_a_gpu_gradients_are_those_of_the_same_policy(language_model, sentences, family, policy):
    tokens, labels = (each.cuda() for each in sentences)
    wide = language_model(family).cuda().double()
    exact = wide(tokens, labels=labels).loss
    exact_grads = gradients(wide, exact)
    errors = []
    for fuse in ("none", "auto"):
        model = language_model(family).cuda()
        run = fused(model, fuse, policy=policy)
        with run.autocast():
            loss = model(tokens, labels=labels).loss
        run.backward(loss)
        assert any(each.fused for each in run.plan.fused) == (fuse == "auto")
        off = [(p.grad.double() - exact_grads[n]).norm() for n, p in model.named_parameters()]
        errors.append((abs(loss.double() - exact).item(), torch.stack(off).norm().item()))
    size = torch.stack([g.norm() for g in exact_grads.values()]).norm().item()
    (plain_loss, plain_grad), (loss_error, grad_error) = errors
    # Fused or not, a format's error is of one size; what is left of it by chance may differ.
    assert loss_error <= 2 * plain_loss + 2.0**-8 * exact.item()
    assert grad_error <= 1.5 * plain_grad + 2.0**-8 * size
