"""A small model of the next letter, trained in seconds, whose doubt says where patches begin."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TAPS = 4
DILATIONS = (1, 4)
"""Of the two layers: each letter is guessed from the 16 before it."""
LEARNING_RATE = 1e-2


class ByteLM(nn.Module):
    """Guess the letter after each, from those just before it, by two causal convolutions.

    Its weights are buffers: part of what a model saves, but nothing a policy gives a format or an
    optimizer moves, so that a sequence always has the same patches. Until `train_byte_lm` has set
    them it guesses at random.
    """

    def __init__(self, vocab_size: int, width: int = 48) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self._add("embed", vocab_size, width, deviation=1.0)
        for index in range(len(DILATIONS)):
            self._add(f"kernel{index}", width, width, TAPS, deviation=(width * TAPS) ** -0.5)
            self._add(f"bias{index}", width, deviation=0.0)
        self._add("out", vocab_size, width, deviation=width**-0.5)
        self._add("out_bias", vocab_size, deviation=0.0)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of the letter after each: (rows, length, vocab)."""
        x = F.embedding(tokens, self._weight("embed")).transpose(1, 2)
        for index, dilation in enumerate(DILATIONS):
            padded = F.pad(x, ((TAPS - 1) * dilation, 0))
            kernel, bias = self._weight(f"kernel{index}"), self._weight(f"bias{index}")
            x = x + F.gelu(F.conv1d(padded, kernel, bias, dilation=dilation))
        return F.linear(x.transpose(1, 2), self._weight("out"), self._weight("out_bias"))

    @torch.no_grad()
    def entropy(self, tokens: Tensor) -> Tensor:
        """Return how open each letter was before it was read, in bits: (rows, length).

        It depends on the letters before it alone; the first one is as open as can be.
        """
        with torch.autocast(tokens.device.type, enabled=False):
            chances = self(tokens).log_softmax(-1)
            bits = -(chances.exp() * chances).sum(-1) / math.log(2)
            return F.pad(bits[:, :-1], (1, 0), value=math.log2(self.vocab_size))

    def _add(self, name: str, *shape: int, deviation: float) -> None:
        self.register_buffer(name, torch.randn(shape) * deviation)

    def _weight(self, name: str) -> Tensor:
        return self.get_buffer(name)


def train_byte_lm(
    tokens: Tensor,
    *,
    vocab_size: int,
    generator: torch.Generator,
    steps: int = 200,
    rows: int = 16,
    length: int = 256,
) -> ByteLM:
    """Train a `ByteLM` on windows of a long sequence, (letters,), drawn by `generator`."""
    with torch.random.fork_rng([]):
        torch.manual_seed(int(torch.randint(2**31, (), generator=generator)))
        model = ByteLM(vocab_size).to(tokens.device)
    weights = list(model.buffers())
    optimizer = torch.optim.Adam([w.requires_grad_() for w in weights], lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    length = min(length, len(tokens) - 1)
    within = torch.arange(length + 1)
    for _ in range(steps):
        starts = torch.randint(len(tokens) - length, (rows, 1), generator=generator)
        window = tokens[(starts + within).to(tokens.device)]
        loss = F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    for weight in weights:
        weight.requires_grad_(False).grad = None
    return model


def threshold_for(entropy: Tensor, *, patch_size: float) -> float:
    """Return the entropy above which one letter in `patch_size` lies, so that patches are as long.

    Bounds on the lengths of patches come on top of it.
    """
    flat = entropy.flatten().float().sort().values
    return float(flat[min(int(len(flat) * (1 - 1 / patch_size)), len(flat) - 1)])
