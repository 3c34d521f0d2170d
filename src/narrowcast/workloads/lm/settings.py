"""The sections of a language-model recipe."""

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from narrowcast.config.limits import MOST_STEPS
from narrowcast.config.sections import DataSection, Section, Sections, check_conflicts

TOPICS = "python-topics"
"""The text that needs no file: the help topics Python carries, about 400 kB of English."""
SYNTHETIC = "synthetic"
"""Random tokens instead of text, to measure speed and memory."""
MOST_LAYERS = 2048
"""Twice as deep as the deepest transformer that was trained (Wang et al. 2022: 1,000)."""
WIDEST = 2**20
"""Numbers that carry a token, fifty times GPT-4's guessed width; one layer of it takes 48 TB."""
WIDEST_MLP = 2**24
MOST_TOKENS = 2**24
"""Of a sample and of a vocabulary: 16 million, which a 32-bit token holds."""
MOST_WINDOWS = 10**9
MOST_SOURCES = 100_000
"""Texts that are named one by one; a glob names as many as there are."""
MOST_SAMPLED_TOKENS = 4096
"""Of one sample in a report; more is read from the model itself."""
MOST_PROMPTS = 8
LARGEST_BASE = 1e12
"""Of rotary positions; models of a million tokens use 1e7."""


Name = Annotated[str, Field(min_length=1)]
"""Of a file, a glob, or one of the words above."""
Names = Annotated[tuple[str, ...], Field(min_length=1, max_length=MOST_SOURCES)]


class LmData(DataSection):
    """What a language model reads, and how it is cut."""

    places: ClassVar[tuple[str, ...]] = ("text",)

    text: Name | Names = Field(
        default=TOPICS,
        description=f"paths or globs of UTF-8 text files; or {TOPICS} (Python's own English help "
        f"text), or {SYNTHETIC} (random tokens, to measure speed)",
    )
    tokenizer: str = Field(
        default="bytes",
        min_length=1,
        description="bytes (256 tokens), bpe (trained on the text), "
        "or a folder with vocab.json and merges.txt",
    )
    length: int = Field(default=128, ge=1, le=MOST_TOKENS, description="tokens per sample")
    validation_share: float = Field(
        default=0.1, gt=0, lt=1, description="share of the text kept for evaluation"
    )
    eval_windows: int = Field(
        default=64,
        ge=1,
        le=MOST_WINDOWS,
        description="samples an evaluation takes, or all there are if fewer",
    )

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.text,) if isinstance(self.text, str) else self.text

    @property
    def required_files(self) -> Mapping[str, tuple[str, ...]]:
        made = (TOPICS, SYNTHETIC)
        return {"text": tuple(each for each in self.sources if each not in made)}

    @property
    def synthetic(self) -> bool:
        return self.sources == (SYNTHETIC,)

    @model_validator(mode="after")
    def _is_obeyed(self) -> Self:
        if SYNTHETIC in self.sources and not self.synthetic:
            text = f"{SYNTHETIC} cannot be combined with text; write one of them (or ./{SYNTHETIC})"
            check_conflicts([(("text",), text)])
        if self.synthetic and self.tokenizer != "bytes":
            text = (
                f"{SYNTHETIC} tokens need no tokenizer; leave tokenizer out, "
                f"and set model.vocab to the number of tokens"
            )
            check_conflicts([(("tokenizer", "text"), text)])
        return self


class LmModel(Section):
    """The shape of a GPT."""

    layers: int = Field(default=4, ge=1, le=MOST_LAYERS, description="blocks of attention and mlp")
    width: int = Field(default=128, ge=2, le=WIDEST, description="width of the residual stream")
    heads: int = Field(default=4, ge=1, le=WIDEST, description="attention heads; they divide width")
    kv_heads: int | None = Field(
        default=None,
        ge=1,
        le=WIDEST,
        description="key and value heads; they divide heads; none: as heads",
    )
    mlp: Literal["gelu", "swiglu"] = Field(default="gelu", description="kind of mlp")
    mlp_width: int | None = Field(
        default=None,
        ge=1,
        le=WIDEST_MLP,
        description="width inside the mlp; none: 4 width, or for swiglu 8/3 width in full 64s",
    )
    norm: Literal["rmsnorm", "layernorm"] = Field(default="rmsnorm", description="normalisation")
    bias: bool = Field(default=False, description="biases in linear layers and layer norms")
    tied: bool = Field(default=True, description="the head uses the embedding's weight")
    vocab: int | None = Field(
        default=None,
        ge=2,
        le=MOST_TOKENS,
        description="tokens the model knows; none: the tokenizer's (bytes 256, bpe 4096)",
    )
    rope_base: float = Field(
        default=10_000.0, gt=1, le=LARGEST_BASE, description="base of the rotary positions"
    )

    @property
    def hidden_width(self) -> int:
        """The width inside the mlp; swiglu has three matrices for two, so two thirds is as much."""
        if self.mlp_width is not None:
            return self.mlp_width
        return 4 * self.width if self.mlp == "gelu" else 64 * math.ceil(self.width / 24)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.width % self.heads:
            nearest = max(n for n in range(1, self.heads) if self.width % n == 0)
            text = f"{self.heads} heads do not divide width {self.width}; write heads={nearest}"
            check_conflicts([(("heads", "width"), text)])
        if (self.width // self.heads) % 2:
            text = (
                f"rotary positions need an even head width, got {self.width // self.heads} "
                f"(width {self.width} over {self.heads} heads); write width={2 * self.width}"
            )
            check_conflicts([(("heads", "width"), text)])
        if self.kv_heads is not None and self.heads % self.kv_heads:
            nearest = max(n for n in range(1, self.kv_heads) if self.heads % n == 0)
            text = f"kv_heads must divide heads ({self.heads}); write kv_heads={nearest}"
            check_conflicts([(("kv_heads", "heads"), text)])
        return self


class LmRehearsal(Section):
    """Provoke an overflow, to see how a run reacts."""

    swell: int = Field(
        default=0,
        ge=0,
        le=MOST_STEPS,
        description="double the input of the middle block's mlp.down every so many steps, and "
        "divide its output to match; 0: off",
    )


class LmSamples(Section):
    """Text that the model writes, for the report."""

    tokens: int = Field(
        default=48, ge=0, le=MOST_SAMPLED_TOKENS, description="tokens per sample; 0: no samples"
    )
    prompts: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(),
        max_length=MOST_PROMPTS,
        description="texts to continue; []: the beginnings of two held-out samples",
    )
    temperature: float = Field(
        default=0.8, ge=0, le=100, description="0: always the likeliest token; 1: as predicted"
    )


SECTIONS = Sections(data=LmData, model=LmModel, rehearse=LmRehearsal, samples=LmSamples)
