"""Every kind of module under every kind of policy trains, and without native 16-bit products."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import narrowcast as nc
from narrowcast.errors import ConfigError
from narrowcast.precision.modules.rewrite import rewrite
from narrowcast.precision.plan.plan import make_plan

pytestmark = [
    pytest.mark.usefixtures("guarded"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported:UserWarning"),
]


class OwnNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, hidden):
        return self.weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6)


class Doubled(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight * 2, self.bias)


class Calls(nn.Module):
    def __init__(self, function, **modules):
        super().__init__()
        self.function = function
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x):
        return self.function(self, x)


def x(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def ids(*shape):
    return torch.randint(0, 32, shape, generator=torch.Generator().manual_seed(1))


def tied():
    model = nn.Sequential(nn.Embedding(32, 16), nn.LayerNorm(16), nn.Linear(16, 32, bias=False))
    model[2].weight = model[0].weight
    return model


def shared():
    layer = nn.Linear(32, 32)
    return nn.Sequential(layer, nn.Tanh(), layer)


def packed(model, values):
    lengths = torch.tensor([5, 3])
    output, _ = model.a(pack_padded_sequence(values, lengths, batch_first=True))
    return pad_packed_sequence(output, batch_first=True)[0]


def attention(model, values):
    q, k, v = model.a(values).chunk(3, -1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def with_parameter(function, **modules):
    model = Calls(function, **modules)
    model.w = nn.Parameter(x(32, 32) / 8)
    return model


def encoder():
    return nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)


CASES = {
    "linear": (lambda: nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 16)), x(4, 32)),
    "odd linear": (lambda: nn.Linear(17, 5, bias=False), x(3, 17)),
    "conv1d": (lambda: nn.Conv1d(4, 8, 3), x(2, 4, 10)),
    "conv2d": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), x(2, 3, 6, 6)),
    "conv transpose": (lambda: nn.ConvTranspose2d(3, 4, 3), x(2, 3, 6, 6)),
    "embedding": (lambda: nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 4)), ids(3, 4)),
    "embedding bag": (lambda: nn.Sequential(nn.EmbeddingBag(32, 16), nn.Linear(16, 4)), ids(3, 4)),
    "norms": (
        lambda: nn.Sequential(
            nn.Linear(32, 32),
            nn.RMSNorm(32),
            nn.GroupNorm(2, 32),
            nn.BatchNorm1d(32),
            OwnNorm(32),
            nn.LayerNorm(32),
            nn.Linear(32, 4),
        ),
        x(8, 32),
    ),
    "norm of a bf16 stream": (
        lambda: nn.Sequential(nn.Embedding(32, 16), nn.LayerNorm(16), nn.Linear(16, 4)),
        ids(8),
    ),
    "instance norm": (
        lambda: nn.Sequential(
            nn.Conv1d(4, 8, 3), nn.InstanceNorm1d(8, affine=True, track_running_stats=True)
        ),
        x(2, 4, 10),
    ),
    "attention module": (
        lambda: Calls(
            lambda m, v: m.a(v, v, v)[0], a=nn.MultiheadAttention(32, 4, batch_first=True)
        ),
        x(2, 5, 32),
    ),
    "encoder layer": (lambda: nn.Sequential(nn.Linear(8, 32), encoder()), x(2, 5, 8)),
    "functional attention": (lambda: Calls(attention, a=nn.Linear(32, 96)), x(2, 5, 32)),
    "@ and einsum": (
        lambda: with_parameter(lambda m, v: torch.einsum("bi,ij->bj", v @ m.w, m.w.t())),
        x(4, 32),
    ),
    "lstm": (
        lambda: Calls(lambda m, v: m.a(v)[0], a=nn.LSTM(32, 8, 2, batch_first=True)),
        x(2, 5, 32),
    ),
    "packed lstm": (lambda: Calls(packed, a=nn.LSTM(32, 8, batch_first=True)), x(2, 5, 32)),
    "projected lstm": (
        lambda: Calls(lambda m, v: m.a(v)[0], a=nn.LSTM(32, 8, proj_size=4)),
        x(2, 5, 32),
    ),
    "gru": (
        lambda: Calls(lambda m, v: m.a(v)[0], a=nn.GRU(32, 8, bidirectional=True)),
        x(2, 5, 32),
    ),
    "rnn": (lambda: Calls(lambda m, v: m.a(v)[0], a=nn.RNN(32, 8)), x(2, 5, 32)),
    "lstm cell": (lambda: Calls(lambda m, v: m.a(v)[0], a=nn.LSTMCell(32, 8)), x(2, 32)),
    "gru cell": (lambda: Calls(lambda m, v: m.a(v), a=nn.GRUCell(32, 8)), x(2, 32)),
    "bilinear": (lambda: Calls(lambda m, v: m.a(v, v), a=nn.Bilinear(32, 32, 4)), x(3, 32)),
    "prelu": (lambda: nn.Sequential(nn.PReLU(), nn.Linear(32, 4), nn.PReLU()), x(3, 32)),
    "own forward": (lambda: Doubled(32, 32), x(3, 32)),
    "weight norm": (
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(32, 32)), nn.Linear(32, 4)),
        x(3, 32),
    ),
    "older spectral norm": (lambda: spectral_norm(nn.Linear(32, 32)), x(3, 32)),
    "spectral norm": (lambda: parametrizations.spectral_norm(nn.Linear(32, 32)), x(3, 32)),
    "checkpointed": (
        lambda: with_parameter(
            lambda m, v: m.b(checkpoint(lambda t: F.gelu(m.a(t)) @ m.w, v, use_reentrant=False)),
            a=nn.Linear(32, 32),
            b=nn.Linear(32, 4),
        ),
        x(3, 32),
    ),
    "checkpointed bf16 stream": (
        lambda: Calls(
            lambda m, v: m.b(checkpoint(m.a, m.e(v), use_reentrant=False)),
            e=nn.Embedding(32, 32),
            a=nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32)),
            b=nn.Linear(32, 4),
        ),
        ids(3, 4),
    ),
    "tied": (tied, ids(3, 4)),
    "shared": (shared, x(3, 32)),
}
MASTERS = [f"bf16, params=bf16, master={m}" for m in ("fp32", "split", "kahan", "stochastic")]
POLICIES = [
    "fp32", "tf32", "bf16", "fp16", "bf16-pure", "fp8-tensor", "fp8-row", "fp8-delayed",
    "aggressive", *MASTERS, "bf16, params=bf16, grads=fp32", "fp32, params=bf16, master=split",
    "fp16, params=fp16, master=kahan", "bf16, params=bf16, reduce=bf16", "compute=mxfp8",
]  # fmt: skip


def build(name):
    torch.manual_seed(0)
    factory, inputs = CASES[name]
    return factory(), inputs


def loss_of(model, inputs):
    return model(inputs).float().square().mean()


@pytest.mark.sampled(times=4)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", CASES)
def test_every_module_trains_under_every_policy_as_it_does_in_fp32(name, policy):
    model, inputs = build(name)
    keys = list(model.state_dict())
    plain = loss_of(copy.deepcopy(model), inputs).item()
    run = nc.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        policy=policy,
        clip_norm=1.0,
        loss_scale=nc.LossScale(init_scale=256.0) if "fp16" in policy else None,
    )
    before = {name: value.clone() for name, value in run.fp32_state_dict().items()}
    with run.autocast():
        loss = loss_of(model, inputs)
    # A chain of up to eight products, each with operands and result within an eps of exact; the
    # loss is a square, so twice that. e4m3 has an eps of 1/8, the others of 1/128 and less.
    eps = 2.0**-4 if policy.startswith(("fp8", "aggr", "compute=mx")) else 2.0**-8
    assert abs(loss.item() - plain) <= 16 * eps * plain
    assert run.step(loss).applied
    after = run.fp32_state_dict()
    assert any(not torch.equal(before[name], after[name]) for name, _ in model.named_parameters())
    assert list(model.state_dict()) == keys
    model.eval()
    with torch.no_grad(), run.autocast():
        assert model(inputs).isfinite().all()


def test_a_prepared_model_is_not_prepared_again(mlp):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    nc.prepare(model, optimizer, policy="bf16-pure")
    with pytest.raises(ConfigError, match=r"already prepared\..*[Cc]all release\(\)"):
        nc.prepare(model, optimizer, policy="bf16-pure")


def forward_is_on_the_bf16_grid(model, name, inputs):
    seen = []
    handle = model.get_submodule(name).register_forward_hook(lambda *a: seen.append(a[2]))
    model(inputs)
    handle.remove()
    return torch.equal(seen[0].float(), seen[0].bfloat16().float())


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(16, 16)
        self.k = nn.Linear(16, 16)

    def forward(self, values):
        return self.q(values) @ self.k(values).transpose(-1, -2) @ values


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Attention(), Attention()])

    def forward(self, values):
        for block in self.blocks:
            values = block(values)
        return values


EXCEPTIONS = [
    ("bf16", {"blocks.0": True, "blocks.0.q": True, "blocks.1": True}),
    ("bf16; blocks.0: fp32", {"blocks.0": False, "blocks.0.q": False, "blocks.1": True}),
    ("bf16; blocks: fp32", {"blocks.0": False, "blocks.0.q": False, "blocks.1": False}),
    ("bf16; *.q: fp32", {"blocks.0": True, "blocks.0.q": False, "blocks.0.k": True}),
    ("bf16; blocks.0: fp32; blocks.0.q: bf16", {"blocks.0": False, "blocks.0.q": True}),
    ("fp32; blocks.0: bf16", {"blocks.0": True, "blocks.0.q": True, "blocks.1": False}),
    ("fp32; blocks.0: bf16; *.0.q: fp32", {"blocks.0": True, "blocks.0.q": False}),
    ("fp32; *.q: bf16", {"blocks.0": False, "blocks.0.q": True, "blocks.0.k": False}),
    ("bf16, params=bf16, master=split; blocks.0: fp32", {"blocks.0": False, "blocks.1": True}),
]


@pytest.mark.parametrize(("policy", "on_grid"), EXCEPTIONS)
def test_each_module_computes_in_the_format_its_plan_says(policy, on_grid, cpu):
    torch.manual_seed(0)
    model = Blocks()
    planned = make_plan(model, policy, hardware=cpu)
    run = nc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy=planned)
    for name, expected in on_grid.items():
        # The carrier of a bf16 stream is no evidence of what it was computed in.
        with run.autocast():
            assert forward_is_on_the_bf16_grid(model, name, x(3, 16)) is expected, name
    planned = {m.name: m.policy.output_format for m in planned.modules if m.name in on_grid}
    assert planned == {name: "bf16" if on_grid[name] else "fp32" for name in planned}


def test_a_weight_that_two_modules_share_takes_the_wider_format(cpu):
    model = tied()
    planned = make_plan(model, "bf16, params=bf16, master=split; 2: params=fp32", hardware=cpu)
    rewrite(model, planned, set(model.parameters()))
    assert model[0].weight is model[2].weight
    assert model[0].weight.dtype == torch.float32


def test_norms_keep_fp32_weights_among_bf16_ones(cpu):
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.BatchNorm1d(4))
    rewrite(model, make_plan(model, "bf16-pure", hardware=cpu), set(model.parameters()))
    dtypes = {name: value.dtype for name, value in model.state_dict().items()}
    assert dtypes.pop("2.num_batches_tracked") == torch.int64
    assert {dtypes.pop(n) for n in ("0.weight", "0.bias")} == {torch.bfloat16}
    assert set(dtypes.values()) == {torch.float32}


def test_each_narrowed_weight_is_handed_on_with_its_full_value(cpu):
    model = nn.Linear(4, 4)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    narrowed = rewrite(model, make_plan(model, "bf16-pure", hardware=cpu), set(model.parameters()))
    names = {p: name for name, p in model.named_parameters()}
    assert {names[p] for p, _ in narrowed} == {"weight", "bias"}
    assert all(torch.equal(full, before[names[p]]) for p, full in narrowed)


def test_gradients_of_weights_have_the_format_the_policy_names(cpu):
    for grads, dtype in (("", torch.bfloat16), (", grads=fp32", torch.float32)):
        model = nn.Linear(16, 16)
        run = nc.prepare(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            policy=f"bf16, params=bf16, master=split{grads}",
        )
        with run.autocast():
            loss = loss_of(model, x(2, 16))
        run.backward(loss)
        assert model.weight.grad.dtype == dtype


def test_printing_the_model_says_which_layer_has_which_formats():
    model = nn.Sequential(nn.Linear(32, 32), nn.Conv1d(2, 2, 1))
    policy = "fp8-tensor; 1: fp32"
    nc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy=policy)
    text = str(model)
    assert "forward=e4m3, grad_input=e5m2, grad_weight=e5m2, scaling=tensor" in text
    assert "in fp32" in text


def test_a_prepared_module_is_still_an_instance_of_its_class():
    model = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.LSTM(32, 8))
    nc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="aggressive; 2: fp32")
    classes = (nn.Linear, nn.LayerNorm, nn.LSTM)
    assert all(isinstance(m, c) for m, c in zip(model, classes, strict=True))
