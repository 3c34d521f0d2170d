"""Whether two answers are the same: by their number, as GSM8K has it, or by their words."""

import re
import string
import unicodedata
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

from narrowcast.errors import ConfigError
from narrowcast.workloads.sft.judge.settings import Way

FINAL = "####"
"""What GSM8K writes before the number that an answer comes to."""
LONGEST_NUMBER = 1000
"""Characters; who writes more digits has lost the thread, and Python converts no 5,000."""

_NUMBER = re.compile(
    r"""
    (?P<sign>(?<![0-9)\]])[-+\u2212])?      # after a number it is a minus between two
    \s?[$\u20ac\u00a3]?\s?
    (?P<inner>(?<=[$\u20ac\u00a3])[-\u2212])?
    (?:
        (?P<whole>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)
        (?:\s(?P<part>[0-9]+/[0-9]+))?          # 1 1/2
        (?P<decimals>\.[0-9]+)?
        (?:\s?/\s?(?P<below>[0-9]+))?           # 3/4
      | (?P<bare>\.[0-9]+)
    )
    """,
    re.VERBOSE,
)


def number_in(text: str) -> Fraction | None:
    """Return the number that an answer comes to: the first after ####, else the last of it.

    Currency signs, separators of thousands and a full stop at the end are no part of it; 1/2, 0.5
    and .50 are the same.
    """
    _, marked, final = text.partition(FINAL)
    matches = [_value(match) for match in _NUMBER.finditer(final if marked else text)]
    if not matches:
        return None
    return matches[0] if marked else matches[-1]


def same_text(one: str, other: str) -> bool:
    """Say whether two answers have the same words, but for case, blanks and signs around them."""
    return _plain(one) == _plain(other)


def comparison_kind(
    choice: Way, references: Sequence[tuple[str, str]]
) -> Literal["number", "text"]:
    """Return how answers are compared, given those of a file, each with its place.

    A number that is asked for and not there is refused.
    """
    if choice == "auto":
        choice = "number" if all(FINAL in text for text, _ in references) else "text"
    if choice == "number":
        for text, location in references:
            if number_in(text) is None:
                raise ConfigError(
                    f"{location}: the answer has no number to compare. Write "
                    "eval_tasks.exact_match_by=text, or put a number into each answer."
                )
    return choice


def is_right(text: str, reference: str, *, by: Literal["number", "text"]) -> bool:
    """Say whether an answer is the one that was to be given."""
    if by == "text":
        return same_text(text, reference)
    result = number_in(text)
    return result is not None and result == number_in(reference)


def _value(match: re.Match[str]) -> Fraction | None:
    part = match.groupdict()
    if len(match[0]) > LONGEST_NUMBER:
        return None
    digits = part["bare"] or part["whole"].replace(",", "") + (part["decimals"] or "")
    value = Fraction(digits)
    if part["below"]:
        if not int(part["below"]):
            return None
        value /= int(part["below"])
    if part["part"]:
        above, below = map(int, part["part"].split("/"))
        if not below:
            return None
        value += Fraction(above, below)
    negative = part["sign"] in ("-", "\u2212") or part["inner"] is not None
    return -value if negative else value


def _plain(text: str) -> str:
    folded = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(folded.split()).strip(string.punctuation + " ")
