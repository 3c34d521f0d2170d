"""Bases in 8 and 4 bits, for adapters."""

import copy
import importlib.util

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import narrowcast as nc
from narrowcast.errors import UnsupportedError
from narrowcast.precision.quantized_frozen import QuantizedFrozenLayer
from narrowcast.precision.weights.frozen_base import quantize_frozen
from narrowcast.workloads.sft.models.base import (
    check_mergeable,
    dequantized_base,
    loading_options,
)

CPU = torch.device("cpu")
HAS_BITSANDBYTES = importlib.util.find_spec("bitsandbytes") is not None
TOKENS = torch.arange(32).view(2, 16)


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def with_adapters(model):
    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return get_peft_model(model, config)


@pytest.mark.parametrize("base", ["auto", "fp32", "bf16", "fp16", "e4m3"])
def test_a_base_that_torch_holds_needs_no_option(base):
    assert loading_options(base, device=CPU, compute=torch.bfloat16) == {}


@pytest.mark.skipif(HAS_BITSANDBYTES, reason="needs a Python without bitsandbytes")
@pytest.mark.parametrize("base", ["int8", "nf4", "fp4"])
def test_bitsandbytes_that_is_not_there_is_said_with_what_to_write(base):
    with pytest.raises(
        UnsupportedError, match=rf"{base} needs bitsandbytes.*model\.base_dtype=e4m3"
    ):
        loading_options(base, device=CPU, compute=torch.bfloat16)


@pytest.mark.skipif(not HAS_BITSANDBYTES, reason="needs bitsandbytes")
@pytest.mark.parametrize("base", ["int8", "nf4", "fp4"])
def test_bitsandbytes_keeps_the_base_and_a_merge_into_it_is_refused(base, tmp_path):
    llama().save_pretrained(tmp_path)
    options = loading_options(base, device=CPU, compute=torch.float32)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, **options)
    weight = loaded.model.layers[0].mlp.up_proj.weight
    assert weight.nbytes == 64 * 128 // (1 if base == "int8" else 2)
    model = with_adapters(loaded)
    trained = [p for p in model.parameters() if p.requires_grad]
    run = nc.prepare(model, torch.optim.AdamW(trained, lr=1e-2), policy="fp32")
    losses = []
    for _ in range(3):
        with run.autocast():
            loss = model(input_ids=TOKENS, labels=TOKENS).loss
        run.step(loss)
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    with pytest.raises(
        UnsupportedError, match=r"merged into .*Keep the adapter .*model\.base_dtype=bf16"
    ):
        check_mergeable(model)


@pytest.mark.skipif(not HAS_BITSANDBYTES, reason="needs bitsandbytes")
def test_a_device_that_bitsandbytes_does_not_know_is_refused():
    with pytest.raises(UnsupportedError, match="bitsandbytes has nothing for vulkan"):
        loading_options("nf4", device=torch.device("vulkan"), compute=torch.bfloat16)


def test_a_base_of_16_bits_may_be_merged_into():
    check_mergeable(llama())


def test_adapters_merge_exactly_into_what_they_were_trained_beside():
    model = with_adapters(llama())
    assert len(quantize_frozen(model, "e4m3")) == 14
    check_mergeable(model)
    twin = with_adapters(dequantized_base(llama(), "e4m3"))
    twin.load_state_dict({n: t for n, t in model.state_dict().items() if "lora" in n}, strict=False)
    assert not any(isinstance(m, QuantizedFrozenLayer) for m in twin.modules())
    expected = model(input_ids=TOKENS).logits
    assert torch.equal(twin(input_ids=TOKENS).logits, expected)
    merged = copy.deepcopy(twin).merge_and_unload()
    assert torch.allclose(merged(input_ids=TOKENS).logits, expected, atol=1e-5)
