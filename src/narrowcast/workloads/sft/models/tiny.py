"""A language model that needs no file: a small Llama and a tokenizer of bytes.

It has learnt nothing; what it is fine-tuned on is all it will know.
"""

from typing import Any

import torch

CONTEXT = 512
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML, as most small models have it."""


def tiny_tokenizer() -> Any:
    """Return a tokenizer of 256 bytes and three signs, with a chat template."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE({sign: i for i, sign in enumerate(alphabet)}, []))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    fast: Any = transformers.PreTrainedTokenizerFast
    tokenizer = fast(
        tokenizer_object=bytes_only,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",  # a sign, no secret
        additional_special_tokens=["<|im_start|>"],
        model_max_length=CONTEXT,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_config() -> Any:
    """Return the shape of the model: four layers of width 128, a million parameters."""
    from transformers import LlamaConfig

    tokenizer = tiny_tokenizer()
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.08,  # near 1 / sqrt(128): from 0.02 no sum is right at step 200
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=torch.float32,
    )
