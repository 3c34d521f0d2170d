"""Operations on sequences: reverse complement, GC content, k-mer counts, windows."""

from collections.abc import Iterator, Mapping
from functools import lru_cache

import numpy as np

from narrowcast.errors import ConfigError
from narrowcast.workloads.genomics.sequences.alphabets import DNA, Alphabet
from narrowcast.workloads.genomics.sequences.tokenizers import Tokenizer


def reverse_complement(sequence: str, alphabet: Alphabet = DNA) -> str:
    """Return the reverse complement; case and IUPAC letters are kept."""
    if alphabet.complement is None:
        raise ConfigError(
            f"{alphabet.name} has no reverse complement. Leave reverse complements out."
        )
    return sequence.translate(_opposite(alphabet))[::-1]


def gc(sequence: str) -> float:
    """Return the GC content of the unambiguous letters; 0 without any."""
    counts = {
        letter: sequence.count(letter) + sequence.count(letter.lower()) for letter in "GCSATUW"
    }
    strong, all_of_them = sum(counts[letter] for letter in "GCS"), sum(counts.values())
    return strong / all_of_them if all_of_them else 0.0


def kmer_counts(sequence: str, k: int, alphabet: Alphabet = DNA) -> Mapping[str, int]:
    """Return counts of all overlapping k-mers without unknown letters."""
    tokenizer = Tokenizer(alphabet, k, k - 1)
    counts = np.bincount(tokenizer.encode(sequence), minlength=tokenizer.vocab_size)
    tokens = tokenizer.tokens
    if k > 1:
        counts[-len(alphabet.letters) :] = 0  # single letters behind unknown ones
    return {tokens[at]: int(counts[at]) for at in np.flatnonzero(counts) if tokens[at][0] != "["}


def sliding_windows(sequence: str, length: int, stride: int) -> Iterator[tuple[int, str]]:
    """Yield windows a stride apart with their start; the last may be shorter."""
    for start in range(0, len(sequence), stride):
        yield start, sequence[start : start + length]
        if start + length >= len(sequence):
            return


@lru_cache
def _opposite(alphabet: Alphabet) -> dict[int, str]:
    pairs = (alphabet.complement or {}).items()
    return str.maketrans({**dict(pairs), **{one.lower(): two.lower() for one, two in pairs}})
