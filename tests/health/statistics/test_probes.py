"""What probes take is what passes, in every policy, eager and compiled, and changes nothing."""

import copy
import shutil

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import narrowcast as nc
from narrowcast.errors import ConfigError
from narrowcast.hardware import Hardware
from narrowcast.health.statistics.probes import Probes, _ends_of_chains
from narrowcast.health.statistics.reading import Reading
from narrowcast.health.statistics.sampling import SAMPLE, sample
from narrowcast.precision.fused.fp8_gated_mlp import Fp8GatedMlp
from narrowcast.precision.plan.known_modules import GatedMlp
from narrowcast.precision.swap import restore, swap
from narrowcast.runs import ExponentRecord, HealthRecord

EMULATING = Hardware(device="cpu", name="any CPU", memory_bytes=2**30)

ignore_instances = pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning"
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(32, 64)
        self.norm = nn.LayerNorm(64)
        self.last = nn.Linear(64, 16)

    def forward(self, x):
        return self.last(F.gelu(self.norm(self.first(x))))


class Alike(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


def made(policy="fp32"):
    torch.manual_seed(0)
    model = Net()
    run = nc.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), policy=policy)
    return model, run


def trained(run, probes=None, *, steps=3, model=None):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(48, 32, generator=generator)
        with run.autocast():
            loss = (model or run.model)(x).float().square().mean()
        run.backward(loss)
        if probes is not None:
            probes.weights.take()
        run.step()
    return [p.detach().clone() for p in run.model.parameters()]


def site(probes, module, role):
    (found,) = [s for s in probes.sites if (s.module, s.role) == (module, role)]
    return found


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16", "fp8-tensor", "fp8-delayed"])
def test_a_run_that_is_watched_is_the_run_that_is_not_bit_for_bit(policy):
    plain = trained(made(policy)[1])
    model, run = made(policy)
    watched = trained(run, Probes(model, run.plan))
    assert all(map(torch.equal, plain, watched))


def test_samples_are_of_what_passes_forward_and_backward():
    model, run = made()
    probes = Probes(model, run.plan)
    reference = copy.deepcopy(model)
    restore(reference)
    x = torch.randn(48, 32)
    run.backward(model(x).square().mean())
    probes.weights.take()
    hidden = reference.first(x)
    between = F.gelu(reference.norm(hidden))
    output = reference.last(between)
    (output.square().mean()).backward(inputs=list(reference.parameters()), retain_graph=True)
    grad_hidden, grad_output = torch.autograd.grad(output.square().mean(), (hidden, output))
    expected = {
        ("first", "input"): x,
        ("first", "output"): hidden,
        ("first", "grad_output"): grad_hidden,
        ("first", "weight"): reference.first.weight,
        ("first", "grad_weight"): reference.first.weight.grad,
        ("last", "input"): between,
        ("last", "grad_output"): grad_output,
    }
    for (module, role), tensor in expected.items():
        taken = site(probes, module, role).sample
        assert torch.equal(taken, sample(tensor, probes.offsets.single)), (module, role)


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


def test_an_update_is_what_a_step_changed():
    model, run = made()
    probes = Probes(model, run.plan)
    before = model.first.weight.detach().clone()
    trained(run, probes, steps=1)
    probes.weights.take_updates()
    changed = model.first.weight.detach() - before
    assert torch.equal(
        site(probes, "first", "update").sample, sample(changed, probes.offsets.single)
    )
    assert changed.abs().max() == pytest.approx(1e-2, rel=0.01)  # the first step of AdamW


@ignore_instances
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=needs_compiler)])
def test_a_compiled_model_gives_the_same_samples(backend):
    model, run = made()
    probes = Probes(model, run.plan)
    trained(run, probes, steps=1)
    eager = [s.sample.clone() for s in probes.sites]
    model, run = made()
    probes = Probes(model, run.plan)
    model.compile(backend=backend, fullgraph=True)
    trained(run, probes, steps=1)
    for one, other, each in zip(eager, probes.sites, probes.sites, strict=True):
        assert torch.allclose(one, other.sample, rtol=1e-4, atol=1e-6), (each.module, each.role)


def test_activation_checkpointing_gives_the_same_samples():
    class Checkpointed(Net):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    results = []
    for kind in (Net, Checkpointed):
        torch.manual_seed(0)
        model = kind()
        run = nc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="fp32")
        probes = Probes(model, run.plan)
        trained(run, probes, steps=1)
        results.append([s.sample.clone() for s in probes.sites])
    assert all(map(torch.equal, *results))


def test_an_evaluation_is_not_looked_at():
    model, run = made()
    probes = Probes(model, run.plan)
    with torch.no_grad():
        model(torch.randn(8, 32))
    assert not any(s.sample.any() for s in probes.sites)


def test_a_head_that_is_looked_at_never_makes_its_logits():
    model, run = made()
    probes = Probes(model, run.plan)
    hidden = torch.randn(48, 64, requires_grad=True)
    targets = torch.randint(16, (48,))
    loss = nc.linear_cross_entropy(hidden, model.last, targets, chunk_rows=20)
    taken = {s.role: s.sample.clone() for s in probes.sites if s.module == "last"}
    assert torch.equal(taken["input"], sample(hidden, probes.offsets.single))
    assert not taken["output"].any()
    assert loss.item() == pytest.approx(F.cross_entropy(model.last(hidden), targets).item())


@ignore_instances
def test_switched_off_nothing_is_taken_but_by_what_is_compiled():
    model, run = made()
    probes = Probes(model, run.plan)
    probes.switch.on = False
    trained(run, steps=1)
    assert not any(s.sample.any() for s in probes.sites)
    counter = CompileCounterWithBackend("aot_eager")
    model.compile(backend=counter)
    for on in (False, True, False):
        probes.switch.on = on
        trained(run, steps=1)
    assert site(probes, "first", "grad_output").sample.any()
    assert counter.frame_count == 1


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp8-tensor"])
def test_taken_off_the_probes_leave_nothing(policy):
    model, run = made(policy)
    before = [(type(m), set(m.__dict__)) for m in model.modules()]
    probes = Probes(model, run.plan)
    probes.remove()
    assert [(type(m), set(m.__dict__)) for m in model.modules()] == before
    trained(run)
    assert not any(s.sample.any() for s in probes.sites)


@ignore_instances
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_blocks_that_are_alike_are_compiled_once():
    torch.manual_seed(0)
    # Before them what makes the input of the first, too, one with gradients.
    model = nn.Sequential(nn.Linear(32, 32), *(Alike() for _ in range(5)))
    run = nc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="fp32")
    probes = Probes(model, run.plan)
    compiled = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    for block in model[1:]:
        block.compile(backend=compiled, fullgraph=True)
    trained(run, probes, steps=2)
    assert compiled.frame_count == 1
    assert all(s.sample.any() for s in probes.sites if s.role != "update")


def test_a_reading_tells_every_tensor_in_its_format():
    model, run = made("fp8-tensor")
    probes = Probes(model, run.plan)
    trained(run, probes, steps=2)
    health, *exponents = Reading(probes, step=2, exponents=True).records()
    assert isinstance(health, HealthRecord)
    told = {
        key: (form, snr)
        for key, form, snr in zip(
            zip(health.module, health.role, strict=True), health.format, health.snr_db, strict=True
        )
    }
    assert told["first", "input"][0] == "e4m3"
    assert told["first", "grad_output"][0] == "e5m2"
    assert 25 < told["first", "input"][1] < 40  # three bits of mantissa: about 31 dB
    assert told["last", "output"][0] == "bf16"
    assert 0 < len(exponents) <= 4
    assert all(isinstance(each, ExponentRecord) for each in exponents)
    assert all(0 < sum(each.counts) <= SAMPLE for each in exponents)


def test_a_tensor_that_is_not_finite_is_told_so():
    model, run = made()
    probes = Probes(model, run.plan)
    x = torch.randn(8, 32)
    x[3, 5] = float("nan")
    run.backward(model(x).square().mean())
    (health,) = Reading(probes, step=1).records()
    shares = dict(zip(zip(health.module, health.role, strict=True), health.nonfinite, strict=True))
    assert shares["first", "input"] == pytest.approx(1 / 256, rel=0.01)
    assert shares["first", "output"] > 0


def test_a_reading_before_anything_has_passed_is_empty():
    model, run = made()
    assert Reading(Probes(model, run.plan), step=0).records() == []


class Reused(nn.Module):
    """A layer that is called twice, whose output is changed in place."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x):
        return self.layer(self.layer(x).relu_())


@ignore_instances
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
@pytest.mark.parametrize("backend", ["", pytest.param("inductor", marks=needs_compiler)])
def test_what_is_called_twice_and_changed_in_place_trains_as_without_probes(backend):
    gradients, samples = [], []
    for watched in (False, True):
        torch.manual_seed(0)
        model = Reused()
        run = nc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="fp32")
        probes = Probes(model, run.plan) if watched else None
        if backend:
            model.compile(backend=backend, fullgraph=True)
        run.backward(model(torch.ones(8, 32)).square().sum() + model(torch.ones(8, 32)).sum())
        gradients.append(model.layer.weight.grad)
        samples.append(probes and site(probes, "layer", "grad_output").sample)
    assert torch.allclose(*gradients, rtol=1e-5)
    assert samples[1].any()


def test_a_batch_without_rows_leaves_the_sample_before_it():
    model, run = made()
    probes = Probes(model, run.plan)
    run.backward(model(torch.ones(8, 32)).sum())
    before = [s.sample.clone() for s in probes.sites]
    run.backward(model(torch.ones(0, 32)).sum())
    assert all(map(torch.equal, before, [s.sample for s in probes.sites]))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)
        self.rnn = nn.GRU(8, 8)

    def forward(self, x):
        return self.rnn(input=self.attention(x, x, x)[0])[0]


def test_the_first_tensor_of_several_is_looked_at():
    model = Recurrent()
    planned = nc.plan(model, "fp32", hardware=EMULATING)
    probes = Probes(model, planned)
    model(torch.randn(5, 3, 8)).square().sum().backward()
    assert all(
        site(probes, name, role).sample.any()
        for name in ("attention", "rnn")
        for role in ("input", "output", "grad_output")
    )


def test_a_layer_through_which_no_gradient_flows_is_not_said_to_get_none():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].requires_grad_(False)
    probes = Probes(model, nc.plan(model, "fp32", hardware=EMULATING))
    model(torch.randn(4, 8)).sum().backward()
    (record,) = Reading(probes, step=1).records()
    told = set(zip(record.module, record.role, strict=True))
    assert ("0", "output") in told
    assert ("0", "grad_output") not in told
    assert ("1", "grad_output") in told


def test_a_module_that_returns_no_numbers_is_not_said_to_return_zeros():
    class Codes(nn.Module):
        def __init__(self):
            super().__init__()
            self.book = nn.Parameter(torch.randn(4, 8))

        def forward(self, x):
            return (x @ self.book.T).argmax(1)

    model = nn.Sequential(nn.Linear(8, 8), Codes())
    probes = Probes(model, nc.plan(model, "fp32", hardware=EMULATING))
    model(torch.randn(4, 8))
    (record,) = Reading(probes, step=1).records()
    assert ("1", "output") not in set(zip(record.module, record.role, strict=True))


def test_what_was_read_is_forgotten():
    model, run = made()
    probes = Probes(model, run.plan)
    trained(run, probes, steps=1)
    probes.forget()
    assert Reading(probes, step=2).records() == []


def test_a_replay_leaves_the_samples_of_the_step():
    model, run = made()
    probes = Probes(model, run.plan)
    trained(run, probes, steps=1)
    before = [s.sample.clone() for s in probes.sites]
    nc.explain(run, [torch.full((48, 32), 3.0)], lambda x: model(x).square().mean())
    assert all(map(torch.equal, before, [s.sample for s in probes.sites]))


def test_other_formats_for_a_watched_model_are_refused():
    model, run = made()
    Probes(model, run.plan)
    planned = nc.plan(model, "bf16", hardware=run.plan.hardware)
    with pytest.raises(ConfigError, match=r"set_policy\(\) cannot .* is monitored.*close\(\)"):
        run.set_policy(planned)


def test_a_model_is_not_watched_twice():
    model, run = made()
    Probes(model, run.plan)
    with pytest.raises(
        ConfigError, match=r"monitor\(\) cannot be used while this model is monitored"
    ):
        Probes(model, run.plan)


def test_probes_of_a_model_that_was_released_since_have_nothing_to_take_off():
    model, run = made("fp8-tensor")
    probes = Probes(model, run.plan)
    run.release()
    probes.remove()
    assert {type(m) for m in model.modules()} == {Net, nn.Linear, nn.LayerNorm}


def test_a_gated_chain_is_seen_where_it_begins_and_where_it_ends():
    module = nn.ModuleDict({name: nn.Linear(16, 16) for name in ("gate", "value", "down")})
    swap(module, Fp8GatedMlp, nc_chain=GatedMlp("gate", "value", "down", "silu", "act"))
    seen = {"gate": (module, None), "value": (None, None), "down": (None, module)}
    assert _ends_of_chains(module) == seen
    inside = {f"mlp.{name}": ends for name, ends in seen.items()}
    assert _ends_of_chains(nn.ModuleDict({"mlp": module})) == inside
