"""A prepared model's classes are nobody's to see: not in registries, signatures, copies, calls."""

import copy
import inspect
import io
import pickle
from abc import ABC, abstractmethod
from collections.abc import Sized
from types import MethodType
from typing import Generic, TypeVar

import pytest
import torch
from torch import nn

import narrowcast as nc

POLICIES = ["fp32", "bf16", "fp16", "bf16, params=bf16, master=split", "fp8-tensor"]
REGISTRY = {}
T = TypeVar("T")
MADE = []


class Registered(nn.Module):
    """Keeps a registry of its subclasses, which must say their name."""

    def __init_subclass__(cls, *, called, **kwargs):
        super().__init_subclass__(**kwargs)
        REGISTRY[called] = cls


class Meta(type(nn.Module)):
    def __init__(cls, name, bases, namespace):
        super().__init__(name, bases, namespace)
        MADE.append(cls)


class Block(Registered, called="block"):
    def __init__(self, width=16):
        super().__init__()
        self.width, self.nc_of_mine = width, "kept"
        self.linear = nn.Linear(width, width)

    def forward(self, x, *, gain: float = 1.0):
        return self.linear(x) * gain

    def another(self):
        return type(self)()

    def twin(self):
        cls = self.__class__
        made = cls.__new__(cls)
        made.__dict__.update(self.__dict__)
        return made


class WithMeta(nn.Module, metaclass=Meta):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return self.linear(x)


class Abstract(nn.Module, ABC):
    @abstractmethod
    def forward(self, x): ...


class Concrete(Abstract):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return self.linear(x)


class Slots:
    __slots__ = ()


class AbstractFirst(ABC, nn.Module):
    """As the modules of sentence-transformers are: not laid out as `nn.Module` is."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("seen", torch.zeros(()))

    @abstractmethod
    def forward(self, x): ...


class ConcreteOfAbstract(AbstractFirst):
    def forward(self, x):
        return self.linear(x)


class GenericFirst(Generic[T], Slots, nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return self.linear(x)


class OfBoth(ConcreteOfAbstract, GenericFirst[int]):
    def forward(self, x):
        return super().forward(x)


class LinearOfAbstract(Sized, nn.Linear):
    """A layer whose products are replaced, too."""

    def __init__(self):
        super().__init__(16, 16)

    def __len__(self):
        return self.out_features


@pytest.fixture(autouse=True)
def _seeded():
    """Of weights as other tests leave the generator, some overflow fp16 at the first loss scale."""
    torch.manual_seed(0)


def prepared(model, policy="bf16", **settings):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return nc.prepare(model, optimizer, policy=policy, **settings)


def step(run, **kwargs):
    with run.autocast():
        loss = run.model(torch.ones(4, 16), **kwargs).float().square().mean()
    return run.step(loss)


class Doubled(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        return 2 * self.inner(x)


@pytest.mark.parametrize("policy", POLICIES)
def test_no_registry_sees_the_classes_made_here(policy):
    before, made = dict(REGISTRY), list(MADE)
    model = nn.Sequential(Block(), WithMeta(), Concrete())
    run = prepared(model, policy)
    assert step(run).applied
    assert before == REGISTRY
    assert made == MADE
    assert isinstance(model[0], Block)
    assert isinstance(model[2], Abstract)
    run.release()
    assert [type(m) for m in model] == [Block, WithMeta, Concrete]


@pytest.mark.parametrize("kind", [ConcreteOfAbstract, GenericFirst, OfBoth, LinearOfAbstract])
@pytest.mark.parametrize("policy", ["bf16, params=bf16, master=split", "fp8-tensor"])
def test_a_module_of_another_base_before_nn_module_can_be_prepared(kind, policy):
    model = nn.Sequential(kind(), nn.Linear(16, 16))
    state = copy.deepcopy(model.state_dict())
    run = prepared(model, policy)
    assert list(model.state_dict()) == list(state)
    assert isinstance(model[0], kind)
    assert type(type(model[0])()) is kind
    torch._dynamo.reset()
    with run.autocast():
        eager = model(torch.ones(4, 16))
        compiled = torch.compile(model, backend="eager", fullgraph=True)(torch.ones(4, 16))
    assert torch.equal(eager, compiled)
    assert step(run).applied
    copied = copy.deepcopy(model)
    assert type(copied[0]) is kind
    assert torch.equal(copied.state_dict()["1.weight"], run.fp32_state_dict()["1.weight"])
    run.release()
    assert type(model[0]) is kind
    assert set(vars(model[0])) == set(vars(kind()))


@pytest.mark.parametrize("policy", POLICIES)
def test_the_class_of_a_prepared_module_makes_plain_ones(policy):
    run = prepared(Block(), policy)
    fresh = run.model.another()
    assert type(fresh) is Block
    assert type(fresh.linear) is nn.Linear
    assert type(type(run.model)(width=8)) is Block
    assert type(type(run.model.linear)(8, 8)) is nn.Linear
    assert fresh(torch.ones(2, 16)).dtype == torch.float32
    assert type(run.model.twin()) is Block


def test_forward_says_what_it_takes():
    model = Block()
    before = inspect.signature(model.forward)
    run = prepared(model, "bf16; linear: fp32")
    assert inspect.signature(run.model.forward) == before
    assert inspect.signature(model.linear.forward) == inspect.signature(nn.Linear(1, 1).forward)
    assert model.forward.__doc__ == Block.forward.__doc__


def test_what_a_module_calls_its_own_is_left_to_it():
    run = prepared(Block(), "fp8-tensor")
    before = set(vars(Block())) - {"training"}
    step(run)
    assert run.release().nc_of_mine == "kept"
    assert set(vars(run.model)) - {"training"} == before


@pytest.mark.parametrize("policy", POLICIES)
def test_a_forward_put_on_the_instance_runs_in_the_policy_and_is_given_back(policy):
    model = Block()
    calls = []

    def forward(self, x, *, gain: float = 2.0):
        calls.append(torch.is_autocast_enabled("cpu"))
        return self.linear(x) * gain

    mine = model.forward = MethodType(forward, model)
    run = prepared(model, policy)
    with run.autocast():
        inside = model(torch.ones(4, 16))
    outside = model(torch.ones(4, 16))
    assert len(calls) == 2
    assert torch.equal(inside, outside)
    assert "gain" in inspect.signature(model.forward).parameters
    assert step(run).applied
    assert run.release().forward is mine


def test_a_forward_that_wraps_ours_goes_on_through_another_policy():
    run = prepared(Block(), "bf16")
    ours, calls = run.model.forward, []
    run.model.forward = lambda *args, **kwargs: calls.append(1) or ours(*args, **kwargs)
    assert step(run).applied
    run.set_policy("fp16")
    assert step(run).applied
    assert len(calls) == 2
    expected = copy.deepcopy(Block())
    expected.load_state_dict(run.fp32_state_dict())
    del run.model.forward
    again = prepared(expected, "fp16")
    x = torch.ones(2, 16)
    assert torch.equal(run.model(x), again.model(x))


def test_a_linear_layer_with_a_forward_on_the_instance_keeps_its_products():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    model[0].forward = MethodType(lambda self, x: x @ self.weight * 0, model[0])
    plan = nc.plan(model, "fp8-tensor", hardware=nc.detect_hardware("cpu"))
    assert "overrides forward" in plan.module("0").reason
    run = prepared(model, "fp8-tensor")
    with run.autocast():
        assert torch.equal(model(torch.ones(2, 16)), model(torch.zeros(2, 16)))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_is_the_plain_model_with_every_digit(policy, how):
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.LayerNorm(16), nn.BatchNorm1d(16))
    model[1].linear.weight = model[0].linear.weight  # tied
    run = prepared(model, policy)
    for _ in range(3):
        step(run)
    if how == "deepcopy":
        copied = copy.deepcopy(model)
    elif how == "pickle":
        copied = pickle.loads(pickle.dumps(model))  # our own
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        copied = torch.load(file, weights_only=False)
    full = run.fp32_state_dict()
    assert [type(m) for m in copied] == [Block, Block, nn.LayerNorm, nn.BatchNorm1d]
    assert type(copied[0].linear) is nn.Linear
    assert copied[0].linear.weight is copied[1].linear.weight
    assert all(torch.equal(value, full[name]) for name, value in copied.state_dict().items())
    assert all(p.dtype == torch.float32 for p in copied.parameters())
    assert all(type(p) is nn.Parameter and not vars(p) for p in copied.parameters())

    again = prepared(copied, policy)
    assert step(again).applied
    run.release()
    assert all(torch.equal(run.model.state_dict()[name], value) for name, value in full.items())


def test_a_copy_of_a_part_is_plain_too():
    run = prepared(nn.Sequential(Block(), Block()), "bf16, params=bf16, master=fp32")
    step(run)
    part = copy.deepcopy(run.model[0])
    assert type(part) is Block
    assert torch.equal(part.linear.weight, run.fp32_state_dict()["0.linear.weight"])


def test_a_prepare_that_fails_leaves_the_model_as_it_was():
    class Stubborn(nn.Linear):
        @property
        def __class__(self):
            return Stubborn

        @__class__.setter
        def __class__(self, kind):
            raise TypeError("this one keeps its class")

    model = nn.Sequential(Block(), Stubborn(16, 16))
    before, kinds = set(vars(model[0])), [type(m) for m in model.modules()]
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(TypeError, match="keeps its class"):
        nc.prepare(model, optimizer, policy="bf16, params=bf16, master=split")
    assert [type(m) for m in model.modules()] == kinds
    assert set(vars(model[0])) == before
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("master", ["fp32", "split", "kahan", "stochastic", "none"])
@pytest.mark.parametrize("part", ["the model", "a part of it"])
def test_a_state_loaded_after_prepare_keeps_every_digit_that_can_be_kept(master, part):
    torch.manual_seed(1)
    model, pretrained = nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block())
    run = prepared(model, f"bf16, params=bf16, master={master}")
    step(run)
    if part == "the model":
        model.load_state_dict(pretrained.state_dict())
    else:
        model[0].load_state_dict(pretrained[0].state_dict())
    full, wanted = run.fp32_state_dict()["0.linear.weight"], pretrained[0].linear.weight
    assert torch.equal(model[0].linear.weight, wanted.bfloat16())
    digits = {"fp32": 0.0, "split": 0.0, "kahan": 2.0**-16}.get(master, 2.0**-8)
    assert ((full - wanted).abs() <= digits * wanted.abs()).all()
    assert step(run).applied


def test_what_load_hooks_make_of_a_state_is_what_is_loaded():
    def halved(state, prefix, *_):
        state[prefix + "linear.weight"] = state[prefix + "linear.weight"] / 2

    model, wrapper = Block(), nn.Module()
    model._register_load_state_dict_pre_hook(halved)
    run = prepared(model, "bf16, params=bf16, master=split")
    state = Block().state_dict()
    wrapper.module = model  # as DDP holds it
    wrapper.load_state_dict({f"module.{name}": value for name, value in state.items()})
    full = run.fp32_state_dict()
    assert torch.equal(full["linear.weight"], state["linear.weight"] / 2)
    assert torch.equal(full["linear.bias"], state["linear.bias"])


def test_a_copy_made_of_averages_holds_all_of_their_digits():
    model = Block()
    run = prepared(model, "bf16, params=bf16, master=split", ema_decay=0.9)
    for _ in range(5):
        step(run)
    with run.use_ema():
        best = copy.deepcopy(model)
    averages = run.ema_state_dict()
    assert all(torch.equal(value, averages[name]) for name, value in best.state_dict().items())


def test_a_class_that_copies_what_it_holds_gives_a_copy_that_can_be_prepared():
    class Copies(Block, called="copies"):
        def __deepcopy__(self, memo):
            made = Copies.__new__(Copies)
            made.__dict__.update({k: copy.deepcopy(v, memo) for k, v in self.__dict__.items()})
            return made

    run = prepared(Copies(), "fp16")
    again = prepared(copy.deepcopy(run.model), "bf16")
    assert step(again).applied
    assert type(again.release()) is Copies


def test_a_weight_keeps_in_copies_what_others_wrote_on_it():
    model = Block()
    model.linear.weight.no_weight_decay = True
    run = prepared(model, "bf16, params=bf16, master=split")
    copied = copy.deepcopy(run.model).linear.weight
    assert copied.no_weight_decay
    assert set(vars(copied)) == {"no_weight_decay"}


@pytest.mark.parametrize("policy", ["bf16, params=bf16, master=split", "fp8-tensor"])
def test_a_shallow_copy_and_a_replica_compute_as_the_model(policy):
    run = prepared(Block(), policy)
    x = torch.ones(2, 16)
    assert torch.equal(copy.copy(run.model)(x), run.model(x))
    replica = run.model.linear._replicate_for_data_parallel()
    replica._parameters = dict(run.model.linear._parameters)
    assert torch.equal(replica(x), run.model.linear(x))


def test_a_compiler_keeps_models_of_two_classes_apart():
    """Else the second would be compiled for whatever shapes, and the ninth not at all."""
    compiled = []

    def backend(graph, examples):
        compiled.append([each.shape for each in examples if isinstance(each, torch.Tensor)])
        return graph.forward

    torch._dynamo.reset()
    for width in range(2, 14):  # more than are compiled of one piece of code
        made = type(f"Own{width}", (Doubled,), {"forward": Doubled.forward})
        model = made(width)
        nc.prepare(model, torch.optim.SGD(model.parameters(), 0.1), policy="fp32")
        x = torch.randn(3, width)
        found = torch.compile(model, backend=backend, fullgraph=True)(x)
        assert torch.equal(found, 2 * model.inner(x))
    assert len(compiled) == 12
    assert all(isinstance(n, int) for shapes in compiled for shape in shapes for n in shape)
