"""What a captured step takes for granted."""

import copy
from collections import UserDict, namedtuple

import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.precision.step.captured_step import CaptureTerms, parse_inputs, synchronizing_line

X = torch.zeros(2, 3)
Pair = namedtuple("Pair", ["a", "b"])


def key(*args, **kwargs):
    return parse_inputs(args, kwargs).signature


def test_values_of_tensors_are_no_part_of_a_signature():
    assert key(X, {"y": [X]}) == key(X + 1, {"y": [X - 1]})
    assert hash(key(X, 1, "word", None, torch.float32)) is not None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (X, X[:1]),
        (X, X.double()),
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        ("1", 1),
        ([X], (X,)),
        ([], ()),
        ({"a": X}, {"b": X}),
        ({"a": X}, UserDict(a=X)),
        (Pair(X, 1), (X, 1)),
        ((X, 1), (X, 2)),
        (X, [X]),
        (torch.bfloat16, torch.float16),
    ],
)
def test_what_else_differs_is(one, other):
    assert key(one) != key(other)
    assert key(given=one) != key(given=other)


def test_an_argument_by_name_is_another_than_by_place():
    assert key(X) != key(x=X)
    assert key(X) != key(X, mask={})


def test_the_number_that_changed_is_named():
    first, second = (parse_inputs((X,), {"a": 1, "b": {"c": [c]}}) for c in (2, 3))
    assert second.changed_since(first.form) == "the input b['c'][0] (3)"
    assert parse_inputs((X,), {"a": 2}).changed_since(first.form) == "the input a (2)"


@pytest.mark.parametrize("strange", [object(), {1, 2}, lambda: 1, nn.Linear(1, 1)])
def test_what_may_hold_tensors_that_nobody_finds_is_refused(strange):
    with pytest.raises(ConfigError, match=r"inputs must be tensors, .* for given\[1\]"):
        parse_inputs((), {"given": [X, strange]})


def test_an_input_with_a_graph_is_refused():
    with pytest.raises(UnsupportedError, match="must not require grad, got input 1"):
        parse_inputs((X, torch.zeros(1, requires_grad=True)), {})


def prepared():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    return nc.prepare(model, torch.optim.AdamW(model.parameters()), policy="fp32")


def change_policy(run):
    run.set_policy("bf16")


def evaluate(run):
    run.model[1].eval()


def freeze(run):
    run.model[0].bias.requires_grad_(False)


def move(run):
    run.model[0].weight.data = run.model[0].weight.detach().clone()


@pytest.mark.parametrize("change", [change_policy, evaluate, freeze, move])
def test_a_model_that_has_changed_is_known_for_it(change):
    run = prepared()
    terms = CaptureTerms(run.engine)
    assert terms.hold()
    change(run)
    assert not terms.hold()


def test_values_that_are_loaded_change_nothing():
    run = prepared()
    terms, buffers = CaptureTerms(run.engine), CaptureTerms(run.engine).buffers()
    run.model.load_state_dict({k: v + 1 for k, v in run.model.state_dict().items()})
    assert terms.hold()
    assert terms.changed_by_passes(buffers) == ""


def test_a_buffer_that_is_another_tensor_is_named():
    run = prepared()
    terms = CaptureTerms(run.engine)
    buffers = terms.buffers()
    run.model[1].running_mean = run.model[1].running_mean.clone()
    assert "the forward pass replaces the buffer 1.running_mean" in terms.changed_by_passes(buffers)


def test_moments_that_were_loaded_are_noticed_where_one_pass_updates():
    model = nn.Linear(4, 4)
    run = nc.prepare(
        model, torch.optim.AdamW(model.parameters()), policy="fp32", fused_optimizer=True
    )
    terms = CaptureTerms(run.engine)
    for _ in range(2):
        run.step(model(X.new_ones(2, 4)).sum())
        assert terms.hold()
    run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    assert not terms.hold()


def test_the_line_that_waits_is_the_users_own():
    try:
        torch.zeros(2, 3) @ torch.zeros(2, 3)
    except RuntimeError as error:
        told = synchronizing_line(error)
    assert told.startswith("test_signature.py:")
    assert "torch.zeros(2, 3) @ torch.zeros(2, 3)" in told
