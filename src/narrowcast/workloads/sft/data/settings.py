"""The `data` section of a recipe that fine-tunes a language model."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from narrowcast.config.section import Section, check_conflicts
from narrowcast.config.sections import DataSection

MOST_SOURCES = 100_000
"""Files that are named one by one; a glob names as many as there are."""
MOST_TOKENS = 2**24
"""Of a row: 16 million, beyond the context of any model."""
MOST_CHARACTERS = 10**9
"""Of a prompt or a response, where they are limited."""
SUMS = "sums"
"""The rows that need no file: 1,000 questions such as What is 3 + 4?"""
INSTRUCTION_TEMPLATE = "### Instruction:\n{instruction}\n\n### Response:\n{response}"

Name = Annotated[str, Field(min_length=1)]
"""Of a file, a glob, a data set or a column."""
Names = Annotated[tuple[Name, ...], Field(min_length=1, max_length=MOST_SOURCES)]
FormatChoice = Literal[
    "auto", "infer",
    "instruction+input+output", "instruction+context+response", "assistant+system+user",
    "context+question+answer", "input+output", "message_1+message_2", "prompt+completion",
    "prompt+response", "question+answer", "question+response", "context+response",
    "Context+Response", "instruction+response", "instruction+output", "messages",
    "conversations", "text",
]  # fmt: skip
TemplateChoice = Literal["auto", "chat", "alpaca", "chatml", "basic"]

SUFFIXES = (".json", ".jsonl", ".csv", ".parquet")
_HUB_NAME = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")


def file_suffix(path: Path) -> str:
    """Return the ending that says what is in a file, without .gz; empty where it is not known."""
    name = path.name.lower().removesuffix(".gz")
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), "")


def may_be_on_the_hub(name: str) -> bool:
    """Return whether a name that is no file here can be that of a data set on the Hub."""
    return bool(_HUB_NAME.fullmatch(name)) and not file_suffix(Path(name))


class Columns(Section):
    """Which columns of the rows are what; with these, no format is looked for."""

    instruction: Name | None = Field(default=None, description="column of what is asked")
    response: Name | None = Field(default=None, description="column of the answer to learn")
    context: Name | None = Field(
        default=None, description="column of what goes with the instruction; none: nothing does"
    )
    system: Name | None = Field(
        default=None, description="column of the system's message; none: there is none"
    )

    @property
    def are_set(self) -> bool:
        """The recipe says which columns are what."""
        return self.response is not None

    @model_validator(mode="after")
    def _say_enough(self) -> Self:
        """Refuse columns of which a conversation cannot be made."""
        needed = (self.instruction, self.response)
        if None in needed and any((*needed, self.context, self.system)):
            text = "name both columns, columns.instruction and columns.response, or neither"
            check_conflicts([(("instruction", "response"), text)])
        return self


class SftData(DataSection):
    """What a language model is fine-tuned on, and how rows become tokens."""

    places: ClassVar[tuple[str, ...]] = (
        "path",
        "validation_path",
        "pretokenize",
        "pretokenize_cache_dir",
    )

    path: Name | Names = Field(
        description="paths or globs of .json, .jsonl, .csv or .parquet files, plain or .gz, or "
        f"the name of a data set on the Hugging Face Hub, as owner/name; or {SUMS} (sums of two "
        "digits, for a first run)"
    )
    validation_path: Name | Names | None = Field(
        default=None,
        description="the same, of what to validate on; none: existing splits, else "
        "validation_split",
    )
    dataset_config_name: Name | None = Field(
        default=None, description="configuration of a data set on the Hub; none: its default"
    )
    use_existing_splits: bool = Field(
        default=True,
        description="validate on a split of the Hub, or a file among several, that is called "
        "validation, val, dev or valid; one called test is then left alone",
    )
    validation_split: float = Field(
        default=0.1,
        ge=0,
        lt=1,
        description="share of the rows kept for validation where nothing else is named for it, "
        "drawn by the seed; 0: no validation",
    )
    format: FormatChoice = Field(
        default="auto",
        description="which columns are what: auto (by the table of known names), the name of a "
        "format, or infer (by names that look like it)",
    )
    columns: Columns = Field(default_factory=Columns, description="which columns are what")
    empty_response: Literal["refuse", "drop"] = Field(
        default="refuse", description="what to do with a row that has no answer to learn"
    )
    response_max_length: int | None = Field(
        default=None,
        ge=1,
        le=MOST_CHARACTERS,
        description="drop rows with a response of more characters; none: keep",
    )
    instruction_max_length: int | None = Field(
        default=None,
        ge=1,
        le=MOST_CHARACTERS,
        description="drop rows with an instruction, its context included, of more characters; "
        "none: keep",
    )
    template_format: TemplateChoice = Field(
        default="auto",
        description="how a conversation is written: chat (the tokenizer's own template), alpaca, "
        "chatml, basic (instruction_template); auto: chat if the tokenizer has one, else basic",
    )
    instruction_template: str = Field(
        default=INSTRUCTION_TEMPLATE,
        description="of template_format=basic; has {instruction} and, after it, {response}",
    )
    loss_on: Literal["response", "all"] = Field(
        default="response",
        description="tokens that are learnt: of responses and their ends, or all",
    )
    max_seq_length: int = Field(
        default=2048, ge=2, le=MOST_TOKENS, description="tokens of a row at most"
    )
    too_long: Literal["drop", "cut", "refuse"] = Field(
        default="drop",
        description="what to do with a conversation of more tokens; cut loses its end",
    )
    packing: bool = Field(
        default=False,
        description="several conversations in one row of max_seq_length tokens, each seeing "
        "only itself",
    )
    pretokenize: bool = Field(
        default=False, description="keep the tokens in a file, and read them when they are the same"
    )
    pretokenize_cache_dir: Name | None = Field(
        default=None, description="folder of that file; none: the user's cache folder"
    )

    @property
    def sources(self) -> tuple[str, ...]:
        """What to train on, in order."""
        return (self.path,) if isinstance(self.path, str) else self.path

    @property
    def required_files(self) -> Mapping[str, tuple[str, ...]]:
        """What must be a file: neither made on the spot nor perhaps a data set on the Hub."""
        named = {"path": self.sources, "validation_path": self.validation_sources}
        return {
            key: tuple(each for each in names if each != SUMS and not may_be_on_the_hub(each))
            for key, names in named.items()
        }

    @property
    def validation_sources(self) -> tuple[str, ...]:
        """What to validate on, in order; nothing where it comes from the rest."""
        named = self.validation_path or ()
        return (named,) if isinstance(named, str) else named

    @field_validator("instruction_template")
    @classmethod
    def _has_both_places(cls, template: str) -> str:
        """Refuse a template that would leave something out, or say it twice."""
        places = re.findall(r"{instruction}|{response}", template)
        if places != ["{instruction}", "{response}"]:
            raise ValueError("write {instruction} once and, somewhere after it, {response} once")
        return template

    @model_validator(mode="after")
    def _is_obeyed(self) -> Self:
        """Refuse a setting that another one would leave without effect."""
        conflicts: list[tuple[tuple[str, ...], str]] = []
        if self.columns.are_set and self.format != "auto":
            text = f"columns say what format={self.format} would; leave one of them out"
            conflicts.append((("columns", "format"), text))
        if self.instruction_template != INSTRUCTION_TEMPLATE and self.template_format != "basic":
            text = (
                f"template_format={self.template_format} does not always use instruction_template; "
                "write template_format=basic"
            )
            conflicts.append((("instruction_template", "template_format"), text))
        if self.pretokenize_cache_dir is not None and not self.pretokenize:
            text = "a folder for tokens that are not kept; write pretokenize=true"
            conflicts.append((("pretokenize_cache_dir", "pretokenize"), text))
        check_conflicts(conflicts)
        return self
