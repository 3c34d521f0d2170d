"""Recipe sections for fine-tuning; setting names follow FunctionalNetworksSFT."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from narrowcast.config.section import Section, check_conflicts
from narrowcast.config.sections import Sections
from narrowcast.workloads.sft.data.settings import Name, SftData
from narrowcast.workloads.sft.ica.settings import IcaSection
from narrowcast.workloads.sft.judge.settings import EvalTasksSection

TINY = "tiny"
"""A small Llama that needs no file, initialised from the seed."""
LARGEST_RANK = 2**16
LARGEST_ALPHA = 1e6
MOST_NAMES = 1000

BaseFormat = Literal["auto", "fp32", "bf16", "fp16", "e4m3", "int8", "nf4", "fp4"]
SavedFormat = Literal["auto", "fp32", "bf16", "fp16"]
PreferenceLoss = Literal[
    "none", "sigmoid", "robust", "hinge", "ipo", "sigmoid_norm", "apo_zero", "apo_down"
]
Names = Annotated[tuple[Name, ...], Field(min_length=1, max_length=MOST_NAMES)]


class SftModel(Section):
    """The language model to fine-tune, and which weights are trained."""

    path: Name = Field(
        description="folder of a Hugging Face causal language model, a .gguf file, or a model name "
        f"on the Hugging Face Hub, as owner/name; or {TINY} (a small untrained Llama, for a first "
        "run)"
    )
    eos_token: Name | None = Field(
        default=None,
        description="token that ends a response and stops generation, such as <|im_end|>; it "
        "becomes the eos token of the saved tokenizer; none: the tokenizer's own",
    )
    tune: Literal["lora", "full"] = Field(
        default="lora",
        description="train adapters on a frozen base (lora) or all weights (full)",
    )
    base_dtype: BaseFormat = Field(
        default="auto",
        description="format of the frozen base weights; auto: that of the model's files, or fp32 "
        "where 16-bit matmuls are emulated; e4m3: one byte per weight and one scale per row; int8, "
        "nf4, fp4: quantized by bitsandbytes",
    )
    base_products: Literal["auto", "fp8", "wide"] = Field(
        default="auto",
        description="matmuls with base_dtype=e4m3: in fp8, or wide (dequantized first); auto: as "
        "the policy says; the plan shows which",
    )
    attn_implementation: Literal["auto", "eager", "sdpa"] = Field(
        default="auto", description="attention implementation; auto: the fastest on this machine"
    )
    gradient_checkpointing: bool = Field(
        default=False, description="recompute activations in the backward pass to save memory"
    )
    neftune_noise_alpha: float | None = Field(
        default=None,
        gt=0,
        le=1000,
        description="NEFTune: uniform noise on token embeddings in training, at most "
        "alpha / sqrt(tokens per row * width); none: no noise",
    )
    trust_remote_code: bool = Field(
        default=False, description="run the Python code in the model's repository"
    )
    save_dtype: SavedFormat = Field(
        default="auto",
        description="format of the saved model; auto: that of the model's files",
    )

    @model_validator(mode="after")
    def _is_obeyed(self) -> Self:
        """Check that base settings apply to the chosen way of training."""
        if self.base_products != "auto" and self.base_dtype != "e4m3":
            text = "needs base_dtype=e4m3; set that too, or leave base_products out"
            check_conflicts([(("base_products", "base_dtype"), text)])
        if self.tune == "full" and self.base_dtype not in ("auto", "fp32"):
            text = (
                f"base_dtype={self.base_dtype} is for frozen weights, but tune=full trains all "
                "weights; leave base_dtype out and set precision.policy"
            )
            check_conflicts([(("base_dtype", "tune"), text)])
        return self


class LoraSection(Section):
    """LoRA adapters (peft), used with model.tune=lora."""

    lora_r: int = Field(default=16, ge=1, le=LARGEST_RANK, description="rank of each adapter")
    lora_alpha: float = Field(
        default=32,
        gt=0,
        le=LARGEST_ALPHA,
        description="adapter outputs are scaled by lora_alpha / lora_r, or with use_rslora by "
        "lora_alpha / sqrt(lora_r)",
    )
    use_rslora: bool = Field(
        default=False, description="rank-stabilised LoRA: scale by lora_alpha / sqrt(lora_r)"
    )
    use_dora: bool = Field(
        default=False,
        description="DoRA: also train the magnitude of each output of an adapted weight",
    )
    lora_dropout: float = Field(
        default=0.1, ge=0, lt=1, description="dropout on adapter inputs during training"
    )
    lora_target_modules: Name | Names | None = Field(
        default=None,
        description="layers that get an adapter; none: every linear layer except the LM head",
    )
    lora_bias: Literal["none", "all", "lora_only"] = Field(
        default="none", description="biases to train as well"
    )
    merge_adapter_with_base: bool = Field(
        default=False, description="also save the model with its adapters merged"
    )

    @property
    def targets(self) -> tuple[str, ...]:
        """Target names as a tuple, empty for all linear layers."""
        inputs = self.lora_target_modules or ()
        return (inputs,) if isinstance(inputs, str) else inputs


class DpoSection(Section):
    """Direct preference optimisation (DPO) on chosen and rejected responses."""

    loss_type: PreferenceLoss = Field(
        default="none",
        description="loss on preferences, with names of TRL; none: train on responses instead",
    )
    beta: float = Field(
        default=0.1,
        gt=0,
        le=1000,
        description="how much the model is kept near the reference, which is the model before "
        "training; tau of ipo",
    )
    label_smoothing: float = Field(
        default=0.0,
        ge=0,
        lt=0.5,
        description="assumed fraction of wrong preferences, for sigmoid (cDPO) and robust",
    )
    sft_weight: float = Field(
        default=0.0,
        ge=0,
        le=1000,
        description="weight of the cross-entropy of chosen responses that is added to the loss",
    )

    @model_validator(mode="after")
    def _is_obeyed(self) -> Self:
        """Check that settings apply to the kind of loss."""
        if self.loss_type == "none":
            changed = [
                name
                for name, field in type(self).model_fields.items()
                if getattr(self, name) != field.default
            ]
            text = f"{', '.join(changed)} needs dpo.loss_type; write e.g. loss_type=sigmoid"
            check_conflicts([(("loss_type", name), text) for name in changed[:1]])
        elif self.label_smoothing and self.loss_type not in ("sigmoid", "robust"):
            text = (
                f"loss_type={self.loss_type} has no label_smoothing; leave it out, or write "
                "loss_type=sigmoid or robust"
            )
            check_conflicts([(("loss_type", "label_smoothing"), text)])
        return self


SECTIONS = Sections(
    data=SftData,
    model=SftModel,
    lora=LoraSection,
    dpo=DpoSection,
    ica=IcaSection,
    eval_tasks=EvalTasksSection,
)
