"""The encoder of DNABERT-2: MosaicBERT, with ALiBi and gated MLPs (Zhou et al. 2024)."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MosaicBert(nn.Module):
    """Hidden states of tokens; parameters are named as in the published weights."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, eps = config["hidden_size"], config.get("layer_norm_eps", 1e-12)
        dropout = config.get("hidden_dropout_prob", 0.1)
        self.embeddings = _Embeddings(config, eps=eps, dropout=dropout)
        self.encoder = nn.Module()
        self.encoder.layer = nn.ModuleList(
            _Layer(
                width,
                heads=config["num_attention_heads"],
                inner=config["intermediate_size"],
                eps=eps,
                dropout=dropout,
                attention_dropout=config.get("attention_probs_dropout_prob", 0.0),
            )
            for _ in range(config["num_hidden_layers"])
        )
        self.heads = config["num_attention_heads"]

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return hidden states, (rows, length, width)."""
        x: Tensor = self.embeddings(tokens)
        at = torch.arange(tokens.shape[1], device=tokens.device)
        distance = (at[:, None] - at).abs().to(x.dtype)
        slopes = x.new_tensor(alibi_slopes(self.heads))
        bias = -slopes[:, None, None] * distance
        bias = bias.masked_fill(~mask[:, None, None, :], torch.finfo(x.dtype).min)
        layers = self.encoder.layer
        assert isinstance(layers, nn.ModuleList)
        for layer in layers:
            x = layer(x, bias)
        return x


def alibi_slopes(heads: int) -> list[float]:
    """Return the factor on the distance for each head (Press et al. 2022)."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    return slopes + (alibi_slopes(2 * power)[::2][: heads - power] if heads > power else [])


class _Embeddings(nn.Module):
    def __init__(self, config: dict[str, Any], *, eps: float, dropout: float) -> None:
        super().__init__()
        width = config["hidden_size"]
        self.word_embeddings = nn.Embedding(config["vocab_size"], width)
        self.token_type_embeddings = nn.Embedding(config.get("type_vocab_size", 2), width)
        self.LayerNorm = nn.LayerNorm(width, eps=eps)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.word_embeddings(tokens) + self.token_type_embeddings.weight[0]
        out: Tensor = self.dropout(self.LayerNorm(x))
        return out


class _Layer(nn.Module):
    """Attention and a gated MLP, each followed by a norm."""

    def __init__(
        self,
        width: int,
        *,
        heads: int,
        inner: int,
        eps: float,
        dropout: float,
        attention_dropout: float,
    ) -> None:
        super().__init__()
        self.attention = _Attention(
            width, heads=heads, eps=eps, dropout=dropout, attention_dropout=attention_dropout
        )
        self.mlp = _GatedMlp(width, inner=inner, eps=eps, dropout=dropout)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        out: Tensor = self.mlp(self.attention(x, bias))
        return out


class _Attention(nn.Module):
    def __init__(
        self, width: int, *, heads: int, eps: float, dropout: float, attention_dropout: float
    ) -> None:
        super().__init__()
        self.heads, self.attention_dropout = heads, attention_dropout
        self.self = nn.ModuleDict({"Wqkv": nn.Linear(width, 3 * width)})
        self.output = nn.ModuleDict(
            {"dense": nn.Linear(width, width), "LayerNorm": nn.LayerNorm(width, eps=eps)}
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        qkv = self.self["Wqkv"](x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = qkv.unbind(0)
        share = self.attention_dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask=bias.to(query.dtype), dropout_p=share
        )
        dense = self.output["dense"](mixed.transpose(1, 2).flatten(2))
        out: Tensor = self.output["LayerNorm"](self.dropout(dense) + x)
        return out


class _GatedMlp(nn.Module):
    def __init__(self, width: int, *, inner: int, eps: float, dropout: float) -> None:
        super().__init__()
        self.gated_layers = nn.Linear(width, 2 * inner, bias=False)
        self.wo = nn.Linear(inner, width)
        self.layernorm = nn.LayerNorm(width, eps=eps)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gated_layers(x).chunk(2, -1)
        out: Tensor = self.layernorm(self.wo(self.dropout(F.gelu(gate) * up)) + x)
        return out
