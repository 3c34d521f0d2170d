"""The sections of a recipe that fine-tunes a language model; names are those of its source."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from narrowcast.config.section import Section, check_conflicts
from narrowcast.config.sections import Sections
from narrowcast.workloads.sft.data.settings import Name, SftData
from narrowcast.workloads.sft.ica.settings import IcaSection
from narrowcast.workloads.sft.judge.settings import EvalTasksSection

TINY = "tiny"
"""The model that needs no file: a small Llama, made from the seed."""
LARGEST_RANK = 2**16
LARGEST_ALPHA = 1e6
MOST_NAMES = 1000

BaseFormat = Literal["auto", "fp32", "bf16", "fp16", "e4m3", "int8", "nf4", "fp4"]
SavedFormat = Literal["auto", "fp32", "bf16", "fp16"]
Names = Annotated[tuple[Name, ...], Field(min_length=1, max_length=MOST_NAMES)]


class SftModel(Section):
    """Which language model is fine-tuned, and how much of it."""

    path: Name = Field(
        description="a folder of a Hugging Face causal language model, a .gguf file, or its name "
        f"on the Hugging Face Hub, as owner/name; or {TINY} (a small Llama without training, for "
        "a first run)"
    )
    eos_token: Name | None = Field(
        default=None,
        description="token that ends a response and stops generation, such as <|im_end|>; it "
        "becomes the eos token of the saved tokenizer; none: the tokenizer's own",
    )
    tune: Literal["lora", "full"] = Field(
        default="lora", description="what is trained: adapters beside frozen weights, or all of it"
    )
    base_dtype: BaseFormat = Field(
        default="auto",
        description="what frozen weights are kept in; auto: as the model's folder has them, and "
        "fp32 where products of 16 bits are emulated; e4m3: a byte each and a scale for each row; "
        "int8, nf4, fp4: by bitsandbytes",
    )
    base_products: Literal["auto", "fp8", "wide"] = Field(
        default="auto",
        description="how weights of base=e4m3 are multiplied; auto: as the policy says, and the "
        "plan tells",
    )
    attn_implementation: Literal["auto", "eager", "sdpa"] = Field(
        default="auto", description="how attention is computed; auto: the fastest here"
    )
    gradient_checkpointing: bool = Field(
        default=False, description="compute activations again in the backward pass: less memory"
    )
    trust_remote_code: bool = Field(
        default=False, description="run Python code that comes with the model"
    )
    save_dtype: SavedFormat = Field(
        default="auto",
        description="what the model is saved in at the end; auto: as the model's folder has it",
    )

    @model_validator(mode="after")
    def _is_obeyed(self) -> Self:
        """Refuse a format of frozen weights where none are, and how to multiply others."""
        if self.base_products != "auto" and self.base_dtype != "e4m3":
            text = "it needs base_dtype=e4m3; set that too, or leave base_products out"
            check_conflicts([(("base_products", "base_dtype"), text)])
        if self.tune == "full" and self.base_dtype not in ("auto", "fp32"):
            text = (
                "base_dtype is for frozen weights and tune=full trains them all, got "
                f"{self.base_dtype}; leave base_dtype out, and set precision.policy"
            )
            check_conflicts([(("base_dtype", "tune"), text)])
        return self


class LoraSection(Section):
    """Adapters of low rank, by peft, where model.tune=lora."""

    lora_r: int = Field(default=16, ge=1, le=LARGEST_RANK, description="rank of an adapter")
    lora_alpha: float = Field(
        default=32,
        gt=0,
        le=LARGEST_ALPHA,
        description="an adapter's output is multiplied by this over its rank",
    )
    lora_dropout: float = Field(
        default=0.1, ge=0, lt=1, description="share of an adapter's inputs left out in training"
    )
    lora_target_modules: Name | Names | None = Field(
        default=None,
        description="names of the layers that get one; none: every linear layer but the head",
    )
    lora_bias: Literal["none", "all", "lora_only"] = Field(
        default="none", description="biases that are trained as well"
    )
    merge_adapter_with_base: bool = Field(
        default=False, description="write the model with its adapters merged, too, at the end"
    )

    @property
    def targets(self) -> tuple[str, ...]:
        """The names given; nothing where all linear layers are meant."""
        inputs = self.lora_target_modules or ()
        return (inputs,) if isinstance(inputs, str) else inputs


SECTIONS = Sections(
    data=SftData, model=SftModel, lora=LoraSection, ica=IcaSection, eval_tasks=EvalTasksSection
)
