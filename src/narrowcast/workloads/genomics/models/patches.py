"""Where sequences are cut, the byte model that places cuts, and the layers around blocks.

The number of patches of a row stays on the device; the host knows only the maximum.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowcast.workloads.genomics.models.config import GenomicConfig

LOCAL_TAPS = 9
TAPS = 4
DILATIONS = (1, 4)
"""Dilations of the two layers; each letter is predicted from the 16 before it."""
LEARNING_RATE = 1e-2


@dataclass(frozen=True)
class Patches:
    """Assignment of letters to patches."""

    ids: Tensor
    """Patch of each letter, (rows, length); `bound` for padding."""
    lengths: Tensor
    """Letters per patch, (rows, bound), zeros last."""

    @property
    def bound(self) -> int:
        """Maximum number of patches."""
        return self.lengths.shape[1]

    @property
    def mask(self) -> Tensor:
        return self.lengths > 0

    def pooled(self, letters: Tensor) -> Tensor:
        """Return the mean state of each patch, (rows, bound, width); zeros for empty ones."""
        rows, _, width = letters.shape
        sums = letters.new_zeros((rows * (self.bound + 1), width))
        sums = sums.index_add(0, self._slots(), letters.flatten(0, 1))
        means: Tensor = sums.unflatten(0, (rows, -1))[:, :-1]
        return (means / self.lengths.clamp(min=1)[..., None]).to(letters.dtype)

    def spread(self, patches: Tensor, *, shifted: bool) -> Tensor:
        """Return the state of each letter's patch, or with `shifted` of the patch before it."""
        nothing = patches.new_zeros((len(patches), 1, patches.shape[2]))
        slots = torch.cat([nothing, patches] if shifted else [patches, nothing], dim=1)
        inputs = slots.flatten(0, 1).index_select(0, self._slots())
        return inputs.reshape(*self.ids.shape, -1)

    def _slots(self) -> Tensor:
        """Return a number per letter's patch over all rows; one extra per row for padding."""
        rows = torch.arange(len(self.ids), device=self.ids.device)[:, None]
        return (rows * (self.bound + 1) + self.ids).flatten()


def cut_at(starts: Tensor, mask: Tensor | None, *, bound: int) -> Patches:
    """Return the patches that begin at `starts`, (rows, length), at most `bound` per row."""
    ids = starts.cumsum(1) - 1
    if mask is not None:
        ids = ids.where(mask, bound)
    counted = ids.new_zeros((len(ids), bound + 1)).scatter_add(1, ids, torch.ones_like(ids))
    return Patches(ids, counted[:, :bound])


def every(size: int, tokens: Tensor) -> Tensor:
    """Return the starts of patches of `size` letters, (rows, length)."""
    location = torch.arange(tokens.shape[1], device=tokens.device)
    return (location % size == 0).expand(tokens.shape)


def bounded(wanted: Tensor, *, least: int, most: int) -> Tensor:
    """Return starts of patches of `least` to `most` letters; the last of a row may be shorter.

    Starts are found by pointer doubling, in steps of 1, 2, 4, … patches.
    """
    rows, length = wanted.shape
    position = torch.arange(length + 1, device=wanted.device)
    # The first wanted place from each on; the end is one.
    following = torch.where(wanted, position[:-1], length).flip(1).cummin(1).values.flip(1)
    following = torch.nn.functional.pad(following, (0, 1), value=length)
    after_least = following[:, (position + least).clamp(max=length)]
    step = torch.minimum(after_least, (position + most).clamp(max=length))
    starts = (position == 0).expand(rows, -1)
    for _ in range((-(-length // least)).bit_length()):
        reached = torch.zeros_like(step).scatter_add(1, step, starts.long()) > 0
        starts = starts | reached
        step = step.gather(1, step)
    return starts[:, :length]


class PatchFront(nn.Module):
    """Local blocks over letters, then one token per patch."""

    def __init__(self, config: GenomicConfig) -> None:
        super().__init__()
        self.local = nn.ModuleList(LocalBlock(config) for _ in range(config.local_layers))
        self.norm = nn.LayerNorm(config.width)
        self.patch = nn.Linear(config.width, config.width)

    def forward(
        self, letters: Tensor, patches: Patches, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return letter states, (rows, length, width), and patch states, (rows, patches, width)."""
        for block in self.local:
            letters = block(letters, mask)
        return letters, self.patch(patches.pooled(self.norm(letters)))


class PatchBack(nn.Module):
    """Adds patch states to letters (of the patch before if causal), then local blocks."""

    def __init__(self, config: GenomicConfig) -> None:
        super().__init__()
        self.causal = config.causal
        self.norm = nn.LayerNorm(config.width)
        self.letter = nn.Linear(config.width, config.width)
        self.local = nn.ModuleList(LocalBlock(config) for _ in range(config.local_layers))

    def forward(
        self, letters: Tensor, tokens: Tensor, patches: Patches, mask: Tensor | None
    ) -> Tensor:
        # A letter does not know its own patch before that is complete.
        inputs = patches.spread(self.letter(self.norm(tokens)), shifted=self.causal)
        letters = letters + inputs
        for block in self.local:
            letters = block(letters, mask)
        return letters


class LocalBlock(nn.Module):
    """Residual block with a depthwise convolution."""

    def __init__(self, config: GenomicConfig) -> None:
        super().__init__()
        width = config.width
        reach = LOCAL_TAPS - 1
        self.padding = (reach, 0) if config.causal else (reach // 2, reach // 2)
        self.norm = nn.LayerNorm(width)
        self.near = nn.Conv1d(width, width, LOCAL_TAPS, groups=width)
        self.mix = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        y = self.norm(x)
        y = y if mask is None else y * mask[..., None]
        near = self.near(F.pad(y.transpose(1, 2), self.padding)).transpose(1, 2)
        out: Tensor = x + self.dropout(self.out(F.gelu(self.mix(near))))
        return out


class ByteLM(nn.Module):
    """Predicts the next letter by two causal convolutions, with untrained buffers as weights."""

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
        """Return logits of the next letter, (rows, length, vocab)."""
        x = F.embedding(tokens, self._weight("embed")).transpose(1, 2)
        for index, dilation in enumerate(DILATIONS):
            padded = F.pad(x, ((TAPS - 1) * dilation, 0))
            kernel, bias = self._weight(f"kernel{index}"), self._weight(f"bias{index}")
            x = x + F.gelu(F.conv1d(padded, kernel, bias, dilation=dilation))
        return F.linear(x.transpose(1, 2), self._weight("out"), self._weight("out_bias"))

    @torch.no_grad()
    def entropy(self, tokens: Tensor) -> Tensor:
        """Return the entropy of each letter given those before it, in bits: (rows, length)."""
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
    """Train a `ByteLM` on random windows of a sequence, (letters,)."""
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
    """Return the entropy threshold that one letter in `patch_size` exceeds."""
    flat = entropy.flatten().float().sort().values
    return float(flat[min(int(len(flat) * (1 - 1 / patch_size)), len(flat) - 1)])
