"""Conversations of a packed row, against each of them alone in a model of transformers."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3NextConfig,
)

from narrowcast.errors import UnsupportedError
from narrowcast.workloads.sft.attention import NAME, conversation_bounds, separate_conversations

LENGTHS = [[5, 1, 9, 3], [18]]
SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, intermediate_size=48),
    "gpt2": GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, attn_pdrop=0.0),
    "qwen2, shared key heads": Qwen2Config(**SIZES, intermediate_size=48, num_key_value_heads=2),
    "mistral, sliding window": MistralConfig(
        **SIZES, intermediate_size=48, num_key_value_heads=2, sliding_window=4
    ),
}


def model_of(config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def batch_of(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(64, (len(lengths), sum(lengths[0])), generator=generator)
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    return tokens, positions


def logits_alone(model, tokens, lengths):
    rows = [
        torch.cat([model(part[None], use_cache=False).logits[0] for part in row.split(sizes)])
        for row, sizes in zip(tokens, lengths, strict=True)
    ]
    return torch.stack(rows)


def test_bounds_are_those_of_each_conversation():
    _, positions = batch_of(LENGTHS)
    (starts, ends), (first, last) = conversation_bounds(positions)[:, 0].tolist()
    assert starts == [0] * 5 + [5] + [6] * 9 + [15] * 3
    assert ends == [5] * 5 + [6] + [15] * 9 + [18] * 3
    assert (first, last) == ([0] * 18, [18] * 18)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_packed_conversation_is_what_it_is_alone(name):
    model = model_of(CONFIGS[name])
    tokens, positions = batch_of(LENGTHS)
    expected = logits_alone(model, tokens, LENGTHS)
    weighted = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    expected_grads = torch.autograd.grad((expected * weighted).sum(), list(model.parameters()))
    separate_conversations(model)
    # With a cache of keys, as models make one that are not told otherwise.
    for use_cache in (False, True):
        found = model(
            tokens,
            position_ids=positions,
            attention_mask=conversation_bounds(positions),
            use_cache=use_cache,
        ).logits
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        grads = torch.autograd.grad((found * weighted).sum(), list(model.parameters()))
        for a, b in zip(grads, expected_grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * float(b.abs().max() + 1))


@torch.no_grad()  # with them, the tracer of torch warns of the tensors between blocks
def test_a_compiled_block_has_no_breaks():
    model = model_of(CONFIGS["qwen2, shared key heads"])
    separate_conversations(model)
    tokens, positions = batch_of(LENGTHS)
    given = {"position_ids": positions, "attention_mask": conversation_bounds(positions)}
    expected = model(tokens, **given, use_cache=False).logits
    for layer in model.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    found = model(tokens, **given, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_transformers_alone_lets_them_see_one_another_when_it_makes_a_cache():
    """Why a mask is given: this fails on the day that it need not be any more."""
    model = model_of(CONFIGS["llama"])
    tokens, positions = batch_of(LENGTHS)
    expected = logits_alone(model, tokens, LENGTHS)
    apart, mixed = (
        model(tokens, position_ids=positions, use_cache=cache).logits for cache in (False, True)
    )
    torch.testing.assert_close(apart, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(mixed, expected, rtol=1e-2, atol=1e-2)


def test_what_is_no_packed_row_is_computed_as_before():
    model = model_of(CONFIGS["qwen2, shared key heads"])
    tokens, _ = batch_of([[18]])
    padding = torch.ones_like(tokens)
    padding[:, :4] = 0

    def outputs():
        yield model(tokens).logits
        yield model(tokens, attention_mask=padding).logits
        yield model.generate(tokens, attention_mask=padding, max_new_tokens=4, do_sample=False)

    model.generation_config.pad_token_id = 0
    before = list(outputs())
    separate_conversations(model)
    assert model.config._attn_implementation == NAME
    for a, b in zip(before, outputs(), strict=True):
        assert torch.equal(a, b)


def test_a_saved_model_asks_for_no_attention_of_ours(tmp_path):
    model = model_of(CONFIGS["llama"])
    separate_conversations(model)
    model.save_pretrained(tmp_path)
    assert NAME not in (tmp_path / "config.json").read_text()
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"


def test_layers_that_carry_on_over_a_border_are_refused():
    config = Qwen3NextConfig(
        **SIZES, intermediate_size=48, moe_intermediate_size=16, num_experts=2,
        num_experts_per_tok=1, shared_expert_intermediate_size=16,
        layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UnsupportedError, match=r"linear_attention.*data.packing=false"):
        separate_conversations(model)


def test_a_model_of_another_library_is_refused():
    with pytest.raises(UnsupportedError, match="needs a transformers model, got Linear"):
        separate_conversations(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_gpu_computes_the_same_and_waits_for_nothing(name, cuda, host_never_waits):
    model = model_of(CONFIGS[name])
    tokens, positions = batch_of(LENGTHS)
    expected = logits_alone(model, tokens, LENGTHS)
    separate_conversations(model)
    model.to(cuda)
    tokens, positions = tokens.to(cuda), positions.to(cuda)
    mask = conversation_bounds(positions)
    model(tokens, position_ids=positions, attention_mask=mask)
    with host_never_waits():
        mask = conversation_bounds(positions)
        # A cache of keys with a window, which training never asks for, waits by itself.
        found = model(tokens, position_ids=positions, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-3, atol=1e-3)
