import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from narrowcast.workloads.sft.models.loading import tiny_tokenizer


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    """A folder with a Llama of two layers, and a tokenizer."""
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 260}
    torch.manual_seed(1)
    config = LlamaConfig(**shape, **heads, max_position_embeddings=128)
    return saved(LlamaForCausalLM(config), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory):
    """A folder with a GPT-2 of two layers without dropout, and a tokenizer."""
    torch.manual_seed(2)
    silent = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    shape = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 260, "n_positions": 128}
    return saved(GPT2LMHeadModel(GPT2Config(**shape, **silent)), tmp_path_factory.mktemp("gpt2"))


def saved(model, folder):
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
