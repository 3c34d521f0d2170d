"""One cast of an input that several layers read, against layers of which each casts for itself."""

import copy
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import checkpoint

import narrowcast as nc
from narrowcast.precision.fp8 import linear, shared_inputs
from narrowcast.precision.fp8.delayed import AmaxHistories
from narrowcast.precision.fp8.linear import Fp8Linear
from narrowcast.precision.plan.policy import PRESETS
from narrowcast.precision.products.autocast import set_active_region
from narrowcast.precision.products.operands import ProductFormats
from narrowcast.precision.swap import swap

SCALINGS = ["fp8-tensor", "fp8-delayed", "fp8-row"]


class Heads(nn.Module):
    """Three layers that read one tensor."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, width) for width in (32, 16, 16))
        self.between = None

    def forward(self, x):
        q = self.q(x)
        if self.between is not None:
            x = self.between(x)
        return torch.cat((q, self.k(x), self.v(x)), -1)


def heads(policy):
    if torch.__version__ < "2.13":
        pytest.skip("needs torch 2.13, whose CPU has row-scaled fp8 products")
    torch.manual_seed(0)
    model = Heads()
    formats = ProductFormats.of(PRESETS[policy])
    whole = AmaxHistories([formats] * 3, torch.device("cpu"))
    for i, layer in enumerate((model.q, model.k, model.v)):
        history = whole.of(i) if policy == "fp8-delayed" else None
        swap(layer, Fp8Linear, nc_formats=formats, nc_history=history)
    return model, whole


def drawn(seed=1, rows=48):
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(seed))


@contextmanager
def inside():
    """A pass, as `autocast()` makes one; outside of it nothing is shared."""
    set_active_region("a model")
    try:
        yield
    finally:
        set_active_region(None)


@pytest.fixture
def casts(monkeypatch):
    """How many casts of inputs there were."""
    made = []
    plain = shared_inputs._quantized

    def counted(*args):
        made.append(args[0].shape)
        return plain(*args)

    monkeypatch.setattr(shared_inputs, "_quantized", counted)
    return made


def trained(model, x, *, call=None):
    """The output and all gradients of a pass."""
    given = x.clone().requires_grad_()
    output = (model if call is None else call)(given)
    output.float().pow(2).sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return {"output": output.detach(), "x": given.grad, **grads}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("policy", SCALINGS)
def test_an_input_of_three_layers_is_cast_once_and_nothing_else_changes(policy, casts):
    (model, whole), (apart, apart_whole) = heads(policy), heads(policy)
    for step in range(3):
        x = drawn(step) * 2.0**step
        with inside():
            found = trained(model, x)
        assert len(casts) == 1
        expected = trained(apart, x)  # outside of a pass each casts for itself
        assert len(casts) == 4
        assert_equal(found, expected)
        casts.clear()
        for each in (whole, apart_whole):
            each.advance(torch.tensor(True))
        for name, value in whole.state_dict().items():
            assert torch.equal(value, apart_whole.state_dict()[name]), name


@pytest.mark.parametrize("policy", SCALINGS)
def test_a_change_in_place_between_two_layers_is_seen(policy, casts):
    (model, _), (apart, _) = heads(policy), heads(policy)
    model.between = apart.between = lambda x: x.mul_(2)
    with inside():
        found = trained(model, drawn(), call=lambda x: model(x * 1))
    assert len(casts) == 2
    assert_equal(found, trained(apart, drawn(), call=lambda x: apart(x * 1)))


@pytest.mark.parametrize("policy", SCALINGS)
def test_a_hook_that_replaces_an_input_is_heeded(policy, casts):
    (model, _), (apart, _) = heads(policy), heads(policy)
    for each in (model, apart):
        each.v.register_forward_pre_hook(lambda _, args: (args[0] * 3,))
    with inside():
        found = trained(model, drawn())
    assert len(casts) == 2
    assert_equal(found, trained(apart, drawn()))


@pytest.mark.parametrize("policy", SCALINGS)
def test_a_checkpointed_block_has_the_same_gradients(policy):
    (model, _), (apart, _) = heads(policy), heads(policy)
    with inside():
        found = trained(model, drawn(), call=lambda x: checkpoint(model, x, use_reentrant=False))
    assert_equal(found, trained(apart, drawn()))


@pytest.mark.parametrize("policy", SCALINGS)
def test_several_forward_passes_before_a_backward_pass_keep_their_own_codes(policy):
    grads = []
    for shares in (True, False):
        model, _ = heads(policy)
        if shares:
            set_active_region("a model")
        outputs = [model(drawn(seed)) for seed in range(3)]
        set_active_region(None)
        sum(each.float().sum() for each in outputs).backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    assert_equal(*grads)


@pytest.mark.parametrize("policy", SCALINGS)
def test_an_evaluation_hands_nothing_to_a_training_pass(policy, casts):
    (model, whole), (apart, apart_whole) = heads(policy), heads(policy)
    x = drawn()
    with inside():
        with torch.no_grad():
            model(x)
        found = model(x)  # the very same tensor, whose transposed codes nobody has made
    assert len(casts) == 2
    found.float().pow(2).sum().backward()
    apart(x).float().pow(2).sum().backward()
    for a, b in zip(model.parameters(), apart.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    for each in (whole, apart_whole):
        each.advance(torch.tensor(True))
    assert torch.equal(whole.amax, apart_whole.amax)


def test_an_evaluation_does_not_transpose_what_no_gradient_needs():
    model, _ = heads("fp8-tensor")
    seen = []
    plain = linear.quantized_input

    def seeing(*args, **kwargs):
        seen.append(plain(*args, **kwargs).columnwise.numel())
        return plain(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "quantized_input", seeing)
        with torch.no_grad():
            model(drawn())
        model.requires_grad_(False)
        model(drawn().requires_grad_())
    assert seen == [0] * 6


def test_codes_go_with_their_tensor_and_with_their_pass():
    model, _ = heads("fp8-tensor")
    with inside():
        x = drawn()
        model(x)
        kept = shared_inputs.active_cache()
        assert len(kept) == 1
        del x
        assert len(kept) == 0
        x = drawn()
        model(x)
        assert len(kept) == 1
    assert shared_inputs.active_cache() is None


def test_codes_that_nobody_took_are_let_go_for_the_next():
    model, _ = heads("fp8-tensor")
    inputs = [drawn(seed) for seed in range(6)]
    with inside():
        for each in inputs:
            model.q(each)
        assert len(shared_inputs.active_cache()) == 1
        for each in inputs:
            model(each)
        assert len(shared_inputs.active_cache()) == shared_inputs.SHARED + 1


def test_a_scale_that_has_moved_is_used_anew(casts):
    model, whole = heads("fp8-delayed")
    x = drawn()
    with inside():
        model(x)
        whole.amax.fill_(2.0**20)
        whole.advance(torch.tensor(True))
        model(x)
    assert len(casts) == 2


def test_layers_that_part_again_have_what_they_would_have_remembered():
    model, whole = heads("fp8-delayed")
    with inside():
        model(drawn())
    whole.advance(torch.tensor(True))
    assert whole.reads_by_name == [0, 0, 0]
    copied = copy.deepcopy(whole)
    assert torch.equal(copied.scale_inv[0, 0], copied.scale_inv[2, 0])
    assert torch.equal(whole.amax[0, 0], whole.amax[2, 0])


def test_histories_of_different_models_are_not_joined():
    formats = ProductFormats.of(PRESETS["fp8-delayed"])
    first, second = (AmaxHistories([formats], torch.device("cpu")).of(0) for _ in range(2))
    assert not second.reads_with(first)


@pytest.mark.parametrize("policy", SCALINGS)
def test_a_compiler_makes_one_cast_of_those_that_have_one_scale(policy):
    model, _ = heads(policy)
    if policy == "fp8-delayed":
        assert all(each.nc_history.reads_with(model.q.nc_history) for each in (model.k, model.v))
    apart, _ = heads(policy)
    expected = trained(apart, drawn())
    for layer in (model.q, model.k, model.v):
        layer.nc_refresh()
    counts = []

    def counting(graph, _):
        called = [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]
        counts.append(sum("narrowcast.quantize" in each for each in called))
        return make_boxed_func(graph.forward)

    def backend(graph, inputs):
        return aot_module_simplified(
            graph, inputs, fw_compiler=counting, bw_compiler=counting,
            partition_fn=min_cut_rematerialization_partition,
        )  # fmt: skip

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    found = trained(model, drawn(), call=compiled)
    torch._dynamo.reset()
    assert counts == [1, 3]  # of the input, and of the gradient of each layer's output
    assert_equal(found, expected)


@pytest.fixture
def gpu_with_fp8(cuda):
    if torch.cuda.get_device_capability(cuda) < (8, 9):
        pytest.skip("needs a GPU of compute capability 8.9")
    return cuda


def prepared(policy, device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(32), Heads()).to(device)
    # As small as this, no layer would gain by fp8.
    plan = nc.plan(model, policy, hardware=nc.detect_hardware(str(device)), skip_slow_fp8=False)
    return nc.prepare(model, torch.optim.SGD(model.parameters(), 0.1), policy=plan), model


@pytest.mark.parametrize("policy", SCALINGS)
def test_a_prepared_model_learns_the_same_with_one_cast_as_with_three(policy, casts, gpu_with_fp8):
    weights = []
    for shares in (True, False):
        run, model = prepared(policy, gpu_with_fp8)
        with pytest.MonkeyPatch.context() as patch:
            if not shares:
                patch.setattr(shared_inputs, "active_cache", lambda: None)
            for step in range(3):
                casts.clear()
                with run.autocast():
                    loss = model(drawn(step).to(gpu_with_fp8)).float().pow(2).mean()
                run.step(loss)
                assert len(casts) == (1 if shares else 3)
        weights.append(dict(model.named_parameters()))
    assert_equal(*weights)


@pytest.mark.parametrize("policy", SCALINGS)
@pytest.mark.parametrize("leaf", [True, False])
def test_a_captured_pass_casts_what_it_is_replayed_with(policy, leaf, gpu_with_fp8):
    run, model = prepared(policy, gpu_with_fp8)
    heads_alone = model[1]
    x = drawn().to(gpu_with_fp8)

    def passes():
        given = x if leaf else (x * 1).requires_grad_() * 1
        with run.autocast():
            return heads_alone(given)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            passes()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = passes()
    x.copy_(drawn(7).to(gpu_with_fp8) / 2)  # within the scale that was decided
    expected = passes().clone()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, expected)
