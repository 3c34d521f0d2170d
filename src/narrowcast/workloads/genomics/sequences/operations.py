"""What is done with sequences: the other strand, counts, windows, mutation."""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np

from narrowcast.errors import ConfigError
from narrowcast.workloads.genomics.sequences.alphabets import DNA, Alphabet
from narrowcast.workloads.genomics.sequences.features import Part
from narrowcast.workloads.genomics.sequences.tokenizers import KmerTokenizer


class Window(NamedTuple):
    """A stretch of a sequence, and where it begins."""

    start: int
    sequence: str


def reverse_complement(sequence: str, alphabet: Alphabet = DNA) -> str:
    """Return the other strand, read in its own direction; case and IUPAC's letters are kept."""
    if alphabet.complement is None:
        raise ConfigError(
            f"{alphabet.name} has no reverse complement. Leave reverse complements out."
        )
    return sequence.translate(_opposite(alphabet))[::-1]


def either_strand(sequence: str, generator: np.random.Generator, alphabet: Alphabet = DNA) -> str:
    """Return a sequence or its reverse complement, each half of the time."""
    return reverse_complement(sequence, alphabet) if generator.random() < 0.5 else sequence


def extract(sequence: str, parts: Sequence[Part]) -> str:
    """Return what parts of a DNA sequence spell, one after another, each on its strand."""
    pieces = (sequence[part.start : part.end] for part in parts)
    return "".join(
        reverse_complement(piece) if part.strand < 0 else piece
        for part, piece in zip(parts, pieces, strict=True)
    )


def gc(sequence: str) -> float:
    """Return the share of G and C among letters that say which; 0 where none does."""
    counts = {
        letter: sequence.count(letter) + sequence.count(letter.lower()) for letter in "GCSATUW"
    }
    strong, all_of_them = sum(counts[letter] for letter in "GCS"), sum(counts.values())
    return strong / all_of_them if all_of_them else 0.0


def kmer_counts(sequence: str, k: int, alphabet: Alphabet = DNA) -> Mapping[str, int]:
    """Count every run of `k` letters, overlapping ones too; those with unknown letters are none."""
    tokenizer = KmerTokenizer(alphabet, k, k - 1)
    counts = np.bincount(tokenizer.encode(sequence), minlength=tokenizer.vocab_size)
    tokens = tokenizer.tokens
    if k > 1:
        counts[-len(alphabet.letters) :] = 0  # single letters behind unknown ones
    return {tokens[at]: int(counts[at]) for at in np.flatnonzero(counts) if tokens[at][0] != "["}


def sliding_windows(
    sequence: str,
    length: int,
    stride: int,
    *,
    tail: Literal["short", "shift", "drop"] = "short",
) -> Iterator[Window]:
    """Yield windows a stride apart, up to the first that reaches the end.

    What the last whole one leaves is a shorter window, a whole one that is shifted to the end, or
    dropped.
    """
    if length < 1 or stride < 1:
        raise ConfigError(
            f"The window length and stride must be at least 1, got {length} and {stride}."
        )
    start = 0
    while start + length <= len(sequence):
        yield Window(start, sequence[start : start + length])
        if start + length == len(sequence):
            return
        start += stride
    if start >= len(sequence) or tail == "drop":
        return
    if tail == "shift":
        start = max(len(sequence) - length, 0)
    yield Window(start, sequence[start:])


def mutate(
    sequence: str,
    generator: np.random.Generator,
    *,
    alphabet: Alphabet = DNA,
    substitutions: float = 0.0,
    insertions: float = 0.0,
    deletions: float = 0.0,
) -> str:
    """Return a cleaned sequence with letters changed, put in and left out, each at its rate.

    A letter that is substituted becomes another one; one that is put in stands behind its letter.
    Unknown letters and stops stay.
    """
    rates = {"substitutions": substitutions, "insertions": insertions, "deletions": deletions}
    for name, rate in rates.items():
        if not 0.0 <= rate <= 1.0:
            raise ConfigError(f"{name} must be between 0 and 1, got {rate}.")
    letters = np.frombuffer(alphabet.letters.encode(), dtype=np.uint8)
    own = np.frombuffer(sequence.encode("ascii", "replace"), dtype=np.uint8).copy()
    codes = np.full(256, -1)
    codes[letters] = np.arange(len(letters))
    known = codes[own] >= 0
    changed = known & (generator.random(len(own)) < substitutions)
    shift = generator.integers(1, len(letters), len(own))
    own[changed] = letters[(codes[own] + shift) % len(letters)][changed]
    stored = ~(known & (generator.random(len(own)) < deletions))
    added = generator.random(len(own)) < insertions
    new = letters[generator.integers(0, len(letters), len(own))]
    both = np.stack([own, new], axis=1)
    return both[np.stack([stored, added], axis=1)].tobytes().decode("ascii")


@lru_cache
def _opposite(alphabet: Alphabet) -> dict[int, str]:
    pairs = (alphabet.complement or {}).items()
    return str.maketrans({**dict(pairs), **{one.lower(): two.lower() for one, two in pairs}})
