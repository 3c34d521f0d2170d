"""The shape of a sequence model; importable without torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from narrowcast.errors import ConfigError

Backbone = Literal["hyena", "attention", "cnn", "motif", "published"]
"""published: a transformer that `published` describes."""
Patching = Literal["none", "static", "entropy"]


@dataclass(frozen=True, kw_only=True)
class GenomicConfig:
    """The shape of a `GenomicModel`."""

    vocab_size: int
    width: int = 128
    layers: int = 2
    max_length: int = 1024
    """Length that filters decay over; longer sequences are allowed."""
    causal: bool = False
    backbone: Backbone = "hyena"
    order: int = 2
    """Order of the Hyena operator: one more than its long convolutions."""
    filter_width: int = 64
    """Hidden units of the network that generates Hyena filters."""
    filter_shift: float = 0.0
    """Added to the decay of Hyena filters, which then do not fade to zero."""
    gelu: Literal["exact", "tanh"] = "exact"
    """The GELU of MLPs."""
    heads: int | None = None
    """Attention heads; None: one per 64 of the width."""
    kernel: int = 9
    """Taps of CNN convolutions, and of motif filters."""
    pooling: int = 1
    """Letters per hidden state of a motif network."""
    window_start: int = 0
    window_end: int = 0
    """Letters that a motif network reads; all of them if the end is 0."""
    aligned: bool = False
    """Whether all sequences have one length, so that a position means the same in each."""
    patching: Patching = "none"
    patch_size: int = 4
    """Letters per static patch."""
    min_patch: int = 2
    max_patch: int = 16
    """Bounds of entropy patches; the last of a row may be shorter."""
    entropy_threshold: float = 1.3
    """Entropy in bits above which a letter starts a patch."""
    local_layers: int = 1
    """Blocks over letters before patching, and again after it."""
    reverse_complement: bool = False
    """Whether the reverse complement gives the same hidden states, reversed."""
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("vocab_size", "width", "layers", "max_length", "filter_width", "patch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be 1 or more, got {getattr(self, name)}.")
        if self.order < 2:
            raise ConfigError(
                f"order must be 2 or more (Hyena needs a gate and a value), got {self.order}."
            )
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ConfigError(f"kernel must be odd, got {self.kernel}.")
        if self.backbone == "attention" and self.width % (2 * self.head_count):
            raise ConfigError(
                f"width must split into {self.head_count} heads of an even width, got {self.width}."
            )
        if not 0 <= self.window_start <= self.window_end or self.pooling < 1:
            raise ConfigError(
                "window_start must be 0 or more and at most window_end, and pooling 1 or more, got "
                f"{self.window_start}, {self.window_end} and {self.pooling}."
            )
        if not 1 <= self.min_patch <= self.max_patch:
            raise ConfigError(
                f"min_patch must be 1 or more and at most max_patch, got {self.min_patch} and "
                f"{self.max_patch}."
            )
        if self.reverse_complement and self.causal:
            raise ConfigError(
                "reverse_complement=true and causal=true cannot be combined. Set one of them to "
                "false."
            )

    @property
    def head_count(self) -> int:
        return self.heads or max(self.width // 64, 1)

    @property
    def least_patch(self) -> int:
        """Letters of the smallest patch."""
        return {"none": 1, "static": self.patch_size, "entropy": self.min_patch}[self.patching]

    def max_patches(self, length: int) -> int:
        """Return the maximum number of patches of `length` letters."""
        return -(-length // self.least_patch)


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "mini": {"width": 64, "layers": 2, "max_length": 1024},
    # The shapes of HyenaDNA's smallest and longest models, and of usual transformers between.
    "tiny": {"width": 128, "layers": 2, "max_length": 1024},
    "small": {"width": 256, "layers": 4, "max_length": 16_384},
    "base": {"width": 768, "layers": 12, "max_length": 32_768},
    "large": {"width": 1024, "layers": 24, "max_length": 65_536},
    "long": {"width": 256, "layers": 8, "max_length": 1_048_576},
}
"""Shapes by name."""
