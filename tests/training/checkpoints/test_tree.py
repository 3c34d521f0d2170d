import json
import math
from collections import OrderedDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from narrowcast.hardware.transfers import to_host
from narrowcast.training.checkpoints.tree import flatten, unflatten

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]

tensors = st.builds(
    lambda dtype, shape: torch.arange(math.prod(shape)).reshape(shape).to(dtype),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 3), max_size=3),
)
plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
keys = st.text(max_size=5) | st.integers() | st.sampled_from(["$tensor", "$dict", "__metadata__"])
states = st.recursive(
    plain | tensors,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=12,
)


def same(a, b):
    if type(a) is not type(b):
        return False
    match a:
        case torch.Tensor():
            return a.dtype == b.dtype and a.shape == b.shape and _bytes(a) == _bytes(b)
        case dict():
            # Keys by type too: True == 1, but they are not the same key.
            return [(type(k), k) for k in a] == [(type(k), k) for k in b] and all(
                same(a[k], b[k]) for k in a
            )
        case list() | tuple():
            return len(a) == len(b) and all(map(same, a, b))
        case float():
            return repr(a) == repr(b)
        case _:
            return a == b


def _bytes(t):
    return t.contiguous().reshape(-1).view(torch.uint8).tolist()


@given(state=states)
def test_a_state_comes_back_as_it_was_with_every_type(state):
    tree, kept = flatten(state)
    assert same(unflatten(json.loads(json.dumps(tree, allow_nan=False)), kept), state)


@given(state=states)
def test_kept_tensors_have_names_and_memory_of_their_own(state):
    kept = to_host(flatten(state)[1])
    assert "" not in kept
    assert "__metadata__" not in kept
    storages = [t.untyped_storage().data_ptr() for t in kept.values() if t.numel()]
    assert len(storages) == len(set(storages))


def test_a_tied_weight_is_kept_once_and_comes_back_for_both():
    weight = torch.nn.Parameter(torch.randn(3, 2))
    tree, kept = flatten({"in": weight, "out": weight, "same": weight.data})
    assert list(kept) == ["in"]
    back = unflatten(tree, kept)
    assert all(torch.equal(t, weight) for t in back.values())


def test_parts_of_one_memory_are_kept_apart():
    whole = torch.arange(6.0)
    state = {"whole": whole, "head": whole[:3], "tail": whole[3:], "turned": whole.view(2, 3).T}
    tree, held = flatten(state)
    back = unflatten(tree, to_host(held))
    assert all(torch.equal(back[key], state[key]) for key in state)


def test_a_tensor_that_requires_grad_comes_back_without_its_graph():
    state = {"x": torch.ones(2, requires_grad=True) * 2}
    assert not unflatten(*flatten(state))["x"].requires_grad


def test_an_ordered_dict_comes_back_in_its_order():
    state = OrderedDict(b=1, a=2)
    assert list(unflatten(*flatten(state)).items()) == [("b", 1), ("a", 2)]


@pytest.mark.parametrize("value", [{1, 2}, object(), torch.float32, 1j])
def test_what_json_and_safetensors_cannot_hold_is_refused_with_its_place(value):
    with pytest.raises(TypeError, match=r"^a/0: a checkpoint cannot hold"):
        flatten({"a": [value]})


def test_a_key_that_would_change_its_type_is_refused():
    with pytest.raises(TypeError, match=r"^a: a checkpoint cannot hold a dict with a float as key"):
        flatten({"a": {1.5: 0}})
