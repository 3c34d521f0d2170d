"""Tokenizers: one token per letter, or per k letters.

Vocabularies begin with seven special tokens, then those of the alphabet, in the order of existing
programs: 77 tokens for DNA and 75 for RNA with k=3, 429 for protein with k=2. Letters after the
last k-mer and those of a k-mer with an unknown letter are single-letter tokens.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import ClassVar, Literal, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from narrowcast.errors import ConfigError
from narrowcast.workloads.genomics.sequences.alphabets import Alphabet

Ids: TypeAlias = NDArray[np.int64]
Spans: TypeAlias = tuple[Ids, Ids]

SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[BOS]", "[EOS]")
MOST_TOKENS = 2**20
"""Maximum vocabulary: k=10 of DNA, k=4 of protein."""


@final
@dataclass(frozen=True)
class Tokenizer:
    """Encodes sequences and locates tokens of one letter, or of `k` that share `overlap`."""

    alphabet: Alphabet
    k: int | None = None
    overlap: int = 0

    pad_id: ClassVar[int] = 0
    unk_id: ClassVar[int] = 1

    def __post_init__(self) -> None:
        """Check k and overlap."""
        if self.width < 1 or not 0 <= self.overlap < self.width:
            raise ConfigError(
                f"k must be at least 1 and overlap between 0 and k - 1, got k={self.k} "
                f"overlap={self.overlap}."
            )
        size = len(self.alphabet.letters) ** self.width
        if size > MOST_TOKENS:
            raise ConfigError(
                f"k={self.k} needs {size:,} tokens of {self.alphabet.name}, more than "
                f"{MOST_TOKENS:,}. Write a smaller k."
            )

    @property
    def width(self) -> int:
        """Letters of the longest token."""
        return 1 if self.k is None else self.k

    @cached_property
    def tokens(self) -> tuple[str, ...]:
        """The vocabulary in the order of its ids."""
        letters = self.alphabet.letters
        kmers = () if self.k is None else map("".join, product(letters, repeat=self.k))
        return (*SPECIALS, *self.alphabet.marks, *kmers, *letters)

    def encode(self, sequence: str | bytes) -> Ids:
        """Return the ids of a sequence."""
        cleaned = self.alphabet.clean(sequence).encode("ascii")
        letters = np.frombuffer(cleaned, dtype=np.uint8)
        single = self._single[letters]
        if self.k is None or len(letters) < self.k:
            return single
        stride = self.k - self.overlap
        starts = np.arange(0, len(letters) - self.k + 1, stride, dtype=np.int64)
        wide, known = self._windows(letters, len(starts), stride)
        end = starts[-1] + self.k
        if known.all():
            return np.concatenate((wide, single[end:]))
        # The first k-mer brings k letters, every other one as many as a stride has.
        brings = np.full(len(starts), stride, dtype=np.int64)
        brings[0] = self.k
        counts = np.where(known, 1, brings)
        first = np.cumsum(counts) - counts
        ids = np.empty(int(counts.sum()), dtype=np.int64)
        ids[first[known]] = wide[known]
        broken, many = np.flatnonzero(~known), counts[~known]
        within = np.arange(many.sum()) - np.repeat(np.cumsum(many) - many, many)
        source = np.repeat(starts[broken] + self.k - many, many) + within
        ids[np.repeat(first[broken], many) + within] = single[source]
        return np.concatenate((ids, single[end:]))

    def decode(self, ids: Ids) -> str:
        """Return the letters of ids; special tokens have none."""
        ids = self._checked(ids)
        added = self._added(ids)
        held = np.arange(self.width) >= self.width - added[:, None]
        return self._letters[ids][held].tobytes().decode("ascii")

    def token_spans(self, ids: Ids) -> Spans:
        """Return start and end of each token in the decoded sequence; equal for special tokens."""
        ids = self._checked(ids)
        ends = np.cumsum(self._added(ids))
        return np.maximum(ends - self._widths[ids], 0), ends

    @property
    def vocab_size(self) -> int:
        return len(self.tokens)

    @property
    def unknown_id(self) -> int:
        """[N], [X], or [UNK] if the alphabet has neither."""
        return self.unk_id if not self.alphabet.marks else len(SPECIALS)

    @cached_property
    def complement(self) -> Ids | None:
        """Id of each token's reverse complement; None for proteins.

        With k-mers, `complement[ids[::-1]]` is the other strand only without single-letter tokens.
        """
        opposite = self.alphabet.complement
        if opposite is None:
            return None
        # By numbers of letters, not by name: a large vocabulary is turned over at once.
        ids = np.arange(self.vocab_size, dtype=np.int64)
        codes = np.array([self.alphabet.letters.index(opposite[x]) for x in self.alphabet.letters])
        first, size = self._first_wide, len(codes)
        digits = np.indices((size,) * self.width).reshape(self.width, -1)
        turned = codes[digits[::-1]]
        places = size ** np.arange(self.width - 1, -1, -1)
        ids[first : first + size**self.width] = first + places @ turned
        ids[-size:] = self.vocab_size - size + codes
        return ids

    @property
    def _first_wide(self) -> int:
        """Id of the first k-mer."""
        return len(SPECIALS) + len(self.alphabet.marks)

    @cached_property
    def _single(self) -> Ids:
        """Single-letter token of each byte."""
        table = np.full(256, self.unknown_id, dtype=np.int64)
        letters = self.alphabet.letters
        table[list(letters.encode())] = self.vocab_size - len(letters) + np.arange(len(letters))
        if self.alphabet.stop:
            table[ord(self.alphabet.stop)] = self.tokens.index("[STOP]")
        return table

    @cached_property
    def _widths(self) -> Ids:
        widths = np.zeros(self.vocab_size, dtype=np.int64)
        widths[self.unk_id] = widths[self.unknown_id] = 1
        if self.alphabet.stop:
            widths[self.tokens.index("[STOP]")] = 1
        widths[self._first_wide :] = [len(token) for token in self.tokens[self._first_wide :]]
        return widths

    @cached_property
    def _letters(self) -> NDArray[np.uint8]:
        """Letters of each token, right-aligned."""
        rows = np.zeros((self.vocab_size, self.width), dtype=np.uint8)
        rows[:, -1] = ord(self.alphabet.unknown)
        if self.alphabet.stop:
            rows[self.tokens.index("[STOP]"), -1] = ord(self.alphabet.stop)
        for at, token in enumerate(self.tokens[self._first_wide :], self._first_wide):
            rows[at, -len(token) :] = list(token.encode())
        return rows

    def _added(self, ids: Ids) -> Ids:
        """Return how many new letters each token adds."""
        added = self._widths[ids]
        wide = (added == self.width) & (ids >= self._first_wide)
        so_far = 0
        # What a model writes may begin in any way: at first there may be nothing to share.
        for at, width in enumerate(added):
            if so_far >= self.overlap:
                added[at:][wide[at:]] -= self.overlap
                break
            added[at] = width - min(so_far, self.overlap) if wide[at] else width
            so_far += int(added[at])
        return added

    def _checked(self, ids: Ids) -> Ids:
        ids = np.asarray(ids, dtype=np.int64)
        if ids.size and (ids.min() < 0 or ids.max() >= self.vocab_size):
            raise ConfigError(
                f"ids must be below the vocabulary size of {self.vocab_size}, got {ids.min()} to "
                f"{ids.max()}. Decode with the tokenizer that encoded them."
            )
        return ids

    def _windows(
        self, letters: NDArray[np.uint8], count: int, stride: int
    ) -> tuple[Ids, NDArray[np.bool_]]:
        """Return the id of each k-mer, and whether all its letters are known."""
        codes = self._codes[letters]
        ids = np.full(count, self._first_wide, dtype=np.int64)
        known = np.ones(count, dtype=np.bool_)
        size, reach = len(self.alphabet.letters), (count - 1) * stride + 1
        for at in range(self.width):
            column = codes[at : at + reach : stride]
            ids += column.astype(np.int64) * size ** (self.width - 1 - at)
            known &= column >= 0
        return ids, known

    @cached_property
    def _codes(self) -> NDArray[np.int8]:
        """Letter number of each byte; -1 for others."""
        table = np.full(256, -1, dtype=np.int8)
        table[list(self.alphabet.letters.encode())] = np.arange(len(self.alphabet.letters))
        return table


def make_tokenizer(
    kind: Literal["byte", "kmer"], alphabet: Alphabet, k: int, overlap: int
) -> Tokenizer:
    """Return the tokenizer of a recipe."""
    return Tokenizer(alphabet) if kind == "byte" else Tokenizer(alphabet, k, overlap)
