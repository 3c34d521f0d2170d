"""The `eval_tasks` section of a fine-tuning recipe."""

from collections.abc import Mapping
from typing import Literal, Self

from pydantic import Field, model_validator

from narrowcast.config.limits import MOST_SAMPLES, MOST_STEPS
from narrowcast.config.section import Section, check_conflicts
from narrowcast.workloads.sft.data.settings import MOST_TOKENS, Name, Names

MOST_SHOWN = 1000
"""Samples in a report."""
MOST_QUESTIONS = 10**6
"""Answers are generated token by token: at ten per second, this takes a day."""

USUAL_LENGTH = 1024
"""Tokens per window; longer windows change the perplexity little."""

Way = Literal["auto", "number", "text"]


class EvalTasksSection(Section):
    """Evaluation beyond the validation loss, and when it runs."""

    perplexity: Name | Names | None = Field(
        default=None,
        description="paths or globs of UTF-8 text to measure perplexity on; none: not measured",
    )
    perplexity_tokens: int = Field(
        default=32_768, ge=2, le=MOST_TOKENS, description="tokens per text, from its start"
    )
    perplexity_length: int | None = Field(
        default=None,
        ge=2,
        le=MOST_TOKENS,
        description=f"tokens per window; none: {USUAL_LENGTH}, or the model's context length if "
        "that is shorter",
    )
    exact_match: Name | None = Field(
        default=None,
        description="path of a .json, .jsonl, .csv or .parquet file, plain or .gz, with questions "
        "and answers; none: not measured",
    )
    exact_match_rows: int = Field(
        default=100,
        ge=1,
        le=MOST_QUESTIONS,
        description="number of questions, from the start of the file",
    )
    exact_match_by: Way = Field(
        default="auto",
        description="what must match: number (the number after ####, else the last one) or text "
        "(ignoring case, whitespace and surrounding punctuation); auto: number if every answer in "
        "the file has ####, else text",
    )
    max_new_tokens: int = Field(
        default=256, ge=1, le=MOST_TOKENS, description="maximum tokens per answer or sample"
    )
    batch_size: int = Field(
        default=8, ge=1, le=MOST_SAMPLES, description="prompts or windows per batch"
    )
    samples: int = Field(
        default=4,
        ge=0,
        le=MOST_SHOWN,
        description="validation prompts whose responses before and after training are shown in "
        "the report; 0: none",
    )
    before: bool = Field(
        default=True, description="also measure before the first step, for comparison"
    )
    every: int = Field(
        default=0,
        ge=0,
        le=MOST_STEPS,
        description="steps between measurements, a multiple of eval.every; 0: only at the end",
    )

    @property
    def required_files(self) -> Mapping[str, tuple[str, ...]]:
        """Texts and the questions file."""
        return {"perplexity": self.texts, "exact_match": tuple(filter(None, [self.exact_match]))}

    @property
    def texts(self) -> tuple[str, ...]:
        """Paths and globs for perplexity, in order."""
        named = self.perplexity or ()
        return (named,) if isinstance(named, str) else named

    @property
    def measures(self) -> bool:
        """Whether anything is measured."""
        return bool(self.texts) or self.exact_match is not None

    @model_validator(mode="after")
    def _is_obeyed(self) -> Self:
        """Check for settings that would have no effect."""
        needed = {
            "perplexity_tokens": ("perplexity", bool(self.texts)),
            "perplexity_length": ("perplexity", bool(self.texts)),
            "exact_match_rows": ("exact_match", self.exact_match is not None),
            "exact_match_by": ("exact_match", self.exact_match is not None),
            "every": ("perplexity", self.measures),
        }
        fields = type(self).model_fields
        conflicts = [
            ((name, other), f"nothing is measured; set {other} to a file, or leave {name} out")
            for name, (other, there) in needed.items()
            if not there and getattr(self, name) != fields[name].default
        ]
        check_conflicts(list(conflicts))
        return self
