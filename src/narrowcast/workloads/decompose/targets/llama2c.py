"""Small Llamas in the first layout of llama2.c, such as stories260K, and their tokenizer.

The model file is 7 int32 (width, hidden, layers, heads, kv_heads, vocabulary, length), then fp32
weights, each kind for all layers at once, then tables of angles that are computed anew here.
"""

import re
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from narrowcast.config.problems import shown_path
from narrowcast.errors import ConfigError
from narrowcast.plain_files import read_plain

HEADER = struct.Struct("<7i")
CONTROL = 3
"""Tokens before those of single bytes: unknown, begin and end."""
BEGIN = 1


def files_in(folder: Path) -> tuple[Path, Path] | None:
    """Return the model and its tokenizer, if a folder has exactly these two."""
    tokenizers = sorted(folder.glob("tok*.bin"))
    models = [path for path in sorted(folder.glob("*.bin")) if path not in tokenizers]
    if len(tokenizers) == len(models) == 1 and not models[0].name.startswith("pytorch_model"):
        return models[0], tokenizers[0]
    return None


def read_model(path: Path) -> Any:
    """Return the model as one of transformers, in fp32 on the CPU."""
    import transformers

    llama: Any = transformers
    content = _content(path)
    if len(content) < HEADER.size:
        raise _damaged(path)
    width, hidden, layers, heads, kv_heads, vocabulary, length = HEADER.unpack_from(content)
    if min(width, hidden, layers, heads, kv_heads, length) < 1 or width % (2 * heads):
        raise _damaged(path)
    if vocabulary < 0:
        raise ConfigError(f"{shown_path(path)} has a separate output head, which is not supported.")
    shapes = _shapes(width, hidden, layers, heads, kv_heads, vocabulary)
    expected = sum(torch.Size(shape).numel() for shape in shapes.values()) + length * width // heads
    if len(content) != HEADER.size + 4 * expected:
        raise _damaged(path)
    numbers = torch.frombuffer(bytearray(content[HEADER.size :]), dtype=torch.float32)
    config = llama.LlamaConfig(
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        max_position_embeddings=length,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng([]):  # weights that it begins with are of no use here
        model = llama.LlamaForCausalLM(config)
    model.load_state_dict(_state(numbers, shapes, heads=heads, kv_heads=kv_heads))
    return model


@final
class SentencePieces:
    """The tokenizer: merges the pair of the highest score until no pair is a piece."""

    def __init__(self, path: Path) -> None:
        content = _content(path)
        self._pieces: list[bytes] = []
        self._scores: list[float] = []
        try:
            at = 4  # after the length of the longest piece
            while at < len(content):
                score, length = struct.unpack_from("<fi", content, at)
                self._pieces.append(struct.unpack_from(f"{length}s", content, at + 8)[0])
                self._scores.append(score)
                at += 8 + length
        except struct.error as error:
            raise _damaged(path) from error
        self._numbers: dict[bytes, int] = {}
        for number, piece in enumerate(self._pieces):
            self._numbers.setdefault(piece, number)
        self._merged_terms: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, after a begin token."""
        tokens = [BEGIN]
        # No piece spans two words, so each word is merged by itself, and once.
        for word in re.findall(" [^ ]*", f" {text}"):
            if word not in self._merged_terms:
                self._merged_terms[word] = self._merged(word)
            tokens += self._merged_terms[word]
        return tokens

    def token_text(self, token: int) -> str:
        """Return the text of a token."""
        if CONTROL <= token < CONTROL + 256:
            return bytes([token - CONTROL]).decode(errors="replace")
        return self._pieces[token].decode(errors="replace")

    def _merged(self, word: str) -> list[int]:
        tokens: list[int] = []
        for character in word:
            number = self._numbers.get(character.encode())
            own = [byte + CONTROL for byte in character.encode()]
            tokens += own if number is None else [number]
        while True:
            best, location, piece = float("-inf"), -1, -1
            for at, (left, right) in enumerate(pairwise(tokens)):
                result = self._numbers.get(self._pieces[left] + self._pieces[right], -1)
                if result >= 0 and self._scores[result] > best:
                    best, location, piece = self._scores[result], at, result
            if location < 0:
                return tokens
            tokens[location : location + 2] = [piece]


def _shapes(
    width: int, hidden: int, layers: int, heads: int, kv_heads: int, vocabulary: int
) -> dict[str, tuple[int, ...]]:
    kv_width = width // heads * kv_heads
    return {
        "embed_tokens": (vocabulary, width),
        "input_layernorm": (layers, width),
        "self_attn.q_proj": (layers, width, width),
        "self_attn.k_proj": (layers, kv_width, width),
        "self_attn.v_proj": (layers, kv_width, width),
        "self_attn.o_proj": (layers, width, width),
        "post_attention_layernorm": (layers, width),
        "mlp.gate_proj": (layers, hidden, width),
        "mlp.down_proj": (layers, width, hidden),
        "mlp.up_proj": (layers, hidden, width),
        "norm": (width,),
    }


def _state(
    numbers: Tensor, shapes: dict[str, tuple[int, ...]], *, heads: int, kv_heads: int
) -> dict[str, Tensor]:
    turned = {"self_attn.q_proj": heads, "self_attn.k_proj": kv_heads}
    state: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        size = torch.Size(shape).numel()
        read, numbers = numbers[:size].view(shape), numbers[size:]
        if name in ("embed_tokens", "norm"):
            state[f"model.{name}.weight"] = read
            continue
        for layer, weight in enumerate(read):
            if name in turned:
                weight = _halves(weight, turned[name])
            state[f"model.layers.{layer}.{name}.weight"] = weight
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    return state


def _halves(weight: Tensor, heads: int) -> Tensor:
    """Reorder rotary pairs, adjacent in llama2.c, to be half a head apart."""
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _content(path: Path) -> bytes:
    try:
        return read_plain(path)
    except OSError as error:
        raise ConfigError(f"{shown_path(path)} cannot be read: {error.strerror}.") from error


def _damaged(path: Path) -> ConfigError:
    return ConfigError(
        f"{shown_path(path)} is not in the version 0 format of llama2.c, or is incomplete."
    )
