"""The shape of a model of sequences; without torch, so that a mistake is answered at once."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from narrowcast.errors import ConfigError

Backbone = Literal["hyena", "attention", "cnn"]
Patching = Literal["none", "static", "entropy"]


@dataclass(frozen=True, kw_only=True)
class GenomicConfig:
    """What a `GenomicModel` is built from."""

    vocab_size: int
    width: int = 128
    layers: int = 2
    max_length: int = 1024
    """Letters of the longest sequence: filters fade over it; longer ones can be given."""
    causal: bool = False
    """Whether a position sees only itself and what is before it."""
    backbone: Backbone = "hyena"
    order: int = 2
    """Gates of a Hyena operator, one more than its long convolutions."""
    filter_width: int = 64
    """Hidden units of the network that gives Hyena's filters."""
    heads: int | None = None
    """Heads of attention; without a number, one for each 64 of the width."""
    kernel: int = 9
    """Taps of the convolutions of a CNN."""
    patching: Patching = "none"
    patch_size: int = 4
    """Letters of a static patch."""
    min_patch: int = 2
    max_patch: int = 16
    """Bounds of entropy patches; the last of a row may be shorter."""
    entropy_threshold: float = 1.3
    """Bits of a letter's entropy above which a patch begins with it."""
    local_layers: int = 1
    """Blocks over letters before patches are made, and again after they are undone."""
    reverse_complement: bool = False
    """Whether the other strand gives the same hidden states, the other way round."""
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
        """Heads of attention."""
        return self.heads or max(self.width // 64, 1)

    @property
    def least_patch(self) -> int:
        """Letters of the smallest patch a row may be full of."""
        return {"none": 1, "static": self.patch_size, "entropy": self.min_patch}[self.patching]

    def max_patches(self, length: int) -> int:
        """Return how many patches a sequence of `length` letters has at most."""
        return -(-length // self.least_patch)


PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "mini": {"width": 64, "layers": 2, "max_length": 1024},
        # The shapes of HyenaDNA's smallest and longest models, and of usual transformers between.
        "tiny": {"width": 128, "layers": 2, "max_length": 1024},
        "small": {"width": 256, "layers": 4, "max_length": 16_384},
        "base": {"width": 768, "layers": 12, "max_length": 32_768},
        "large": {"width": 1024, "layers": 24, "max_length": 65_536},
        "long": {"width": 256, "layers": 8, "max_length": 1_048_576},
    }
)
"""Shapes by name; each takes the vocabulary of its tokenizer, and any change."""
