import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MptConfig,
    MptForCausalLM,
)


@pytest.fixture(autouse=True)
def one_thread():
    """Two threads on matrices this small wait for each other most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Planted:
    """Laplace sources, each loud in a twentieth of the channels, and noise."""

    def __init__(self, *, rows=2000, channels=300, sources=5, noise=0.1, seed=0):
        chance = np.random.default_rng(seed)
        self.sources = chance.laplace(size=(rows, sources))
        self.mixing = np.zeros((channels, sources))
        for column in self.mixing.T:
            support = chance.choice(channels, channels // 20, replace=False)
            # Away from zero, so that it is clear who belongs to the support.
            column[support] = chance.choice([-1, 1], len(support)) * chance.uniform(
                0.5, 2, len(support)
            )
        clean = self.sources @ self.mixing.T
        noisy = clean + noise * chance.normal(size=clean.shape)
        self.signals = torch.tensor(noisy, dtype=torch.float32)
        self.supports = [set(np.nonzero(column)[0].tolist()) for column in self.mixing.T]


@pytest.fixture(scope="session")
def planted():
    return Planted


def iou(one, other):
    return len(one & other) / len(one | other)


@pytest.fixture(scope="session")
def mean_best_iou():
    """How well the best match of each expected set is hit, on average."""

    def measure(expected, found):
        return sum(max(iou(each, other) for other in found) for each in expected) / len(expected)

    return measure


def gpt2():
    config = GPT2Config(
        n_layer=3,
        n_embd=16,
        n_head=2,
        vocab_size=64,
        n_positions=32,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def llama():
    config = LlamaConfig(
        num_hidden_layers=3,
        hidden_size=16,
        intermediate_size=40,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=64,
    )
    return LlamaForCausalLM(config)


def gpt2_lora():
    config = LoraConfig(r=4, target_modules=["c_proj", "c_attn"], fan_in_fan_out=True)
    return get_peft_model(gpt2(), config)


def llama_lora():
    return get_peft_model(llama(), LoraConfig(r=4, target_modules=["down_proj", "q_proj"]))


def bloom():
    return BloomForCausalLM(BloomConfig(n_layer=3, hidden_size=16, n_head=2, vocab_size=64))


def mpt():
    return MptForCausalLM(MptConfig(n_layers=3, d_model=16, n_heads=2, vocab_size=64))


MODELS = {"gpt2": gpt2, "llama": llama, "gpt2-lora": gpt2_lora, "llama-lora": llama_lora}

ADDING = {"bloom": bloom, "mpt": mpt}
"""Models whose MLPs add the residual stream themselves."""


@pytest.fixture(params=list(MODELS))
def model(request):
    """A tiny language model with random weights, three layers of 16 channels."""
    torch.manual_seed(0)
    return MODELS[request.param]()


@pytest.fixture
def make_model():
    def make(name):
        torch.manual_seed(0)
        return {**MODELS, **ADDING}[name]()

    return make


@pytest.fixture
def batches():
    """Two batches; the second has four positions of padding."""
    chance = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 64, (2, 2, 8), generator=chance)
    mask = torch.ones(2, 2, 8, dtype=torch.long)
    mask[1, 0, 4:] = 0
    return [
        {"input_ids": each, "attention_mask": kept} for each, kept in zip(ids, mask, strict=True)
    ]
