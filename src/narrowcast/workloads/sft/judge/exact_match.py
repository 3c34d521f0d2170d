"""How many questions a model answers right, and how sure that share is."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any, Literal, NamedTuple

from torch import nn

from narrowcast.workloads.sft.data.templates import Template
from narrowcast.workloads.sft.data.tokenised import padding_token
from narrowcast.workloads.sft.judge.answers import comparison_kind, is_right
from narrowcast.workloads.sft.judge.generation import greedy, model_ends
from narrowcast.workloads.sft.judge.prompts import Question, decode_answers, response_ending
from narrowcast.workloads.sft.judge.settings import Way

LEVEL = 0.95
"""Of the interval."""


class Interval(NamedTuple):
    """Where the true share lies, at `LEVEL`."""

    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a model wrote, what was to be written, and whether they are the same."""

    location: str
    reference: str
    text: str
    right: bool


@dataclass(frozen=True, kw_only=True)
class ExactMatch:
    """The answers to some questions, in their order."""

    by: Literal["number", "text"]
    answers: tuple[Answer, ...]

    @property
    def rows(self) -> int:
        """Questions that were asked."""
        return len(self.answers)

    @property
    def right(self) -> int:
        """Questions that were answered right."""
        return sum(answer.right for answer in self.answers)

    @property
    def share(self) -> float:
        """The share that is right."""
        return self.right / self.rows

    @property
    def interval(self) -> Interval:
        """Wilson's interval of the share."""
        return wilson(self.right, self.rows)

    def to_json(self) -> dict[str, Any]:
        """Return it as a file keeps it."""
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
    """Let a model answer questions, always with the likeliest token, and compare."""
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
    """Return what a model writes after each prompt, always with the likeliest token.

    It stops where the model's own generation settings do. What the template writes between a
    response and that token is left out.
    """
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
    """Return Wilson's interval of a share; it stays within 0 and 1, at 0 and at `rows` too."""
    z = NormalDist().inv_cdf((1 + level) / 2)
    share, squared = right / rows, z * z / rows
    middle = (share + squared / 2) / (1 + squared)
    half = z * math.sqrt(share * (1 - share) / rows + squared / (4 * rows)) / (1 + squared)
    low = 0.0 if right == 0 else middle - half
    return Interval(low, 1.0 if right == rows else middle + half)
