"""Text to tokens and back: what a tokenizer is, and the one that needs no package, raw bytes."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.uint16] | npt.NDArray[np.int32]


class Tokenizer(Protocol):
    """Cut any text into tokens that join to exactly that text again."""

    @property
    def size(self) -> int:
        """How many tokens there are, counted from 0."""

    def encode(self, text: str) -> Tokens:
        """Return the tokens of `text`."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens`; bytes that are not UTF-8 become U+FFFD."""

    def byte_lengths(self) -> npt.NDArray[np.int64]:
        """Return how many bytes of UTF-8 each token stands for."""


class ByteTokenizer:
    """One token a byte: 256 tokens, nothing to train."""

    size = 256

    def encode(self, text: str) -> Tokens:
        """Return the UTF-8 bytes of `text`."""
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens`; bytes that are not UTF-8 become U+FFFD."""
        return bytes(tokens).decode(errors="replace")

    def byte_lengths(self) -> npt.NDArray[np.int64]:
        """Return 1 for every token."""
        return np.ones(self.size, dtype=np.int64)
