"""Layers that read one tensor, found by asking modules of transformers, against their code."""

import pytest
import torch
from torch import nn

from narrowcast.precision.modules.siblings import find_siblings, siblings_in

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip
ATTENTION = ["q_proj", "k_proj", "v_proj"]
GATES = ["gate_proj", "up_proj"]
T5 = {"d_model": 32, "num_layers": 1, "num_heads": 4, "d_kv": 8, "d_ff": 48, "vocab_size": 97}
BERT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}


def found_in(name, **settings):
    config = getattr(transformers, f"{name}Config")(**settings)
    model = getattr(transformers, f"{name}Model")(config)
    names = {module: where.rpartition(".")[2] for where, module in model.named_modules()}
    return [[names[layer] for layer in group] for group in siblings_in(model)]


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Olmo2"])
def test_queries_keys_and_values_read_one_tensor_and_so_do_gate_and_value(family):
    head = {"head_dim": 8} if family in ("Qwen3", "Gemma") else {}
    assert found_in(family, **SMALL, **head) == [ATTENTION, GATES]


def test_encoders_have_siblings_in_their_attention():
    assert found_in("Bert", **BERT, num_attention_heads=4) == [["query", "key", "value"]]


def test_queries_of_attention_that_may_look_elsewhere_are_left_alone():
    found = found_in("T5", **T5, feed_forward_proj="gated-gelu")
    assert found == [["k", "v"], ["wi_0", "wi_1"], ["k", "v"], ["k", "v"], ["wi_0", "wi_1"]]


class Own(nn.Module):
    """With the names of siblings, which read what they like."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        raise AssertionError("a forward of somebody's own was called")


def test_somebodys_own_module_is_not_asked():
    assert list(siblings_in(Own())) == []


class Elsewhere(Own):
    def forward(self, x):
        return self.q_proj(x) + self.k_proj(x + 1) + self.v_proj(x)


def test_a_layer_that_is_given_another_tensor_is_no_sibling():
    Elsewhere.forward.__module__ = "transformers.models"
    names = ("q_proj", "k_proj", "v_proj")
    assert find_siblings(Elsewhere(), names) == ("q_proj", "v_proj")


def test_asking_leaves_the_module_as_it_was():
    model = transformers.LlamaModel(transformers.LlamaConfig(**SMALL))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modules = list(model.modules())
    list(siblings_in(model))
    assert list(model.modules()) == modules
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
