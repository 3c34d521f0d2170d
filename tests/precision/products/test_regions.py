import pytest
import torch
import torch.nn.functional as F
from torch import nn

import narrowcast as nc
from narrowcast.numerics import BF16, FP16, FP32, TF32
from narrowcast.precision.products.modes import EmulatedProducts
from narrowcast.precision.products.regions import Region, tf32_products

pytestmark = pytest.mark.usefixtures("guarded")


def make(seed, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


A, B, V, T = (8, 8), (2, 8, 8), (8,), (2, 4, 8)
PRODUCTS = {
    "mm": (lambda a, b: torch.mm(a, b), A, A),
    "@": (lambda a, b: a @ b, B, A),
    "method matmul": (lambda a, b: a.matmul(b), B, B),
    "method mm": (lambda a, b: a.mm(b), A, A),
    "bmm": (lambda a, b: torch.bmm(a, b), B, B),
    "mv": (lambda a, b: a.mv(b), A, V),
    "dot": (lambda a, b: torch.dot(a, b), V, V),
    "vdot": (lambda a, b: torch.vdot(a, b), V, V),
    "addmm": (lambda a, b: torch.addmm(a, a, b), A, A),
    "addmv": (lambda a, b: torch.addmv(b, a, b), A, V),
    "baddbmm": (lambda a, b: torch.baddbmm(a, a, b), B, B),
    "addbmm": (lambda a, b: torch.addbmm(a[0], a, b), B, B),
    "einsum": (lambda a, b: torch.einsum("bij,jk->bik", a, b), B, A),
    "tensordot": (lambda a, b: torch.tensordot(a, b, 1), B, A),
    "inner": (lambda a, b: torch.inner(a, b), A, A),
    "vecdot": (lambda a, b: torch.linalg.vecdot(a, b), A, A),
    "multi_dot": (lambda a, b: torch.linalg.multi_dot([a, b, a]), A, A),
    "linear": (lambda a, b: F.linear(a, b), B, A),
    "bilinear": (lambda a, b: F.bilinear(a, a, b), A, B),
    "conv1d": (lambda a, b: F.conv1d(a, b[:, :4, :3]), T, B),
    "conv2d": (lambda a, b: F.conv2d(a[None], b[:, :2, None, :3]), T, B),
    "conv_transpose1d": (lambda a, b: F.conv_transpose1d(a, b[:1].expand(4, 8, 8)), T, B),
    "sdpa": (lambda a, b: F.scaled_dot_product_attention(a, b, b), B, B),
    "sdpa causal": (lambda a, b: F.scaled_dot_product_attention(a, b, b, is_causal=True), B, B),
}
PRODUCT_CASES = pytest.mark.parametrize(
    ("function", "left", "right"), PRODUCTS.values(), ids=PRODUCTS
)


@PRODUCT_CASES
@pytest.mark.parametrize("target", [BF16, FP16], ids=lambda f: f.name)
def test_every_functional_product_is_rounded(function, left, right, target):
    a, b = make(0, *left), make(1, *right)
    with EmulatedProducts(target):
        result = function(a, b)
    assert result.dtype == torch.float32
    assert torch.equal(result, result.to(target.dtype).float())
    assert not torch.equal(result, function(a, b))


@pytest.mark.sampled(times=1)
@PRODUCT_CASES
@pytest.mark.parametrize("target", [BF16, FP32, TF32], ids=lambda f: f.name)
def test_no_functional_product_is_native_on_a_sixteen_bit_stream(function, left, right, target):
    a = make(0, *left, dtype=torch.bfloat16).requires_grad_()
    b = make(1, *right, dtype=torch.bfloat16).requires_grad_()
    with EmulatedProducts(target):
        result = function(a, b)
        result.float().sum().backward()
    assert result.dtype == (torch.bfloat16 if target is BF16 else torch.float32)
    assert a.grad.dtype == torch.bfloat16
    assert a.grad.isfinite().all()


@PRODUCT_CASES
def test_an_fp32_region_changes_no_product(function, left, right):
    a, b = make(0, *left), make(1, *right)
    with EmulatedProducts(FP32):
        result = function(a, b)
    torch.testing.assert_close(result, function(a, b), rtol=2.0**-20, atol=2.0**-20)


@pytest.mark.parametrize("name", ["addmm_", "baddbmm_", "addbmm_", "addmv_"])
def test_a_product_in_place_changes_its_tensor_in_the_regions_format(name):
    shapes = {
        "addmm_": (A, A, A),
        "baddbmm_": (B, B, B),
        "addbmm_": (A, B, B),
        "addmv_": (V, A, V),
    }[name]
    target, left, right = (make(i, *shape) for i, shape in enumerate(shapes))
    before = target.clone()
    with EmulatedProducts(BF16):
        expected = getattr(before, name[:-1])(left, right)
        result = getattr(target, name)(left, right)
    assert result is target
    assert torch.equal(target, expected)
    assert torch.equal(target, target.bfloat16().float())


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN], ids=lambda c: c.__name__)
def test_recurrent_layers_are_rounded(layer):
    torch.manual_seed(0)
    built = layer(8, 8)
    with EmulatedProducts(BF16):
        output, _ = built(make(0, 3, 2, 8))
    assert torch.equal(output, output.bfloat16().float())


REDUCTIONS = {
    "softmax": lambda x: F.softmax(x, -1),
    "method softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: torch.log_softmax(x, -1),
    "sum": lambda x: x.sum(),
    "mean": lambda x: torch.mean(x, -1),
    "var": lambda x: x.var(),
    "norm": lambda x: x.norm(),
    "exp": torch.exp,
    "pow": lambda x: x**2,
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "rms_norm": lambda x: F.rms_norm(x, (8,)),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(8, dtype=torch.long)),
    "mse_loss": lambda x: F.mse_loss(x, torch.zeros(8, 8)),
    "cdist": lambda x: torch.cdist(x, x),
    "softplus": F.softplus,
}


@pytest.mark.parametrize("function", REDUCTIONS.values(), ids=REDUCTIONS)
def test_reductions_of_a_sixteen_bit_stream_are_fp32(function):
    x = make(0, 8, 8, dtype=torch.bfloat16)
    with EmulatedProducts(BF16):
        result = function(x)
    assert result.dtype == torch.float32
    assert torch.equal(result, function(x.float()))


def test_what_is_no_product_is_left_alone():
    x = make(0, 8, 8)
    with EmulatedProducts(BF16):
        results = [F.gelu(x), x + x, torch.cat([x, x]), x.sin()]
    expected = [F.gelu(x), x + x, torch.cat([x, x]), x.sin()]
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def test_prelu_takes_weights_of_another_format_than_its_input():
    layer = nn.PReLU().to(torch.bfloat16)
    with EmulatedProducts(BF16):
        result = layer(make(0, 8, 8))
    assert torch.equal(result, F.prelu(make(0, 8, 8), layer.weight.float()))


def test_the_innermost_of_nested_regions_decides():
    a = make(0, *A)
    with EmulatedProducts(BF16):
        with EmulatedProducts(FP32):
            inner = a @ a, F.linear(a, a), F.softmax(a, -1)
        outer = a @ a
    torch.testing.assert_close(inner, (a @ a, F.linear(a, a), F.softmax(a, -1)))
    assert torch.equal(outer, outer.bfloat16().float())


def test_a_region_may_be_entered_inside_itself():
    a = make(0, *A)
    with EmulatedProducts(BF16), EmulatedProducts(BF16):
        twice = a @ a
    with EmulatedProducts(BF16):
        once = a @ a
    assert torch.equal(once, twice)


def test_a_region_ends_where_its_block_ends_even_by_an_error():
    a = make(0, *A)
    with pytest.raises(ValueError, match="on purpose"), EmulatedProducts(BF16):
        raise ValueError("on purpose")
    assert torch.equal(a @ a, torch.matmul(a, a))
    assert not torch.equal(a @ a, (a @ a).bfloat16().float())


def test_a_region_does_not_leak_into_other_threads():
    import threading

    a = make(0, *A)
    seen = []
    with EmulatedProducts(BF16):
        thread = threading.Thread(target=lambda: seen.append(a @ a))
        thread.start()
        thread.join()
    assert torch.equal(seen[0], a @ a)


def test_an_fp32_region_that_is_native_is_nothing_at_all():
    a = make(0, *A)
    with Region("fp32", False, "cpu")():
        assert torch.equal(a @ a, torch.mm(a, a))


def test_the_switch_for_tf32_is_put_back(monkeypatch):
    before = torch.backends.cuda.matmul.fp32_precision
    with tf32_products():
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    assert torch.backends.cuda.matmul.fp32_precision == before


@pytest.mark.parametrize("training", [True, False])
def test_a_transformer_layer_takes_no_fast_path_around_the_region(training):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).train(training)
    x = make(0, 2, 4, 16)
    with torch.no_grad():
        plain = layer(x)
        with EmulatedProducts(BF16):
            rounded = layer(x)
    assert not torch.equal(rounded, plain)
    # Six products whose results keep eight digits, through two norms.
    assert (rounded - plain).norm() < 6 * 2.0**-8 * plain.norm()


def test_reductions_are_rounded_only_where_the_policy_says_so():
    scores = torch.randn(4, 50) * 3
    wide = torch.softmax(scores, -1)
    for reduce, expected in [
        ("fp32", wide),
        ("bf16", torch.softmax(scores.bfloat16().float(), -1).bfloat16().float()),
    ]:
        with Region("bf16", True, "cpu", reduce)():
            assert torch.equal(torch.softmax(scores, -1), expected)


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 32)
        self.qkv = nn.Linear(32, 96)

    def forward(self, tokens):
        q, k, v = self.qkv(self.embed(tokens)).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize("policy", ["bf16", "fp16", "bf16-pure", "fp8-tensor", "aggressive"])
def test_a_model_is_in_its_policy_outside_compute(policy):
    torch.manual_seed(0)
    model = Attending()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = nc.prepare(model, optimizer, policy=policy, emulate=True)
    tokens = torch.randint(0, 16, (2, 8))
    with run.autocast():
        inside = model(tokens)
    assert torch.equal(model(tokens), inside)
    plain = run.release()(tokens)
    assert not torch.equal(plain, inside)
