"""Sequence models, their combination with a head, and sampling."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from narrowcast.errors import ConfigError
from narrowcast.precision.dtensor import as_sharded
from narrowcast.workloads.genomics.models.blocks import Block
from narrowcast.workloads.genomics.models.config import GenomicConfig
from narrowcast.workloads.genomics.models.heads import SequenceHead
from narrowcast.workloads.genomics.models.hyena import HyenaOperator, HyenaState
from narrowcast.workloads.genomics.models.motif import MotifModel
from narrowcast.workloads.genomics.models.patches import (
    ByteLM,
    PatchBack,
    Patches,
    PatchFront,
    bounded,
    cut_at,
    every,
)
from narrowcast.workloads.genomics.published.transformer import Transformer


class GenomicModel(nn.Module):
    """Hidden states of tokens; with `reverse_complement`, the mean over both strands."""

    def __init__(
        self,
        config: GenomicConfig,
        complement: Sequence[int] | None = None,
        byte_lm: ByteLM | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.byte_lm = None
        if config.patching == "entropy":
            self.byte_lm = byte_lm or ByteLM(config.vocab_size)
        self.front = None if config.patching == "none" else PatchFront(config)
        self.back = None if config.patching == "none" else PatchBack(config)
        self.blocks = nn.ModuleList(Block(config, index) for index in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        table = _complement_table(config, complement)
        self.register_buffer("complement", table, persistent=False)
        self.complement: Tensor

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return hidden states, (rows, length, width), which do not depend on padding."""
        if not self.config.reverse_complement:
            return self._states(tokens, mask)
        places = reversed_places(tokens, mask)
        other = self.complement[tokens.gather(1, places)]
        masks = None if mask is None else torch.cat([mask, mask])
        strand, opposite = self._states(torch.cat([tokens, other]), masks).chunk(2)
        turned = opposite.gather(1, places[..., None].expand_as(opposite))
        return (strand + turned) / 2

    def stages(self) -> list[nn.Module]:
        """Return the stages from input to output, which hold all parameters."""
        around = (self.embed, self.front, *self.blocks, self.back, self.norm)
        return [stage for stage in around if stage is not None]

    def patches(self, tokens: Tensor, mask: Tensor | None = None) -> Patches:
        """Return the patches that `forward` uses."""
        config = self.config
        if self.byte_lm is None:
            starts = every(config.least_patch, tokens)
        else:
            wanted = self.byte_lm.entropy(tokens) > config.entropy_threshold
            starts = bounded(wanted, least=config.min_patch, most=config.max_patch)
        return cut_at(starts, mask, bound=config.max_patches(tokens.shape[1]))

    def _states(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        x = self.dropout(self.embed(tokens))
        if self.front is None or self.back is None:
            x = self._mixed(x, mask)
        else:
            patches = self.patches(tokens, mask)
            letters, latent = self.front(x, patches, mask)
            x = self.back(letters, self._mixed(latent, patches.mask), patches, mask)
        out: Tensor = self.norm(x)
        return out

    def _mixed(self, x: Tensor, mask: Tensor | None) -> Tensor:
        for block in self.blocks:
            x = block(x, mask)
        return x


def _complement_table(config: GenomicConfig, complement: Sequence[int] | None) -> Tensor:
    if not config.reverse_complement:
        return torch.zeros(0, dtype=torch.int64)
    if complement is None:
        raise ConfigError(
            "reverse_complement=true needs an alphabet with complements. Use DNA or RNA with one "
            "letter per token, or write reverse_complement=false."
        )
    table = torch.tensor([int(each) for each in complement], device="cpu")
    whole = len(table) == config.vocab_size and bool((table < len(table)).all())
    if not whole or not torch.equal(table[table], torch.arange(len(table), device="cpu")):
        raise ConfigError(
            f"complements must have one entry for each of {config.vocab_size} tokens, and the "
            "complement of a complement must be the token itself."
        )
    return table


def reversed_places(tokens: Tensor, mask: Tensor | None) -> Tensor:
    """Return the source index of each token in the reversed row; padding stays."""
    rows, length = tokens.shape
    location = torch.arange(length, device=tokens.device).expand(rows, length)
    if mask is None:
        return location.flip(1)
    backwards = mask.sum(1, keepdim=True) - 1 - location
    return torch.where(backwards < 0, location, backwards)


class Network(nn.Module):
    """A backbone with a head; for pairs the head sees the difference and the alternative."""

    def __init__(self, backbone: GenomicModel | MotifModel | Transformer, head: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(
        self, tokens: Tensor, mask: Tensor | None = None, alternative: Tensor | None = None
    ) -> Tensor:
        if isinstance(self.backbone, MotifModel) and mask is None:
            mask = torch.ones_like(tokens, dtype=torch.bool)
        if alternative is None:
            hidden = self.backbone(tokens, mask)
        else:
            known = None if mask is None else torch.cat([mask, mask])
            before, after = self.backbone(torch.cat([tokens, alternative]), known).chunk(2)
            hidden = torch.cat([after - before, after], -1)
        head = self.head
        if isinstance(self.backbone, MotifModel) and mask is not None:
            mask = self.backbone.pooled_mask(mask)
        out: Tensor = head(hidden, mask) if isinstance(head, SequenceHead) else head(hidden)
        return out

    def stages(self) -> list[nn.Module]:
        """Return the stages from input to output, which hold all parameters."""
        return [*self.backbone.stages(), self.head]


def _cached(model: nn.Module) -> bool:
    """Return whether a model can continue from states: causal Hyena over single letters."""
    if not isinstance(model, GenomicModel):
        return False
    if any(as_sharded(weight) is not None for weight in model.parameters()):
        return False  # blocks gather their weights in forward() only
    config = model.config
    return config.backbone == "hyena" and config.causal and config.patching == "none"


class _Continuation:
    """Hidden states of the last letter, computed once for each letter."""

    def __init__(self, model: nn.Module, room: int) -> None:
        self.model, self.room = model, room
        self.states = list[HyenaState]()

    def read(self, tokens: Tensor) -> Tensor:
        """Return the states of the last letter, (rows, 1, width)."""
        model = self.model
        if not _cached(model):
            out: Tensor = model(tokens)[:, -1:]
            return out
        assert isinstance(model, GenomicModel)
        started = bool(self.states)
        x = model.embed(tokens[:, -1:] if started else tokens)
        for index, block in enumerate(model.blocks):
            assert isinstance(block, Block)
            assert isinstance(block.mixer, HyenaOperator)
            inputs = block.mixer_norm(x)
            if started:
                mixed = block.mixer.step(inputs, self.states[index])
            else:
                mixed, state = block.mixer.start(inputs, self.room)
                self.states.append(state)
            x = x + mixed
            x = x + block.mlp(block.mlp_norm(x))
        normed: Tensor = model.norm(x[:, -1:])
        return normed


@torch.no_grad()
def generate(
    model: nn.Module,
    head: nn.Module,
    tokens: Tensor,
    *,
    count: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    allowed: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return `tokens` with `count` sampled `allowed` ids appended.

    A causal Hyena reads each letter once: its states are kept from letter to letter.
    """
    training = model.training, head.training
    model.eval(), head.eval()
    continuation = _Continuation(model, room=count)
    try:
        for _ in range(count):
            logits = head(continuation.read(tokens))[:, 0].float()
            if allowed is not None:
                shut = torch.ones_like(logits, dtype=torch.bool).index_fill(1, allowed, False)
                logits = logits.masked_fill(shut, -torch.inf)
            chosen = choose(
                logits, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator
            )
            tokens = torch.cat([tokens, chosen], dim=1)
    finally:
        model.train(training[0]), head.train(training[1])
    return tokens


def choose(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Sample one token per row, (rows, 1), from (rows, vocab) logits."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    likeliest, ids = (logits / temperature).sort(dim=-1, descending=True)
    chances = likeliest.softmax(-1)
    if top_k is not None:
        chances = chances.where(torch.arange(chances.shape[1], device=chances.device) < top_k, 0)
    if top_p is not None:
        # One is kept while those before it do not reach the sum: the first always.
        chances = chances / chances.sum(-1, keepdim=True)
        chances = chances.where(chances.cumsum(-1) - chances < top_p, 0)
    return ids.gather(1, torch.multinomial(chances, 1, generator=generator))
