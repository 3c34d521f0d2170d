"""A prepared model under `torch.compile`: the same numbers, in one graph."""

import shutil

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

import narrowcast as nc
from narrowcast.numerics import BF16, FP16, TF32
from narrowcast.precision.plan.plan import make_plan
from narrowcast.precision.products.modes import EmulatedProducts

# torch's own tracer makes an instance of every autograd function it meets, and warns of it.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated:DeprecationWarning"),
]
IDS = torch.randint(0, 16, (2, 8), generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 16)
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 16)

    def forward(self, ids):
        x = self.norm(self.embed(ids))
        x = self.up(F.scaled_dot_product_attention(x, x, x, is_causal=True))
        return x @ self.embed.weight.t()


def trained(policy, *, backend=None, steps=2, **settings):
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    if policy == "fp16":
        settings = {"loss_scale": nc.LossScale(init_scale=256.0), **settings}
    run = nc.prepare(model, optimizer, policy=policy, clip_norm=1.0, **settings)
    call = torch.compile(model, backend=backend, fullgraph=True) if backend else model
    outputs = []
    for _ in range(steps):
        with run.autocast():
            output = call(IDS)
            loss = F.cross_entropy(output.flatten(0, 1), IDS.flatten())
        assert run.step(loss).applied
        outputs.append(output.detach().float())
    return outputs, run.fp32_state_dict()


POLICIES = ["fp8-delayed", "bf16, params=bf16, master=split", "bf16; up: fp32"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_traced_model_is_one_graph_with_the_numbers_of_the_eager_one(policy):
    outputs, weights = trained(policy)
    compiled_outputs, compiled_weights = trained(policy, backend="aot_eager")
    assert all(map(torch.equal, outputs, compiled_outputs))
    assert all(torch.equal(compiled_weights[name], value) for name, value in weights.items())


def test_a_traced_part_with_its_own_scale_trains_as_the_eager_one():
    _, weights = trained("fp16", scale_groups=["up"])
    _, compiled = trained("fp16", backend="aot_eager", scale_groups=["up"])
    assert all(torch.equal(compiled[name], value) for name, value in weights.items())


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("target", [BF16, FP16, TF32], ids=lambda f: f.name)
def test_compiled_products_are_rounded_once_and_not_less(target):
    """A compiler may drop a cast there and back, and its code calls products of its own."""

    def products(a, b):
        x = (a * 1.5) @ b + 0.25
        x = F.scaled_dot_product_attention(x[None], b[None], b[None])
        return F.conv1d(x, b[:, :, None])[0] + 0.25

    torch._dynamo.reset()
    a, b = (torch.randn(64, 64, generator=torch.Generator().manual_seed(i)) for i in (0, 1))
    with EmulatedProducts(target):
        eager = products(a, b)
        compiled = torch.compile(products, fullgraph=True)(a, b)
    plain = products(a, b)
    effect = (eager - plain).norm()
    # Sums in another order make a few results round the other way; a rounding too few or too many
    # would show in all of them.
    assert (compiled - eager).norm() < 0.1 * effect


def test_a_policy_that_returns_is_not_compiled_again(cpu):
    torch._dynamo.reset()
    traced = []
    model = Model()
    run = nc.prepare(model, torch.optim.AdamW(model.parameters()), policy="bf16", emulate=True)
    model.compile(backend=lambda graph, _: traced.append(graph) or graph.forward)
    counts = []
    policies = ("bf16", "fp8-delayed", "bf16; up: fp32")
    for policy in policies * 2:
        run.set_policy(make_plan(model, policy, hardware=run.plan.hardware, emulate=True))
        for _ in range(2):
            with run.autocast():
                loss = F.cross_entropy(model(IDS).flatten(0, 1), IDS.flatten())
            assert run.step(loss).applied
        counts.append(len(traced))
    torch._dynamo.reset()
    assert counts == [1, 2, 3, *[3] * 3]


class Turning(nn.Module):
    """Angles in an island, attention by hand outside it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        positions = torch.arange(x.shape[-2], dtype=torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            angles = torch.einsum("i,j->ij", positions, 10000.0 ** (-torch.arange(16) / 16))
        x = self.layer(x * angles.cos())
        return torch.softmax(x @ x.mT, -1) @ x, angles


def test_an_island_is_one_in_a_compiled_model_too_and_no_product_is_native():
    torch._dynamo.reset()
    torch.manual_seed(0)
    graphs = []

    def note(graph, _):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    model, x = Turning(), torch.randn(2, 64, 16)
    run = nc.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), policy="bf16", emulate=True
    )
    compiled = torch.compile(model, backend=aot_autograd(fw_compiler=note), fullgraph=True)
    grads = []
    for call in (model, compiled):
        with run.autocast():
            output, angles = call(x)
            loss = output.pow(2).mean()
        run.backward(loss)
        grads.append((output, *(p.grad.clone() for p in model.parameters())))
        model.zero_grad()
        assert torch.equal(angles, torch.outer(torch.arange(64.0), 1e4 ** (-torch.arange(16) / 16)))
    assert all(map(torch.equal, *grads))
    assert len(graphs) == 2
    products = [n for g in graphs for n in g.graph.nodes if "mm" in str(n.target)]
    assert products
    assert all(a.meta["val"].dtype == torch.float32 for n in products for a in n.all_input_nodes)


# The tracer looks at what a graph goes on with.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN], ids=lambda c: c.__name__)
def test_a_recurrent_layer_is_left_out_of_the_graph_and_computes_as_ever(kind):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = kind(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.head(self.layer(x)[0])

    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Recurrent(), torch.randn(3, 2, 8)
    run = nc.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), policy="bf16", emulate=True
    )
    found = []
    for call in (model, torch.compile(model, backend="aot_eager")):
        with run.autocast():
            output = call(x)
        run.backward(output.pow(2).mean())
        found.append((output, *(p.grad.clone() for p in model.parameters())))
        model.zero_grad()
    assert all(map(torch.equal, *found))
