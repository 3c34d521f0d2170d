"""A model computes in its own policy, however it is entered."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import narrowcast as nc
from narrowcast.precision.products.autocast import active_region

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
POLICIES = [
    "bf16",
    "fp16",
    "tf32",
    "fp8-tensor",
    "bf16, params=bf16, master=split",
    "fp16, params=fp16, master=fp32",
    "bf16; encoder: fp32",
    "fp32; encoder: bf16",
    "bf16; encoder.layers.0: fp32; head: fp16",
]


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.norm = nn.LayerNorm(16)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return self.norm(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = Encoder(), nn.Linear(16, 16)
        self.gain = nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x):
        return self.head(self.encode(x))

    def encode(self, x, *, times: int = 1):
        """Return what the head takes."""
        for _ in range(times):
            x = self.encoder(x) @ self.gain
        return x

    def rows(self, x):
        for row in x:
            yield self.encode(row)


def fresh(policy, **settings):
    torch.manual_seed(0)
    model = Model()
    return nc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy=policy, **settings)


WAYS = {
    "the model": lambda m: m(X),
    "forward": lambda m: m.forward(X),
    "a part": lambda m: m.encoder(X),
    "a layer": lambda m: m.head(X),
    "a layer of a part": lambda m: m.encoder.layers[0](X),
    "another layer of a part": lambda m: m.encoder.layers[1](X),
    "another method": lambda m: m.encode(X, times=2),
}


@pytest.mark.sampled(times=2)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("way", WAYS)
def test_outside_its_passes_a_model_computes_as_inside(policy, way):
    run = fresh(policy)
    with run.autocast():
        inside = WAYS[way](run.model)
    assert active_region() is None
    outside = WAYS[way](run.model)
    assert outside.dtype == inside.dtype
    assert torch.equal(outside, inside)


def test_what_leaves_an_exception_of_16_bits_goes_on_in_the_formats_around_it(cuda):
    # In a native region its tensors are of 16 bits, which no weight of fp32 can be multiplied with.
    model = Model().to(cuda)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run, x = nc.prepare(model, optimizer, policy="fp32; encoder: bf16"), X.to(cuda)
    with run.autocast():
        encoded, loss = model.encoder(x), model(x).square().mean()
    assert encoded.dtype == torch.float32
    assert run.step(loss).applied
    assert torch.isfinite(model(x)).all()


@pytest.mark.pairwise
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("around", ["bf16", "tf32", "fp16", "fp32, params=bf16, master=fp32"])
@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16; head: fp32"])
def test_inside_the_pass_of_another_model_it_is_in_its_own_policy(policy, around, way):
    run, other = fresh(policy), fresh(around)
    with run.autocast():
        alone = WAYS[way](run.model)
    with other.autocast():
        before = WAYS[way](other.model)
        within = WAYS[way](run.model)
        after = WAYS[way](other.model)
    assert torch.equal(within, alone)
    assert torch.equal(before, after)


def test_a_model_in_fp32_is_plain_inside_the_pass_of_another():
    torch.manual_seed(0)
    expected = Model()(X)
    run, other = fresh("fp32"), fresh("bf16")
    with other.autocast():
        assert torch.equal(run.model(X), expected)
        assert torch.equal(run.model(X.bfloat16()), run.model(X.bfloat16().float()))


def test_a_model_that_is_not_prepared_is_in_the_formats_around_it():
    torch.manual_seed(0)
    teacher = Model()
    run = fresh("bf16")
    with run.autocast():
        assert torch.equal(teacher(X), run.model(X))


def test_a_pass_inside_a_pass_puts_back_what_was():
    run, other = fresh("bf16"), fresh("fp16")
    with run.autocast():
        first = run.model(X)
        with other.autocast():
            with run.autocast():
                assert torch.equal(run.model(X), first)
            assert torch.equal(other.model(X), fresh("fp16").model(X))
        assert torch.equal(run.model(X), first)
        with pytest.raises(ValueError, match="stop"), other.autocast():
            raise ValueError("stop")
        assert torch.equal(run.model(X), first)


def test_gradients_are_those_of_the_policy_too():
    def gradients(run, inside):
        if inside:
            with run.autocast():
                loss = run.model.encode(X).square().mean()
        else:
            loss = run.model.encode(X).square().mean()
        run.backward(loss)
        return [p.grad for p in run.model.parameters() if p.grad is not None]

    inside, outside = gradients(fresh("bf16"), True), gradients(fresh("bf16"), False)
    assert all(map(torch.equal, inside, outside))


def test_methods_keep_their_names_and_a_generator_its_own_time():
    run = fresh("bf16")
    assert run.model.encode.__doc__ == Model.encode.__doc__
    rows = list(run.model.rows(X[:2]))
    with run.autocast():
        assert torch.equal(rows[0], run.model.encode(X[0]))


@pytest.mark.parametrize("policy", ["bf16", "bf16, params=bf16, master=split", "fp32"])
def test_a_compiled_part_is_in_its_policy_inside_and_outside(policy):
    run = fresh(policy)
    part = torch.compile(run.model.encoder, backend="aot_eager", fullgraph=True)
    with run.autocast():
        inside, expected = part(X), run.model.encoder(X)
    outside = part(X)
    assert torch.equal(inside, expected)
    assert torch.equal(outside, expected)


def test_threads_are_apart():
    import threading

    run, other = fresh("bf16"), fresh("fp32")
    expected = run.model(X), other.model(X)
    found = {}

    def compute(key, one):
        with one.autocast():
            found[key] = one.model(X)

    with run.autocast():
        thread = threading.Thread(target=compute, args=("other", other))
        thread.start()
        thread.join()
        assert torch.equal(run.model(X), expected[0])
    assert torch.equal(found["other"], expected[1])


class WithIsland(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first, self.island, self.reentrant = nn.Linear(16, 16), nn.Linear(16, 16), reentrant

    def forward(self, x):
        if self.reentrant is None:
            return self.block(x)
        return checkpoint(self.block, x, use_reentrant=self.reentrant)

    def block(self, x):
        h = self.first(x).relu()
        with torch.autocast("cpu", enabled=False):
            return self.island(h.float()) @ self.island.weight


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("policy", ["bf16", "fp16; island: bf16"])
def test_an_island_is_one_where_checkpointing_computes_it_again(policy, inside):
    def gradients(reentrant):
        torch.manual_seed(0)
        model = WithIsland(reentrant)
        run = nc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy=policy)
        with run.autocast():
            loss = model(X.clone().requires_grad_()).float().square().mean()
            if inside:
                run.backward(loss)
        if not inside:
            run.backward(loss)
        return [p.grad for p in model.parameters()]

    plain = gradients(None)
    for reentrant in (False, True):
        assert all(map(torch.equal, plain, gradients(reentrant)))


def test_a_reduced_format_of_sums_is_no_autocast():
    run = fresh("fp32, reduce=bf16; encoder: bf16")
    with run.autocast():
        hidden = run.model.encoder.layers[0](X)
    assert torch.equal(hidden, hidden.bfloat16().float())


def test_a_pass_that_cannot_begin_leaves_nothing_in_force(monkeypatch):
    run = fresh("bf16")
    before = run.model(X)

    def fails():
        raise MemoryError("no room for a copy")

    with monkeypatch.context() as patched:
        patched.setattr(run.engine.buffers, "begin_pass", fails)
        with pytest.raises(MemoryError), run.autocast():
            pass
    assert active_region() is None
    assert not torch.is_autocast_enabled("cpu")
    assert torch.equal(run.model(X), before)


def test_one_pass_object_may_be_entered_inside_itself():
    run = fresh("bf16")
    compute = run.autocast()
    with compute:
        with compute:
            inner = run.model(X)
        assert torch.equal(run.model(X), inner)
    assert active_region() is None


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp8-tensor", "bf16, params=bf16, master=fp32"])
def test_an_exported_program_computes_as_the_model(policy):
    run = fresh(policy)
    exported = torch.export.export(run.model, (X,), strict=False).module()
    assert active_region() is None
    assert torch.equal(exported(X), run.model(X))
