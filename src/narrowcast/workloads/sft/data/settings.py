"""The `data` section of a recipe that fine-tunes a language model."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from narrowcast.config.section import Section, check_conflicts
from narrowcast.config.sections import DataSection

MOST_SOURCES = 100_000
"""Files listed one by one; a glob may match more."""
MOST_TOKENS = 2**24
"""Per row: 16 million, beyond the context of any model."""
MOST_CHARACTERS = 10**9
"""Upper limit of the length settings for prompts and responses."""
SUMS = "sums"
"""Built-in data: 1,000 questions such as What is 3 + 4?"""
INSTRUCTION_TEMPLATE = "### Instruction:\n{instruction}\n\n### Response:\n{response}"

Name = Annotated[str, Field(min_length=1)]
"""Name of a file, a glob, a dataset or a column."""
Names = Annotated[tuple[Name, ...], Field(min_length=1, max_length=MOST_SOURCES)]
FormatChoice = Literal[
    "auto", "infer",
    "instruction+input+output", "instruction+context+response", "assistant+system+user",
    "context+question+answer", "input+output", "message_1+message_2", "prompt+completion",
    "prompt+response", "question+answer", "question+response", "context+response",
    "Context+Response", "instruction+response", "instruction+output", "messages",
    "conversations", "text", "prompt+chosen+rejected", "chosen+rejected",
]  # fmt: skip
TemplateChoice = Literal["auto", "chat", "alpaca", "chatml", "basic"]

SUFFIXES = (".json", ".jsonl", ".csv", ".parquet")
_HUB_NAME = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")


def file_suffix(path: Path) -> str:
    """Return the known suffix of a file, ignoring .gz, or an empty string."""
    name = path.name.lower().removesuffix(".gz")
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), "")


def may_be_on_the_hub(name: str) -> bool:
    """Return whether a name could be a dataset on the Hub."""
    return bool(_HUB_NAME.fullmatch(name)) and not file_suffix(Path(name))


class Columns(Section):
    """Column names by role; they replace format detection."""

    instruction: Name | None = Field(default=None, description="column with the question")
    response: Name | None = Field(default=None, description="column with the response to learn")
    context: Name | None = Field(
        default=None, description="column with context for the instruction; none: no context"
    )
    system: Name | None = Field(
        default=None, description="column with the system message; none: no system message"
    )

    @property
    def are_set(self) -> bool:
        """Whether the recipe names columns."""
        return self.response is not None

    @model_validator(mode="after")
    def _say_enough(self) -> Self:
        """Check that both the instruction and the response are named."""
        needed = (self.instruction, self.response)
        if None in needed and any((*needed, self.context, self.system)):
            text = "name both columns, columns.instruction and columns.response, or neither"
            check_conflicts([(("instruction", "response"), text)])
        return self


class SftData(DataSection):
    """Training and validation data, and how rows become tokens."""

    places: ClassVar[tuple[str, ...]] = (
        "path",
        "validation_path",
        "pretokenize",
        "pretokenize_cache_dir",
    )

    path: Name | Names = Field(
        description="paths or globs of .json, .jsonl, .csv or .parquet files, plain or .gz, or "
        f"the name of a dataset on the Hugging Face Hub, as owner/name; or {SUMS} (sums of two "
        "digits, for a first run)"
    )
    validation_path: Name | Names | None = Field(
        default=None,
        description="validation data, in the same forms as path; none: existing splits, else "
        "validation_split",
    )
    dataset_config_name: Name | None = Field(
        default=None, description="configuration of a Hub dataset; none: its default"
    )
    use_existing_splits: bool = Field(
        default=True,
        description="validate on the Hub split, or the file among several, named validation, val, "
        "dev or valid; one named test is then not used",
    )
    validation_split: float = Field(
        default=0.1,
        ge=0,
        lt=1,
        description="fraction of the rows used for validation if there is no other validation "
        "data, chosen by the seed; 0: no validation",
    )
    format: FormatChoice = Field(
        default="auto",
        description="column format: auto (from the table of known formats), the name of a format, "
        "or infer (from similar column names)",
    )
    columns: Columns = Field(default_factory=Columns, description="column names by role")
    empty_response: Literal["refuse", "drop"] = Field(
        default="refuse", description="rows without a response: refuse (raise) or drop"
    )
    response_max_length: int | None = Field(
        default=None,
        ge=1,
        le=MOST_CHARACTERS,
        description="drop rows whose response has more characters; none: keep all",
    )
    instruction_max_length: int | None = Field(
        default=None,
        ge=1,
        le=MOST_CHARACTERS,
        description="drop rows whose instruction, including its context, has more characters; "
        "none: keep all",
    )
    template_format: TemplateChoice = Field(
        default="auto",
        description="prompt template: chat (the tokenizer's chat template), alpaca, chatml, basic "
        "(instruction_template); auto: chat if the tokenizer has one, else basic",
    )
    instruction_template: str = Field(
        default=INSTRUCTION_TEMPLATE,
        description="template for template_format=basic, with {instruction} before {response}",
    )
    loss_on: Literal["response", "all"] = Field(
        default="response",
        description="tokens with a loss: response (with its end token) or all",
    )
    max_seq_length: int = Field(
        default=2048, ge=2, le=MOST_TOKENS, description="maximum tokens per row"
    )
    too_long: Literal["drop", "cut", "refuse"] = Field(
        default="drop",
        description="conversations with more tokens: drop, cut (truncate) or refuse (raise)",
    )
    packing: bool = Field(
        default=False,
        description="pack several conversations into each row of max_seq_length tokens, without "
        "attention between them",
    )
    pretokenize: bool = Field(
        default=False,
        description="cache the tokens in a file and reuse them if nothing changed",
    )
    pretokenize_cache_dir: Name | None = Field(
        default=None, description="folder for that file; none: the user's cache folder"
    )

    @property
    def sources(self) -> tuple[str, ...]:
        """Training sources, in order."""
        return (self.path,) if isinstance(self.path, str) else self.path

    @property
    def required_files(self) -> Mapping[str, tuple[str, ...]]:
        """Sources that must be local files, by setting."""
        named = {"path": self.sources, "validation_path": self.validation_sources}
        return {
            key: tuple(each for each in names if each != SUMS and not may_be_on_the_hub(each))
            for key, names in named.items()
        }

    @property
    def validation_sources(self) -> tuple[str, ...]:
        """Validation sources, in order; empty if rows are split off."""
        named = self.validation_path or ()
        return (named,) if isinstance(named, str) else named

    @field_validator("instruction_template")
    @classmethod
    def _has_both_places(cls, template: str) -> str:
        """Check that both placeholders occur once, in order."""
        places = re.findall(r"{instruction}|{response}", template)
        if places != ["{instruction}", "{response}"]:
            raise ValueError("must contain {instruction} once and, after it, {response} once")
        return template

    @model_validator(mode="after")
    def _is_obeyed(self) -> Self:
        """Check for settings that would have no effect."""
        conflicts: list[tuple[tuple[str, ...], str]] = []
        if self.columns.are_set and self.format != "auto":
            text = f"columns and format={self.format} both set the columns; leave one of them out"
            conflicts.append((("columns", "format"), text))
        if self.instruction_template != INSTRUCTION_TEMPLATE and self.template_format != "basic":
            text = (
                f"template_format={self.template_format} does not always use instruction_template; "
                "write template_format=basic"
            )
            conflicts.append((("instruction_template", "template_format"), text))
        if self.pretokenize_cache_dir is not None and not self.pretokenize:
            text = "pretokenize_cache_dir needs pretokenize=true; set it, or leave the folder out"
            conflicts.append((("pretokenize_cache_dir", "pretokenize"), text))
        check_conflicts(conflicts)
        return self
