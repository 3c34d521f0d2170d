"""A GPT: rotary positions, causal attention, norms first.

Policies match module names: `embed`, `blocks.N.{attn_norm,mlp_norm}`, `blocks.N.attn.{qkv,out}`,
`blocks.N.mlp.{up,gate,down}`, `norm`, `head`. A tied head shares its weight with `embed`.
"""

import math
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowcast.errors import ConfigError
from narrowcast.precision.fused.linear_cross_entropy import linear_cross_entropy
from narrowcast.workloads.lm.settings import LmModel

NORM_EPSILON = 1e-5
"""As in Llama, and torch's own default for layer norms."""


class GPT(nn.Module):
    """Predict each next token of sequences of at most `length` tokens out of `vocab`."""

    def __init__(self, settings: LmModel, *, vocab: int, length: int) -> None:
        super().__init__()
        self.vocab = vocab
        self.length = length
        self.layers = settings.layers
        self.rope_base = settings.rope_base
        self.head_width = settings.width // settings.heads
        self.embed = nn.Embedding(vocab, settings.width)
        self.blocks = nn.ModuleList(Block(settings) for _ in range(settings.layers))
        self.norm = _norm(settings)
        self.head = nn.Linear(settings.width, vocab, bias=False)
        self.tied = settings.tied
        self.tie()
        # Not saved, as it can be computed again; fp32 whatever the weights are, because 16 bits
        # cannot tell the small angles of neighbouring positions apart.
        table = rotary_table(length, self.head_width, base=self.rope_base)
        self.register_buffer("rotary", table, persistent=False)
        self.rotary: Tensor

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        reduction: Literal["mean", "none"] = "mean",
    ) -> Tensor:
        """Return logits (batch, length, vocab), or with `targets` their cross-entropy in fp32."""
        length = tokens.shape[-1]
        if length > self.length:
            raise ConfigError(
                f"The input must have at most {self.length} tokens, got {length}. Truncate the "
                f"text, or build the model with data.length={length}."
            )
        rotary = self.rotary[:length]
        x = self.embed(tokens)  # (batch, length, width)
        for block in self.blocks:
            x = block(x, rotary)
        x = self.norm(x)
        if targets is not None:
            return linear_cross_entropy(x, self.head, targets, reduction=reduction)
        logits: Tensor = self.head(x)
        return logits

    def tie(self) -> None:
        """Tie the head to the embedding again, after a copy to a device separated them."""
        if self.tied:
            self.head.weight = self.embed.weight

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Set every weight and the rotary table from a CPU generator, the same on any device.

        Weights get the deviation sqrt(2 / 5 width) of Nguyen and Salazar (2019), which is GPT-2's
        0.02 at width 1000. Projections onto the residual stream are divided by sqrt(2 layers).
        """
        deviation = math.sqrt(2 / (5 * self.embed.embedding_dim))
        residual = deviation / math.sqrt(2 * self.layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            std = residual if name.endswith(("attn.out.weight", "mlp.down.weight")) else deviation
            parameter.copy_(torch.empty(parameter.shape).normal_(std=std, generator=generator))
        self.fill_buffers()

    @torch.no_grad()
    def fill_buffers(self) -> None:
        """Compute what is neither a weight nor saved."""
        self.rotary.copy_(rotary_table(self.length, self.head_width, base=self.rope_base))


class Block(nn.Module):
    """Add attention, then the mlp, to the residual stream."""

    def __init__(self, settings: LmModel) -> None:
        super().__init__()
        self.attn_norm = _norm(settings)
        self.attn = Attention(settings)
        self.mlp_norm = _norm(settings)
        self.mlp: nn.Module = SwiGLU(settings) if settings.mlp == "swiglu" else MLP(settings)

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x), rotary)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Attention(nn.Module):
    """Causal attention in which groups of query heads may share one key and value head."""

    nc_kernels: bool = False
    """Whether heads are turned by a kernel for 16 bits; a prepared model on a GPU sets it."""

    def __init__(self, settings: LmModel) -> None:
        super().__init__()
        self.heads = settings.heads
        self.kv_heads = settings.kv_heads or settings.heads
        self.head_width = settings.width // settings.heads
        rows = (self.heads + 2 * self.kv_heads) * self.head_width
        self.qkv = nn.Linear(settings.width, rows, bias=settings.bias)
        self.out = nn.Linear(settings.width, settings.width, bias=settings.bias)

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        heads: Tensor = self.qkv(x).unflatten(-1, (-1, self.head_width))  # (batch, length, head, …)
        query, key, value = self._turned(heads, rotary)
        gathered = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            is_causal=True,
            enable_gqa=self.kv_heads != self.heads,
        )
        out: Tensor = self.out(gathered.transpose(1, 2).flatten(2))
        return out

    def _turned(self, heads: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys with rotary positions, and values."""
        if self.nc_kernels and heads.dtype in (torch.bfloat16, torch.float16):
            from narrowcast.kernels.rotary import turn_heads  # Triton is not everywhere

            return turn_heads(heads, rotary, queries=self.heads)
        # Queries and keys turn alike, so one call turns both.
        turning = self.heads + self.kv_heads
        turned = rotate(heads[:, :, :turning], rotary)
        return turned[:, :, : self.heads], turned[:, :, self.heads :], heads[:, :, turning:]


class MLP(nn.Module):
    """Widen, apply the exact GELU, narrow."""

    fused_mlp: ClassVar[tuple[str, str, str]] = ("up", "gelu", "down")
    """What `forward` does, for a plan that can run it as one."""

    def __init__(self, settings: LmModel) -> None:
        super().__init__()
        width = settings.hidden_width
        self.up = nn.Linear(settings.width, width, bias=settings.bias)
        self.down = nn.Linear(width, settings.width, bias=settings.bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


class SwiGLU(nn.Module):
    """Widen twice, let one side gate the other, narrow (Shazeer 2020)."""

    def __init__(self, settings: LmModel) -> None:
        super().__init__()
        width = settings.hidden_width
        self.up = nn.Linear(settings.width, width, bias=settings.bias)
        self.gate = nn.Linear(settings.width, width, bias=settings.bias)
        self.down = nn.Linear(width, settings.width, bias=settings.bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


def build_gpt(
    settings: LmModel, *, vocab: int, length: int, seed: int, device: torch.device
) -> GPT:
    """Build an initialised GPT on `device`; on the meta device only its shapes.

    Draws one weight at a time on the CPU from its own generator, so a seed means the same model
    on every device.
    """
    with torch.device("meta"):
        model = GPT(settings, vocab=vocab, length=length)
    if device.type == "meta":
        return model
    model.to_empty(device=device)
    model.tie()
    model.initialise(torch.Generator().manual_seed(seed))
    return model


def _norm(settings: LmModel) -> nn.Module:
    if settings.norm == "layernorm":
        return nn.LayerNorm(settings.width, eps=NORM_EPSILON, bias=settings.bias)
    return nn.RMSNorm(settings.width, eps=NORM_EPSILON)


def rotary_table(length: int, head_width: int, *, base: float) -> Tensor:
    """Return cosine and sine of position · base^(−2i / head_width): (length, 1, i, 2)."""
    # In float64: at position 10,000 an fp32 angle is off by up to 5e-4.
    frequency = base ** (-torch.arange(0, head_width, 2, dtype=torch.float64) / head_width)
    angle = torch.arange(length, dtype=torch.float64)[:, None, None] * frequency
    return torch.stack((angle.cos(), angle.sin()), dim=-1).float()


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Turn each pair of `x`, (batch, length, head, head width), by the angle of its position.

    In fp32 at least. Eager mode multiplies complex numbers (5 times faster on 2 CPU cores); the
    compiler does not support them, and fuses the real form into one pass.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    pairs, table = x.to(wide).reshape(*x.shape[:-1], -1, 2), table.to(wide)
    if torch.compiler.is_compiling():
        turned = _product(pairs, table)
    else:
        turned = torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(table))
    return turned.flatten(-2).to(x.dtype)


def _product(pairs: Tensor, table: Tensor) -> Tensor:
    """Multiply complex numbers stored as pairs, as x · cos + swapped(x) · (−sin, sin).

    Stacked from its two parts, it took the time of two to three passes on a GPU.
    """
    cosine, sine = table.split(1, dim=-1)  # each beside a pair: (length, 1, i, 1)
    signs = torch.tensor([-1.0, 1.0], dtype=table.dtype, device=table.device)
    turned: Tensor = pairs * cosine + pairs.flip(-1) * (sine * signs)
    return turned


class SwellingMLP(nn.Module):
    """An mlp that doubles the last layer's input every so many passes and halves its output."""

    def __init__(self, plain: MLP, *, every: int) -> None:
        super().__init__()
        self.up, self.down, self.every = plain.up, plain.down, every
        self.register_buffer("passes", torch.zeros((), device=plain.up.weight.device))
        self.passes: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            self.passes += 1
        factor = torch.exp2(torch.floor(self.passes / self.every))
        # In fp32, so that what overflows is the format of the layer, and another one helps.
        out: Tensor = self.down(F.gelu(self.up(x)).float() * factor) / factor
        return out


def let_swell(model: GPT, *, every: int) -> None:
    """Put the layer in place of the middle block's mlp, with its weights and their names."""
    middle = model.blocks[len(model.blocks) // 2]
    assert isinstance(middle, Block)
    assert isinstance(middle.mlp, MLP)
    middle.mlp = SwellingMLP(middle.mlp, every=every)
