"""The `judge` section of a recipe that fine-tunes a language model."""

from collections.abc import Mapping
from typing import Literal, Self

from pydantic import Field, model_validator

from narrowcast.config.limits import MOST_SAMPLES, MOST_STEPS
from narrowcast.config.section import Section, check_conflicts
from narrowcast.workloads.sft.data.settings import MOST_TOKENS, Name, Names

MOST_SHOWN = 1000
"""Samples of a report; nobody reads more."""
MOST_QUESTIONS = 10**6
"""Each is answered token by token: at ten a second, a day."""

USUAL_LENGTH = 1024
"""Tokens of a window: enough that a longer past changes little."""

Way = Literal["auto", "number", "text"]


class EvalTasksSection(Section):
    """What is measured of a model beside its validation loss, and when."""

    perplexity: Name | Names | None = Field(
        default=None,
        description="paths or globs of UTF-8 text whose perplexity is measured; none: not",
    )
    perplexity_tokens: int = Field(
        default=32_768, ge=2, le=MOST_TOKENS, description="tokens of each text, from its beginning"
    )
    perplexity_length: int | None = Field(
        default=None,
        ge=2,
        le=MOST_TOKENS,
        description="tokens that the model is given at once; each but the first is predicted from "
        f"those before it. None: {USUAL_LENGTH}, or as many as the model takes",
    )
    exact_match: Name | None = Field(
        default=None,
        description="path of a .json, .jsonl, .csv or .parquet file, plain or .gz, of questions "
        "that the model answers; none: it is asked nothing",
    )
    exact_match_rows: int = Field(
        default=100,
        ge=1,
        le=MOST_QUESTIONS,
        description="questions, from the beginning of the file",
    )
    exact_match_by: Way = Field(
        default="auto",
        description="what must be the same: the number after ####, else the last one (number), or "
        "all of it but case, blanks and the signs around it (text); auto: number where every "
        "answer of the file has ####, else text",
    )
    max_new_tokens: int = Field(
        default=256, ge=1, le=MOST_TOKENS, description="tokens of an answer or a sample at most"
    )
    batch_size: int = Field(
        default=8, ge=1, le=MOST_SAMPLES, description="prompts or windows that are computed at once"
    )
    samples: int = Field(
        default=4,
        ge=0,
        le=MOST_SHOWN,
        description="prompts of the validation data whose answers the report shows, before and "
        "after training; 0: none",
    )
    before: bool = Field(
        default=True, description="measure all of it before the first step, too, to compare with"
    )
    every: int = Field(
        default=0,
        ge=0,
        le=MOST_STEPS,
        description="steps between two measurements, a multiple of eval.every; 0: at the end only",
    )

    @property
    def required_files(self) -> Mapping[str, tuple[str, ...]]:
        """Texts and questions."""
        return {"perplexity": self.texts, "exact_match": tuple(filter(None, [self.exact_match]))}

    @property
    def texts(self) -> tuple[str, ...]:
        """What perplexity is measured on, in order."""
        named = self.perplexity or ()
        return (named,) if isinstance(named, str) else named

    @property
    def measures(self) -> bool:
        """Something is measured."""
        return bool(self.texts) or self.exact_match is not None

    @model_validator(mode="after")
    def _is_obeyed(self) -> Self:
        """Refuse a setting that another one would leave without effect."""
        needed = {
            "perplexity_tokens": ("perplexity", bool(self.texts)),
            "perplexity_length": ("perplexity", bool(self.texts)),
            "exact_match_rows": ("exact_match", self.exact_match is not None),
            "exact_match_by": ("exact_match", self.exact_match is not None),
            "every": ("perplexity", self.measures),
        }
        fields = type(self).model_fields
        conflicts = [
            ((name, other), f"there is nothing to measure; name a file in {other}, or leave it out")
            for name, (other, there) in needed.items()
            if not there and getattr(self, name) != fields[name].default
        ]
        check_conflicts(list(conflicts))
        return self
