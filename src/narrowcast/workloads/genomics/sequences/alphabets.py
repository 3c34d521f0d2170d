"""Alphabets of DNA, RNA and protein; lower case (soft-masked repeats) is upper-cased."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import final

from narrowcast.errors import ConfigError

WHITESPACE = b" \t\r\n\v\f"
_BAD = 0
"""Marks letters of no alphabet while a sequence is cleaned."""


@final
@dataclass(frozen=True, kw_only=True)
class Alphabet:
    """The letters of a kind of sequence, in vocabulary order."""

    name: str
    letters: str
    unknown: str
    """N or X."""
    ambiguous: str
    """IUPAC letters that are ambiguous or have no token, without `unknown`."""
    stop: str = ""
    """The stop sign of proteins."""
    marks: tuple[str, ...] = ()
    """Extra special tokens."""
    reads_as: Mapping[str, str] = field(default_factory=dict, hash=False)
    """U as T, or T as U."""
    complement: Mapping[str, str] | None = field(default=None, hash=False)
    """Complement of each letter, ambiguous ones too; None for proteins."""

    def clean(self, sequence: str | bytes, *, strict: bool = False, location: str = "") -> str:
        """Return a sequence in upper case, without blanks, in letters of this alphabet only."""
        raw = sequence if isinstance(sequence, bytes) else sequence.encode("ascii", "replace")
        stored = raw.translate(self._table, WHITESPACE)
        if _BAD in stored:
            self._raise_letter(_dense(sequence), stored.index(_BAD), location)
        for other, own in self.reads_as.items():
            if _has(raw, other) and _has(raw, own):
                raise ConfigError(
                    f"{_begin(location)}the sequence has both {own} and {other}, so it is neither "
                    "DNA nor RNA. Use one of them throughout."
                )
        if strict and ord(self.unknown) in stored:
            at = stored.index(ord(self.unknown))
            raise ConfigError(
                f"{_begin(location)}letter {at + 1} must be one of {self.letters} with "
                f"data.strict=true, got the ambiguous {_dense(sequence)[at]!r}. Remove such "
                f"sequences, or write data.strict=false to read it as {self.unknown}."
            )
        return stored.decode("ascii")

    def fits(self, sequence: str | bytes) -> bool:
        """Return whether all letters are valid here."""
        raw = sequence if isinstance(sequence, bytes) else sequence.encode("ascii", "replace")
        return _BAD not in raw.translate(self._table, WHITESPACE)

    @cached_property
    def _table(self) -> bytes:
        """Maps each byte to its cleaned letter."""
        table = bytearray(256)
        meaning = {letter: letter for letter in self.letters + self.unknown + self.stop}
        meaning |= dict.fromkeys(self.ambiguous, self.unknown)
        meaning |= self.reads_as
        for letter, becomes in meaning.items():
            for case in (letter, letter.lower()):
                table[ord(case)] = ord(becomes)
        return bytes(table)

    def _raise_letter(self, sequence: str, at: int, position: str) -> None:
        others = [each for each in ALPHABETS.values() if each is not self and each.fits(sequence)]
        hint = f" It reads as {others[0].name}." if others else ""
        gap = ". Remove gaps." if sequence[at] in "-." else "."
        raise ConfigError(
            f"{_begin(position)}letter {at + 1} is not a {self.name} letter, got {sequence[at]!r}. "
            f"Letters are {self.letters + self.stop} and, for ambiguity, "
            f"{self.unknown + self.ambiguous}{gap}{hint}"
        )


def guess_alphabet(sequence: str | bytes) -> Alphabet:
    """Return the likely alphabet; a guess, since DNA letters are protein letters too."""
    raw = sequence if isinstance(sequence, bytes) else sequence.encode("ascii", "replace")
    raw = raw.translate(None, WHITESPACE)
    plain = _count(raw, "ACGTUN")
    if plain < 0.9 * len(raw) or not (DNA.fits(raw) or RNA.fits(raw)):
        return PROTEIN
    return RNA if _has(raw, "U") and not _has(raw, "T") else DNA


def _has(raw: bytes, letter: str) -> bool:
    """Return whether a letter occurs in either case."""
    return ord(letter) in raw or ord(letter.lower()) in raw


def _count(raw: bytes, letters: str) -> int:
    return len(raw) - len(raw.translate(None, (letters + letters.lower()).encode()))


def _dense(sequence: str | bytes) -> str:
    """Return a sequence without whitespace."""
    text = sequence.decode("latin-1") if isinstance(sequence, bytes) else sequence
    return text.translate(dict.fromkeys(WHITESPACE))


def _begin(location: str) -> str:
    return f"{location}: " if location else ""


# IUPAC-IUB 1984: each letter and the letter for what is opposite to its bases.
_OPPOSITE = dict(zip("RYSWKMBDHVN", "YRSWMKVHDBN", strict=True))

DNA = Alphabet(
    name="dna",
    letters="ATCG",
    unknown="N",
    ambiguous="RYSWKMBDHV",
    marks=("[N]", "[RC]"),
    reads_as={"U": "T"},
    complement={"A": "T", "T": "A", "C": "G", "G": "C", "U": "A", **_OPPOSITE},
)
RNA = Alphabet(
    name="rna",
    letters="AUCG",
    unknown="N",
    ambiguous="RYSWKMBDHV",
    reads_as={"T": "U"},
    complement={"A": "U", "U": "A", "C": "G", "G": "C", "T": "A", **_OPPOSITE},
)
PROTEIN = Alphabet(
    name="protein",
    letters="ACDEFGHIKLMNPQRSTVWY",
    unknown="X",
    # B is D or N, Z is E or Q, J is I or L; U and O are the two that have no token of their own.
    ambiguous="BZJUO",
    stop="*",
    marks=("[X]", "[STOP]"),
)
ALPHABETS: Mapping[str, Alphabet] = {each.name: each for each in (DNA, RNA, PROTEIN)}
