"""What DNA and RNA code for: proteins, and the open reading frames that may be some."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product

import numpy as np
from numpy.typing import NDArray

from narrowcast.errors import ConfigError
from narrowcast.workloads.genomics.sequences.alphabets import PROTEIN
from narrowcast.workloads.genomics.sequences.features import Part
from narrowcast.workloads.genomics.sequences.genetic_codes import BASES, get_code
from narrowcast.workloads.genomics.sequences.operations import reverse_complement

_MEANS = {
    **dict(zip("ACGT", "ACGT", strict=True)),
    "R": "AG",
    "Y": "CT",
    "S": "CG",
    "W": "AT",
    "K": "GT",
    "M": "AC",
    "B": "CGT",
    "D": "AGT",
    "H": "ACT",
    "V": "ACG",
    "N": "ACGT",
    "U": "T",
}
"""The bases that a letter of IUPAC may be."""
_EITHER = {frozenset("DN"): "B", frozenset("EQ"): "Z", frozenset("IL"): "J"}
"""Letters for two amino acids."""


def translate(sequence: str, code: int = 1, *, to_stop: bool = False) -> str:
    """Return the protein that DNA or RNA codes for; `to_stop` ends it before the first stop.

    One or two letters behind the last whole codon code for nothing. A codon with ambiguous letters
    is the amino acid that all its meanings share, B, Z or J for the two they may be, or X.
    """
    bases = np.frombuffer(sequence.upper().encode("ascii", "replace"), dtype=np.uint8)
    codons = bases[: len(bases) // 3 * 3].reshape(-1, 3)
    numbers, known = _codon_numbers(codons)
    table = np.frombuffer(get_code(code).encode(), dtype=np.uint8)
    protein = table[numbers]
    for at in np.flatnonzero(~known):
        protein[at] = ord(_ambiguous_codon(codons[at].tobytes().decode("ascii"), code))
    text = protein.tobytes().decode("ascii")
    return text.partition(PROTEIN.stop)[0] if to_stop else text


def orfs(
    sequence: str, *, min_length: int = 90, code: int = 1, starts: Sequence[str] = ("ATG",)
) -> list[Part]:
    """Return the open reading frames of both strands, in the order they begin.

    One is from the first of `starts` in its frame to the next stop, with both: as long as that stop
    allows. Those shorter than `min_length` letters, and those that the sequence ends in, are none.
    """
    table = np.frombuffer(get_code(code).encode(), dtype=np.uint8)
    stops = np.flatnonzero(table == ord(PROTEIN.stop))
    begin = [_codon_index(codon) for codon in starts]
    matches: list[Part] = []
    for strand, letters in ((1, sequence), (-1, reverse_complement(sequence))):
        bases = np.frombuffer(letters.upper().encode("ascii", "replace"), dtype=np.uint8)
        for frame in range(min(3, len(bases))):
            codons = bases[frame : frame + (len(bases) - frame) // 3 * 3].reshape(-1, 3)
            for first, last in _frames(codons, begin, stops):
                start, end = frame + 3 * first, frame + 3 * (last + 1)
                if end - start >= min_length:
                    matches.append(
                        Part(start, end, 1)
                        if strand > 0
                        else Part(len(bases) - end, len(bases) - start, -1)
                    )
    return sorted(matches)


def _codon_numbers(codons: NDArray[np.uint8]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the place of each codon in a code, and whether it has one; 0 where it has not."""
    numbers = _BASE_NUMBERS[codons]
    known: NDArray[np.bool_] = np.asarray((numbers >= 0).all(axis=1))
    places: NDArray[np.int64] = numbers @ np.array([16, 4, 1])
    return np.where(known, places, 0), known


def _codon_index(codon: str) -> int:
    letters = codon.upper().replace("U", "T")
    if len(letters) != 3 or not set(letters) <= set(BASES):
        raise ConfigError(f"A codon must be three of A, C, G and T, got {codon!r}.")
    first, second, third = map(BASES.index, letters)
    return 16 * first + 4 * second + third


_BASE_NUMBERS = np.full(256, -1, dtype=np.int64)
_BASE_NUMBERS[list(BASES.encode())] = range(4)
_BASE_NUMBERS[ord("U")] = BASES.index("T")


@lru_cache(maxsize=2**15)
def _ambiguous_codon(codon: str, code: int) -> str:
    if not set(codon) <= set(_MEANS):
        raise ConfigError(f"A codon must have DNA or RNA letters, got {codon!r}.")
    table = get_code(code)
    spelt = ("".join(each) for each in product(*(_MEANS[letter] for letter in codon)))
    meanings = frozenset(table[_codon_index(each)] for each in spelt)
    if len(meanings) == 1:
        return next(iter(meanings))
    return _EITHER.get(meanings, PROTEIN.unknown)


def _frames(
    codons: NDArray[np.uint8], begin: Sequence[int], stops: NDArray[np.int64]
) -> Iterator[tuple[int, int]]:
    """Yield the codons that frames begin with and end with."""
    numbers, known = _codon_numbers(codons)
    ends = np.flatnonzero(known & np.isin(numbers, stops))
    starts = np.flatnonzero(known & np.isin(numbers, begin))
    if not len(starts) or not len(ends):
        return
    after = np.concatenate(([0], ends[:-1] + 1))
    at = np.searchsorted(starts, after)
    for end, index in zip(ends, at, strict=True):
        if index < len(starts) and starts[index] < end:
            yield int(starts[index]), int(end)
