"""The small networks that the tasks of benchmarks/hybrid.py train."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CharMLP(nn.Module):
    """Bengio's language model: embeddings of a fixed context, one hidden layer."""

    def __init__(self, vocab: int, *, context: int, embedding: int, hidden: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, embedding)
        self.hidden = nn.Linear(context * embedding, hidden)
        self.out = nn.Linear(hidden, vocab)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(F.gelu(self.hidden(self.embed(ids).flatten(1))))


class Block(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, width: int, heads: int, *, dropout: float = 0.0, bias: bool = True) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.before, self.between = (nn.LayerNorm(width, bias=bias) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.proj = nn.Linear(width, width, bias=bias)
        self.up = nn.Linear(width, 4 * width, bias=bias)
        self.down = nn.Linear(4 * width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            each.view(batch, length, self.heads, -1).transpose(1, 2)
            for each in self.qkv(self.before(x)).split(width, dim=2)
        )
        dropped = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropped)
        mixed = self.proj(mixed.transpose(1, 2).reshape(batch, length, width))
        x = x + F.dropout(mixed, dropped, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.between(x)))), dropped, self.training)


class GPT(nn.Module):
    """A decoder with learned positions; the head has weights of its own, unless it is tied."""

    def __init__(
        self, vocab: int, *, length: int, width: int, layers: int, heads: int,
        dropout: float = 0.0, bias: bool = True, tied: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.dropout = dropout
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            Block(width, heads, dropout=dropout, bias=bias) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width, bias=bias)
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                # GPT-2: residual branches start smaller, by how many are summed.
                deep = name.endswith(("proj.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 / (2 * layers) ** 0.5 if deep else 0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        x = F.dropout(x, self.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def image_cnn(side: int, *, channels: int, classes: int = 10) -> nn.Module:
    """Two convolutions, each pooled, and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(channels, 2 * channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(2 * channels * (side // 4) ** 2, classes),
    )  # fmt: skip


def image_mlp(side: int, *, hidden: int, classes: int = 10) -> nn.Module:
    """Two hidden layers on the pixels."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(side * side, hidden), nn.ReLU(),
        nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, classes),
    )  # fmt: skip


def dna_cnn(*, channels: int, classes: int = 2) -> nn.Module:
    """One-hot bases (batch, 4, length): motifs, their neighbourhoods, the strongest of each."""
    return nn.Sequential(
        nn.Conv1d(4, channels, 9, padding=4), nn.ReLU(), nn.MaxPool1d(2),
        nn.Conv1d(channels, channels, 5, padding=2), nn.ReLU(), nn.AdaptiveMaxPool1d(4),
        nn.Flatten(), nn.Dropout(0.3), nn.Linear(4 * channels, classes),
    )  # fmt: skip


def table_mlp(features: int, *, hidden: int) -> nn.Module:
    """Two hidden layers and one number."""
    return nn.Sequential(
        nn.Linear(features, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(),
        nn.Linear(hidden, 1),
    )  # fmt: skip
