import pytest
import torch
from torch import nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPTJConfig,
    GPTJForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from narrowcast.errors import UnsupportedError
from narrowcast.workloads.sft.ica.blocks import find_blocks

SHAPE = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 40,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
    "pad_token_id": 0,
}
GPTJ = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_inner": 40, "rotary_dim": 4, "vocab_size": 64}
ADDING = ("bloom", "mpt")
SPECIAL = {"bos_token_id": 0, "eos_token_id": 0}


@pytest.mark.parametrize(
    ("kind", "config", "name"),
    [
        (GPTNeoXForCausalLM, GPTNeoXConfig(**SHAPE), "gpt_neox.layers"),
        (GPTJForCausalLM, GPTJConfig(**GPTJ, **SPECIAL), "transformer.h"),
        (MistralForCausalLM, MistralConfig(**SHAPE), "model.layers"),
        # Its attention is wider than the model, as an MLP is; Phi-3's MLP has gate and up in one.
        (Qwen3ForCausalLM, Qwen3Config(**SHAPE, head_dim=32), "model.layers"),
        (Phi3ForCausalLM, Phi3Config(**SHAPE, **SPECIAL), "model.layers"),
    ],
)
def test_families_are_known_by_their_structure(kind, config, name):
    with torch.device("meta"):
        blocks = find_blocks(kind(config))
    assert (blocks.name, blocks.depth) == (name, 2)
    assert (blocks.width("mlp_output"), blocks.width("down_input")) == (16, 40)


def test_gpt2_and_llama_with_and_without_adapters(model):
    blocks = find_blocks(model)
    assert blocks.depth == 3
    assert blocks.width("mlp_output") == 16
    assert blocks.width("down_input") in (40, 64)
    assert {type(block.down.plain).__name__ for block in blocks.blocks} <= {"Conv1D", "Linear"}


def test_a_mixture_of_experts_is_refused():
    with torch.device("meta"):
        model = MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=2))
    with pytest.raises(UnsupportedError, match="no list of blocks with one MLP each"):
        find_blocks(model)


def test_two_stacks_are_refused_by_name(make_model):
    both = nn.ModuleDict({"encoder": make_model("llama"), "decoder": make_model("llama")})
    with pytest.raises(UnsupportedError, match=r"encoder\.model\.layers and decoder"):
        find_blocks(both)


def test_a_model_without_blocks_is_refused():
    with pytest.raises(UnsupportedError, match="Linear has no list of blocks"):
        find_blocks(nn.Linear(2, 2))


@pytest.mark.parametrize("name", ["bloom", "mpt", "gpt2", "llama-lora"])
def test_finding_blocks_leaves_the_model_and_the_generator_alone(make_model, name):
    model = make_model(name).train()
    state, before = torch.get_rng_state(), [dict(m.__dict__) for m in model.modules()]
    assert {block.adds_residual for block in find_blocks(model).blocks} == {name in ADDING}
    assert torch.equal(torch.get_rng_state(), state)
    assert [dict(m.__dict__) for m in model.modules()] == before


def test_an_mlp_that_does_not_call_its_down_projection_is_refused():
    """Masks and signals of it would be of nothing."""
    config = BloomConfig(
        n_layer=2, hidden_size=16, n_head=2, vocab_size=64, pretraining_tp=2, slow_but_exact=True
    )
    with pytest.raises(UnsupportedError, match="BloomMLP does not return one tensor"):
        find_blocks(BloomForCausalLM(config))
