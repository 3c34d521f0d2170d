from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from narrowcast.workloads.sft.data.templates import select_template

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SIGNS = ["<eos>", "<|im_start|>", "<|im_end|>", "<pad>"]


def found(path):
    """Return a file or folder of real data, wherever it lies above this one."""
    return next((up / path for up in Path(__file__).parents if (up / path).exists()), None)


@pytest.fixture
def real():
    """Return a file of real data, or skip."""

    def path_of(name):
        path = found(name)
        if path is None:
            pytest.skip(f"needs ../{name}")
        return path

    return path_of


@pytest.fixture(autouse=True)
def one_thread():
    """Two threads on matrices this small wait for each other most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_tokenizer(template=None, *, signs=True, merges=()):
    """Bytes, and four signs."""
    letters = {letter: n for n, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    letters |= {"".join(pair): len(letters) + n for n, pair in enumerate(merges)}
    core = Tokenizer(models.BPE(vocab=letters, merges=list(merges)))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(SIGNS if signs else ["<eos>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<eos>",
        chat_template=template,
        **({"additional_special_tokens": SIGNS[1:3], "pad_token": "<pad>"} if signs else {}),
    )


@pytest.fixture(scope="session", name="make_tokenizer")
def make():
    return make_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer(CHATML)


@pytest.fixture(scope="session")
def template(tokenizer):
    return select_template("auto", tokenizer)


def llama(**more):
    config = LlamaConfig(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=260,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.3,  # so that it says something, not always the same
        **more,
    )
    return LlamaForCausalLM(config)


def gpt2():
    config = GPT2Config(
        n_layer=2,
        n_embd=32,
        n_head=2,
        vocab_size=260,
        n_positions=512,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.3,
    )
    return GPT2LMHeadModel(config)


def llama_lora():
    config = LoraConfig(r=4, target_modules=["down_proj", "q_proj"], lora_dropout=0.5)
    model = get_peft_model(llama(), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    return model


MODELS = {"llama": llama, "gpt2": gpt2, "llama-lora": llama_lora}


@pytest.fixture
def make_model():
    def make(name="llama"):
        torch.manual_seed(0)
        return MODELS[name]()

    return make


@pytest.fixture(params=list(MODELS))
def model(request, make_model):
    """A tiny language model with random weights, ready to be trained."""
    return make_model(request.param).train()
