"""The same overflow in a model with weights of its own and in one that shares them."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import narrowcast as nc
from narrowcast.hardware import Hardware
from narrowcast.health.diagnose.explain import explain, replay
from narrowcast.health.diagnose.passes import ReplayInputs
from narrowcast.health.diagnose.recording import weights_of_several_uses
from narrowcast.health.faults.faults import Fault, Faults
from narrowcast.precision.plan.plan import make_plan
from narrowcast.workloads.lm.model import build_gpt
from narrowcast.workloads.lm.settings import LmModel

EMULATING = Hardware(device="cpu", name="any CPU", memory_bytes=2**30)
WIDTH, WORDS = 16, 24


class Blow(nn.Module):
    """Hands on what it is given; in the backward pass, so many times as much."""

    def __init__(self, factor=1.0):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x.detach() + self.factor * (x - x.detach())


class Language(nn.Module):
    """Words in, words out, with a head that may be the table of words once more."""

    def __init__(self, *, tied):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.blow = Blow()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight if tied else nn.Parameter(self.embed.weight.detach())

    def forward(self, words):
        return self.head(self.blow(torch.tanh(self.middle(self.embed(words)))))


class OwnCode(Language):
    """The same, but the model multiplies with the table itself."""

    def __init__(self, *, tied):
        super().__init__(tied=tied)
        table = self.head.weight
        del self.head
        if not tied:
            self.table = table

    def forward(self, words):
        x = self.blow(torch.tanh(self.middle(self.embed(words))))
        return F.linear(x, self.table if hasattr(self, "table") else self.embed.weight)


class Twins(nn.Module):
    """Two layers of one weight; or one layer, twice."""

    def __init__(self, *, tied, one=False):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.blow = Blow()
        self.head = nn.Linear(WIDTH, WORDS)
        with torch.no_grad():
            for mine, other in zip(self.second.parameters(), self.first.parameters(), strict=True):
                mine.copy_(other)
        if tied:
            self.second.weight = self.first.weight
        if tied and one:
            self.second = self.first

    def forward(self, words):
        x = torch.tanh(self.first(self.embed(words)))
        return self.head(self.blow(torch.tanh(self.second(x))))


class Checkpointed(Language):
    def forward(self, words):
        x = torch.tanh(self.middle(self.embed(words)))
        return checkpoint(lambda x: self.head(self.blow(x)), x, use_reentrant=self.reentrant)


def prepared(model, policy="fp16", scale=1.0):
    settings = nc.LossScale(init_scale=scale, max_scale=2.0**40, min_scale=2.0**-20)
    plan = make_plan(model, policy, hardware=EMULATING)
    optimizer = torch.optim.AdamW(model.parameters())
    return nc.prepare(model, optimizer, policy=plan, loss_scale=settings)


def verdict_on(model, *, policy="fp16", scale=1.0):
    torch.manual_seed(1)
    words, targets = torch.randint(0, WORDS, (2, 64))
    run = prepared(model, policy, scale)
    before = {name: id(p) for name, p in model.named_parameters()}
    found = explain(run, [(words, targets)], lambda b: F.cross_entropy(model(b[0]).float(), b[1]))
    assert {name: id(p) for name, p in model.named_parameters()} == before
    return found


def told(verdict):
    return (
        verdict.module,
        verdict.role,
        verdict.location.format,
        verdict.kind,
        verdict.sentence,
        verdict.advice(),
    )


def made(kind, *, tied, factor=1.0, **settings):
    torch.manual_seed(0)
    model = kind(tied=tied, **settings)
    model.blow.factor = factor
    return model


def both(kind, *, scale, factor=1.0, **settings):
    return [
        told(verdict_on(made(kind, tied=tied, factor=factor, **settings), scale=scale))
        for tied in (True, False)
    ]


HIGH = 2.0**20
"""With it the head's grad_output fits fp16, and what the product makes of it does not."""


def test_a_weight_gradient_that_the_head_makes_is_the_heads_though_the_table_shares_it():
    tied, untied = both(Language, scale=HIGH)
    assert tied == untied
    assert tied[:3] == ("head", "grad_weight", "fp16")
    assert tied[-1] == "the loss scale was too high for this gradient, and backs off by itself"


@pytest.mark.parametrize("factor", [1e30, math.inf])
def test_what_comes_back_to_a_lookup_too_large_is_not_the_heads(factor):
    tied, untied = both(Language, scale=1.0, factor=factor)
    assert tied == untied
    assert tied[0] != "head"


def test_a_product_of_the_models_own_code_is_the_models():
    tied, untied = both(OwnCode, scale=HIGH)
    assert tied == untied
    assert tied[:2] == ("", "grad_weight")


@pytest.mark.parametrize("one", [False, True])
@pytest.mark.parametrize("scale", [1.0, HIGH, 2.0**24])
@pytest.mark.parametrize("factor", [1e3, 1e6])
def test_of_two_uses_the_one_that_made_it_is_told_when_it_did(one, scale, factor):
    torch.manual_seed(0)
    verdicts = [
        verdict_on(made(Twins, tied=tied, factor=factor, one=one), scale=scale)
        for tied in (True, False)
    ]
    if verdicts[1] is None:
        assert verdicts[0] is None
        return
    tied, untied = map(told, verdicts)
    if one:  # of which the second has no name
        tied, untied = (
            [str(x).replace("second", "first") for x in each] for each in (tied, untied)
        )
    assert list(tied) == list(untied)


@pytest.mark.parametrize("reentrant", [False, True])
def test_passes_that_are_made_again_are_told_alike(reentrant):
    Checkpointed.reentrant = reentrant
    tied, untied = both(Checkpointed, scale=HIGH)
    assert tied == untied
    assert tied[:3] == ("head", "grad_weight", "fp16")


def test_a_parametrised_weight_that_is_shared_is_told_by_its_parametrisation():
    def build(*, tied):
        model = Language(tied=False)
        parametrizations.weight_norm(model.head)
        if tied:
            model.embed.weight = model.head.parametrizations.weight.original1
        else:
            with torch.no_grad():
                model.embed.weight.copy_(model.head.parametrizations.weight.original1)
        return model

    tied, untied = both(build, scale=HIGH)
    assert tied == untied


def test_a_sum_that_alone_is_too_large_is_told_as_one():
    """Two uses of 2.2e19 fit what fp32 can square by themselves, and together do not."""
    torch.manual_seed(0)
    model = made(Twins, tied=True)
    run = prepared(model, "fp32")

    def loss_of(batch):
        return (
            1.3e19 * (model.first.weight[0, 0] + model.second.weight[0, 0]) + 0 * model(batch).sum()
        )

    found = explain(run, [torch.randint(0, WORDS, (8,))], loss_of)
    assert (found.module, found.role) == ("first", "grad_weight")


@pytest.mark.parametrize("name", ["embed", "head"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("value", ["inf", "nan"])
def test_a_fault_in_one_use_of_a_shared_gradient_is_found_there(name, tied, value):
    model = made(Language, tied=tied)
    run = prepared(model)
    words, targets = torch.randint(0, WORDS, (2, 64))
    faults = Faults(model, [Fault(step=1, module=name, role="grad_weight", value=value)], seed=0)
    found = replay(
        run,
        ReplayInputs.before(run, [(words, targets)]),
        lambda b: F.cross_entropy(model(b[0]).float(), b[1]),
        around=faults.at(1).during,
    )
    assert (found.module, found.role) == (name, "grad_weight")


def test_an_error_in_a_pass_leaves_every_weight_in_its_place():
    model = made(Language, tied=True)
    run = prepared(model, scale=HIGH)
    passes = []

    def loss_of(batch):
        passes.append(1)
        found = model(batch[0])
        if len(passes) == 2:
            model.head(found)  # of the wrong width
        return F.cross_entropy(found.float(), batch[1])

    with pytest.raises(RuntimeError):
        explain(run, [tuple(torch.randint(0, WORDS, (2, 64)))], loss_of)
    assert isinstance(model.head.weight, nn.Parameter)
    assert model.head.weight is model.embed.weight
    assert not model.head._forward_hooks
    assert not model.head._forward_pre_hooks


def test_a_look_without_gradients_on_the_way_changes_nothing():
    class Looked(OwnCode):
        def forward(self, words):
            with torch.no_grad():
                self.middle(self.embed(words))
            return super().forward(words)

    tied, untied = both(Looked, scale=HIGH)
    assert tied == untied
    assert tied[:2] == ("", "grad_weight")


def test_uses_that_share_one_cast_of_a_weight_are_several():
    layer, once = nn.Linear(4, 4), nn.Linear(4, 4)
    model = nn.ModuleList([layer, once])
    with torch.autocast("cpu", torch.bfloat16):
        loss = layer(once(layer(torch.ones(2, 4)))).sum()
    assert weights_of_several_uses(model, loss) == {layer.weight, layer.bias}


@pytest.mark.parametrize("initial", [2.0**18, 2.0**21, 2.0**24])
def test_a_language_model_is_told_alike_tied_and_untied(initial):
    settings, device = {"layers": 2, "width": 16, "heads": 2}, torch.device("cpu")
    tied, untied = (
        build_gpt(LmModel(**settings, tied=tied), vocab=WORDS, length=16, seed=0, device=device)
        for tied in (True, False)
    )
    untied.load_state_dict(tied.state_dict())
    found = []
    for model in (tied, untied):
        run = prepared(model, scale=initial)
        torch.manual_seed(1)
        words, targets = torch.randint(0, WORDS, (2, 4, 16))
        verdict = explain(run, [(words, targets)], lambda b, model=model: model(*b))
        found.append(verdict and told(verdict))
    assert found[0] == found[1]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [Language, OwnCode, Twins])
@pytest.mark.parametrize("scale", [HIGH, 2.0**24, 2.0**30])
def test_on_a_gpu_too_verdicts_are_those_of_the_untied_model(kind, scale, cuda):
    found = []
    for tied in (True, False):
        torch.manual_seed(0)
        model = made(kind, tied=tied).to(cuda)
        run = nc.prepare(
            model,
            torch.optim.AdamW(model.parameters()),
            policy="fp16",
            loss_scale=nc.LossScale(init_scale=scale, max_scale=2.0**40),
        )
        words, targets = torch.randint(0, WORDS, (2, 64)).to(cuda)
        verdict = explain(
            run,
            [(words, targets)],
            lambda b, model=model: F.cross_entropy(model(b[0]).float(), b[1]),
        )
        found.append(verdict and told(verdict)[:4])
    assert found[0] == found[1]
