"""What is decomposed: two toys whose weights are given, and a small language model."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 4000
SUCCESSORS = 8
"""Tokens that can follow a token in the made text: its entropy is below log 8."""


class TMS(nn.Module):
    """Toy model of superposition: ReLU(W^T W x + b), W of shape (hidden, features)."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        hidden, features = weight.shape
        self.linear1 = nn.Linear(features, hidden, bias=False)
        self.linear2 = nn.Linear(hidden, features)
        with torch.no_grad():
            self.linear1.weight.copy_(weight)
            self.linear2.weight.copy_(weight.T)
            self.linear2.bias.copy_(bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.linear2(self.linear1(x)))


class ResidMLP(nn.Module):
    """A residual stream between a fixed embedding and its transpose, with one MLP on it."""

    def __init__(self, embedding: Tensor, mlp_in: Tensor, mlp_out: Tensor) -> None:
        super().__init__()
        self.register_buffer("embedding", embedding)  # (features, width)
        self.mlp_in = nn.Linear(mlp_in.shape[1], mlp_in.shape[0], bias=False)
        self.mlp_out = nn.Linear(mlp_out.shape[1], mlp_out.shape[0], bias=False)
        with torch.no_grad():
            self.mlp_in.weight.copy_(mlp_in)
            self.mlp_out.weight.copy_(mlp_out)

    def forward(self, x: Tensor) -> Tensor:
        stream = x @ self.embedding
        stream = stream + self.mlp_out(F.relu(self.mlp_in(stream)))
        return stream @ self.embedding.T


def pentagon(features: int = 5) -> TMS:
    """Return the 5-2 toy as training finds it: a regular polygon, its norm and bias as measured."""
    angles = torch.arange(features) * 2 * math.pi / features
    return TMS(1.13 * torch.stack([angles.cos(), angles.sin()]), torch.full((features,), -0.24))


def made_resid_mlp(features: int = 100, width: int = 1000, hidden: int = 50) -> ResidMLP:
    """Return one of the right shapes: every neuron reads and writes two features."""
    chance = torch.Generator().manual_seed(0)
    embedding = F.normalize(torch.randn(features, width, generator=chance), dim=1)
    owners = torch.arange(features) % hidden
    reads = F.one_hot(owners, hidden).float().T  # (hidden, features)
    return ResidMLP(embedding, reads @ embedding, (reads @ embedding).T.contiguous())


def sparse_features(
    batch: int,
    features: int,
    probability: float,
    *,
    device: torch.device,
    low: float = 0.0,
) -> Iterator[Tensor]:
    """Yield batches whose features are there by chance, each with a value from `low` to 1."""
    while True:
        values = torch.rand(batch, features, device=device) * (1 - low) + low
        yield values * (torch.rand(batch, features, device=device) < probability)


def made_tokens(count: int, *, vocabulary: int = VOCABULARY, seed: int = 0) -> Tensor:
    """Return text with something to learn: each token has a few that can follow it."""
    chance = torch.Generator().manual_seed(seed)
    table = torch.randint(vocabulary, (vocabulary, SUCCESSORS), generator=chance)
    weights = 1 / torch.arange(1, SUCCESSORS + 1).float()
    walkers = max(1, min(count, 1024))  # many short texts at once, then end to end
    length = -(-count // walkers)
    at = torch.randint(vocabulary, (walkers,), generator=chance)
    found = []
    for _ in range(length):
        found.append(at)
        pick = torch.multinomial(weights, walkers, replacement=True, generator=chance)
        at = table[at, pick]
    return torch.stack(found, 1).flatten()[:count]


def windows(tokens: Tensor, length: int) -> list[Tensor]:
    """Cut text into rows of `length`."""
    return list(tokens[: len(tokens) // length * length].view(-1, length))


def language_model(
    *, layers: int = 4, width: int = 128, hidden: int = 512, vocabulary: int = VOCABULARY
) -> nn.Module:
    """Return a Llama of transformers; of its MLPs, `gate_proj` stays as it is."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return LlamaForCausalLM(config)


def train_language_model(
    model: nn.Module,
    tokens: Tensor,
    *,
    steps: int,
    device: torch.device,
    batch: int = 32,
    length: int = 128,
    tell: Callable[[str], None] = lambda said: None,
) -> float:
    """Train it for some steps, so that its weights are not those of chance; return its loss."""
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    chance = torch.Generator().manual_seed(1)
    value = math.nan
    for step in range(steps):
        starts = torch.randint(len(tokens) - length, (batch,), generator=chance)
        rows = torch.stack([tokens[at : at + length] for at in starts.tolist()]).to(device)
        logits = model(rows).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in (0, steps - 1):
            value = loss.item()
            tell(f"target: step {step + 1} of {steps}, loss {value:.2f}")
    model.eval()
    return value


def write_language(folder: Path, model: nn.Module, tokens: Tensor) -> Path:
    """Write the model, a tokenizer that knows its words, and the text; return where the text is."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"w{at}": at for at in range(model.config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w0").save_pretrained(folder)
    text = folder / "text.txt"
    text.write_text(" ".join(f"w{token}" for token in tokens.tolist()) + "\n")
    return text
