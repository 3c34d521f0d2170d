"""Share of questions a model answers correctly, with a confidence interval."""

import math
import re
import string
import unicodedata
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from statistics import NormalDist
from typing import Any, Literal, NamedTuple

from torch import nn

from narrowcast.errors import ConfigError
from narrowcast.workloads.sft.data.templates import Template
from narrowcast.workloads.sft.data.tokenised import padding_token
from narrowcast.workloads.sft.judge.generation import greedy, model_ends
from narrowcast.workloads.sft.judge.prompts import Question, decode_answers, response_ending
from narrowcast.workloads.sft.judge.settings import Way

FINAL = "####"
"""GSM8K's mark before the final number."""
LONGEST_NUMBER = 1000
"""Characters; Python converts no more than 4,300 digits."""

_NUMBER = re.compile(
    r"""
    (?P<sign>(?<![0-9)\]])[-+\u2212])?      # not a minus between two numbers
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
LEVEL = 0.95


def number_in(text: str) -> Fraction | None:
    """Return the first number after ####, else the last number: 1/2, 0.5 and $.50 are equal."""
    _, marked, final = text.partition(FINAL)
    matches = [_value(match) for match in _NUMBER.finditer(final if marked else text)]
    if not matches:
        return None
    return matches[0] if marked else matches[-1]


def same_text(one: str, other: str) -> bool:
    """Return whether texts are equal up to case, whitespace and surrounding punctuation."""
    return _plain(one) == _plain(other)


def comparison_kind(
    choice: Way, references: Sequence[tuple[str, str]]
) -> Literal["number", "text"]:
    """Return how answers are compared; raise if a reference has no number to compare."""
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
    """Return whether an answer matches the reference."""
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


class Interval(NamedTuple):
    """Confidence interval of a share."""

    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A generated answer and its reference."""

    location: str
    reference: str
    text: str
    right: bool


@dataclass(frozen=True, kw_only=True)
class ExactMatch:
    """Answers to questions."""

    by: Literal["number", "text"]
    answers: tuple[Answer, ...]

    @property
    def rows(self) -> int:
        return len(self.answers)

    @property
    def right(self) -> int:
        return sum(answer.right for answer in self.answers)

    @property
    def share(self) -> float:
        return self.right / self.rows

    @property
    def interval(self) -> Interval:
        return wilson(self.right, self.rows)

    def to_json(self) -> dict[str, Any]:
        info = {"right": self.right, "rows": self.rows, "share": self.share}
        low, high = self.interval
        answers = [asdict(answer) for answer in self.answers]
        return {**info, "low": low, "high": high, "by": self.by, "answers": answers}


def exact_match(
    model: nn.Module,
    template: Template,
    questions: Sequence[Question],
    *,
    by: Way = "auto",
    max_new_tokens: int = 256,
    batch_size: int = 8,
) -> ExactMatch:
    """Answer questions with greedy decoding and compare."""
    way = comparison_kind(by, [(question.reference, question.location) for question in questions])
    prompts = [question.prompt for question in questions]
    texts = answer(model, template, prompts, max_new_tokens=max_new_tokens, batch_size=batch_size)
    return ExactMatch(
        by=way,
        answers=tuple(
            Answer(
                location=question.location,
                reference=question.reference,
                text=text,
                right=is_right(text, question.reference, by=way),
            )
            for question, text in zip(questions, texts, strict=True)
        ),
    )


def answer(
    model: nn.Module,
    template: Template,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    batch_size: int,
) -> list[str]:
    """Return the greedy answer to each prompt, up to a stop token or the template's ending."""
    tokenizer = template.tokenizer
    tokens = greedy(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        ends=model_ends(model),
        padding=padding_token(tokenizer),
    )
    return decode_answers(tokens, tokenizer, response_ending(template))


def wilson(right: int, rows: int, *, level: float = LEVEL) -> Interval:
    """Return the Wilson interval of a share."""
    z = NormalDist().inv_cdf((1 + level) / 2)
    share, squared = right / rows, z * z / rows
    middle = (share + squared / 2) / (1 + squared)
    half = z * math.sqrt(share * (1 - share) / rows + squared / (4 * rows)) / (1 + squared)
    low = 0.0 if right == 0 else middle - half
    return Interval(low, 1.0 if right == rows else middle + half)
