"""Which modules are compiled, and that a model stays what it is."""

import functools
import shutil

import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast.config.sections import DataSection, Recipe, Section
from narrowcast.hardware import Hardware
from narrowcast.precision.plan.memory import repeated_blocks
from narrowcast.precision.plan.plan import make_plan
from narrowcast.training.step.stepping import compiled
from narrowcast.workloads.lm.model import build_gpt
from narrowcast.workloads.lm.settings import LmModel

LAYERS = 3
# torch's tracer looks at the gradient of whatever it meets, and hides the warning only from a log.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")


def gpt():
    settings = LmModel(layers=LAYERS, width=16, heads=2)
    return build_gpt(settings, vocab=32, length=8, seed=0, device=torch.device("cpu"))


TOKENS = torch.arange(16).view(2, 8)
WANTED, UNWANTED = (
    Recipe(
        workload="lm", steps=1, batch_size=1, data=DataSection(), model=Section(), compile=wanted
    )
    for wanted in (True, False)
)


def compiled_modules(model):
    """Those that torch would run compiled."""
    return [m for m in model.modules() if m._compiled_call_impl is not None]


@pytest.fixture
def graphs(monkeypatch):
    """Let `compile` trace and count, and run what it traced as it is."""
    torch._dynamo.reset()
    traced = []

    def backend(graph, inputs):
        traced.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    yield traced
    torch._dynamo.reset()


def test_the_blocks_of_a_gpt_are_found_and_nothing_else():
    model = gpt()
    found = [block for _, block in repeated_blocks(model)]
    assert len(found) == LAYERS
    assert all(a is b for a, b in zip(found, model.blocks, strict=True))


def stack(*modules):
    return nn.Sequential(*modules)


MODELS = {
    "no list": (lambda: nn.Linear(2, 2), []),
    "a list of one": (lambda: stack(nn.ModuleList([nn.Linear(2, 2)])), []),
    "a list of different ones": (lambda: nn.ModuleList([stack(nn.Linear(2, 2), nn.ReLU())]), []),
    "a list inside": (
        lambda: stack(stack(nn.Linear(2, 2), nn.Linear(2, 2)), nn.ReLU()),
        ["0.0", "0.1"],
    ),
    "lists in lists": (
        lambda: stack(nn.ModuleList([stack(nn.ReLU(), nn.ReLU()), stack(nn.ReLU(), nn.ReLU())])),
        ["0.0", "0.1"],
    ),
    "two lists": (
        lambda: nn.ModuleDict(
            {
                "encoder": nn.ModuleList([nn.ReLU(), nn.ReLU()]),
                "decoder": nn.ModuleList([nn.Tanh(), nn.Tanh()]),
            }
        ),
        ["encoder.0", "encoder.1", "decoder.0", "decoder.1"],
    ),
}


@pytest.mark.parametrize(("build", "names"), MODELS.values(), ids=MODELS)
def test_the_outermost_lists_of_modules_of_one_class_are_blocks(build, names):
    model = build()
    found = list(repeated_blocks(model))
    assert [name for name, _ in found] == names
    assert all(model.get_submodule(name) is block for name, block in found)


def test_nothing_is_compiled_that_was_not_asked_for(graphs):
    model = gpt()
    assert compiled(model, UNWANTED) is model
    model(TOKENS)
    assert compiled_modules(model) == []
    assert graphs == []


def test_names_and_weights_stay_what_they_are(graphs):
    model, plain = gpt(), gpt().state_dict()
    kinds = [type(m) for m in model.modules()]
    assert compiled(model, WANTED) is model
    assert list(model.state_dict()) == list(plain)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in plain.items())
    assert [type(m) for m in model.modules()] == kinds


def test_every_block_runs_compiled_and_computes_what_it_did(graphs):
    model, plain = gpt(), gpt()
    compiled(model, WANTED)
    assert compiled_modules(model) == list(model.blocks)
    # Not bit for bit: torch traces a norm as its parts.
    torch.testing.assert_close(model(TOKENS), plain(TOKENS))
    assert graphs


def test_a_model_without_blocks_is_compiled_whole(graphs):
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = Doubled(4, 4)
    compiled(model, WANTED)
    assert compiled_modules(model) == [model]
    model(torch.ones(2, 4))
    assert len(graphs) == 1


def test_the_compiler_sees_one_of_many_blocks_that_are_alike(graphs):
    model = gpt()
    compiled(model, WANTED)
    model(TOKENS)
    assert len(graphs) == 1


class Blocks(nn.Module):
    """Blocks of one linear layer each."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16)) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_blocks_are_compiled_for_every_policy_and_not_again_when_it_returns(graphs):
    model, hardware = Blocks(), Hardware(device="cpu", name="any CPU", memory_bytes=2**30)
    planned = make_plan(model, "fp32", hardware=hardware)
    run = nc.prepare(model, torch.optim.AdamW(model.parameters()), policy=planned)
    compiled(model, WANTED)
    policies = ("bf16", "fp8-delayed", "bf16; blocks.1: fp32")
    counts = []
    for policy in policies * 2:
        scale = nc.LossScale(init_scale=256.0)
        run.set_policy(make_plan(model, policy, hardware=hardware), loss_scale=scale)
        with run.autocast():
            loss = model(torch.ones(2, 16)).sum()
        assert run.step(loss).applied
        with torch.no_grad():
            model(torch.ones(2, 16))
        counts.append(len(graphs))
    # To evaluate, to train the first block, whose input has no gradient, and to train the others.
    assert counts[:2] == [3, 6]
    assert counts[2] > 6
    assert counts[3:] == [counts[2]] * 3


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated:DeprecationWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_a_compiled_model_computes_the_loss_and_the_gradients_of_the_plain_one():
    torch._dynamo.reset()
    model, plain = compiled(gpt(), WANTED), gpt()
    targets = TOKENS.roll(-1, -1)
    for each in (model, plain):
        each(TOKENS, targets).backward()
    torch.testing.assert_close(model(TOKENS, targets), plain(TOKENS, targets))
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
