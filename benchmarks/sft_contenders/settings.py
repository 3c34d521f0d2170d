"""What is the same for everybody: models, rows, optimizer, and how many steps."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

IGNORED = -100
LR, CLIP_NORM = 3e-4, 1.0
RANK, ALPHA = 16, 32
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class Shape:
    """A Llama, and what it is fed."""

    layers: int
    width: int
    heads: int
    key_heads: int
    inner: int
    vocabulary: int
    tied: bool
    rows: int
    length: int
    mean_document: int

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    def config(self) -> Any:
        from transformers import LlamaConfig

        return LlamaConfig(
            num_hidden_layers=self.layers,
            hidden_size=self.width,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_heads,
            intermediate_size=self.inner,
            vocab_size=self.vocabulary,
            tie_word_embeddings=self.tied,
            max_position_embeddings=max(8192, self.length),
            rms_norm_eps=1e-5,
            initializer_range=0.02,
            bos_token_id=1,
            eos_token_id=2,
        )


SHAPES = {
    "smollm2-135m": Shape(30, 576, 9, 3, 1536, 49152, True, 16, 2048, 400),
    "llama-1.3b": Shape(24, 2048, 16, 16, 5504, 32000, False, 8, 2048, 400),
    "tiny": Shape(2, 64, 4, 2, 96, 320, True, 2, 128, 24),
}


def packed_rows(shape: Shape, steps: int, *, seed: int = 0) -> dict[str, Tensor]:
    """Return rows that are full of documents: `input_ids`, `labels`, `position_ids`.

    Lengths are log-normal, as those of instructions are, and the last of a row is cut. Tokens
    follow one another by a rule with noise, so that there is something to learn.
    """
    chance = torch.Generator().manual_seed(seed)
    count = shape.rows * steps
    spread = 0.8
    lengths = torch.empty(count * (shape.length // 8))
    lengths.log_normal_(0.0, spread, generator=chance)
    lengths = (lengths * shape.mean_document * math.exp(-(spread**2) / 2)).clamp(8, shape.length)
    positions = torch.zeros(count, shape.length, dtype=torch.long)
    drawn = iter(lengths.long().tolist())
    for row in positions:
        at = 0
        while at < shape.length:
            end = min(at + next(drawn), shape.length)
            row[at:end] = torch.arange(end - at)
            at = end
    tokens = torch.randint(3, shape.vocabulary, positions.shape, generator=chance)
    common = tokens % 97 + 3
    follows = torch.rand(positions.shape, generator=chance) < 0.75
    for place in range(1, shape.length):
        after = (common[:, place - 1] * 5 + 7) % 97 + 3
        common[:, place] = torch.where(follows[:, place], after, common[:, place])
    labels = common.masked_fill(positions == 0, IGNORED)
    return {"input_ids": common, "labels": labels, "position_ids": positions}


def built_model(shape: Shape, tune: str, device: str) -> Any:
    """Return the model everybody begins with: fp32 to train all of it, bf16 under adapters."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(shape.config())
    model.config.use_cache = False
    return model if tune == "full" else model.to(torch.bfloat16)


def adapters() -> Any:
    from peft import LoraConfig

    return LoraConfig(
        r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules=TARGETS, task_type="CAUSAL_LM"
    )


def adapted(model: Any) -> Any:
    from peft import get_peft_model

    torch.manual_seed(1)
    return get_peft_model(model, adapters())
