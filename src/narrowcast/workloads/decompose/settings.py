"""The sections of a decompose recipe."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from narrowcast.config.limits import MOST_STEPS
from narrowcast.config.section import Section, check_conflicts
from narrowcast.config.sections import DataSection, Sections
from narrowcast.workloads.decompose.terms import LossesSection

MOST_NAMES = 1024
MOST_COMPONENTS = 2**20
MOST_SEEDS = 4096
WIDEST = 2**16
MOST_TOKENS = 2**20
MOST_BATCHES = 10**6
LARGEST_NORM = 1e6

Name = Annotated[str, Field(min_length=1, max_length=4096)]
Names = Annotated[tuple[Name, ...], Field(max_length=MOST_NAMES)]
Count = Annotated[int, Field(ge=1, le=MOST_COMPONENTS)]
Width = Annotated[int, Field(ge=1, le=WIDEST)]


class DecomposeData(DataSection):
    """Text for a language model; a toy generates its own samples."""

    places: ClassVar[tuple[str, ...]] = ("text",)

    text: Names = Field(
        default=(), description="paths or globs of UTF-8 text files (model.path only)"
    )
    length: int = Field(
        default=128, ge=2, le=MOST_TOKENS, description="tokens per sample (model.path only)"
    )

    @property
    def required_files(self) -> Mapping[str, tuple[str, ...]]:
        """The text files."""
        return {"text": self.text}


class TargetSection(Section):
    """The frozen network to decompose: a toy or a language model."""

    toy: str = Field(
        default="",
        max_length=64,
        description="toy to train and decompose: tms_N-M (N features in M dimensions, such as "
        "tms_5-2), tms_N-M-id, resid_mlp1 to resid_mlp3, induction",
    )
    path: str = Field(
        default="",
        max_length=4096,
        description="language model to decompose instead: the folder of an lm run, of a Hugging "
        "Face model or of llama2.c, or a .gguf file",
    )
    pretrain_steps: int | None = Field(
        default=None,
        ge=1,
        le=MOST_STEPS,
        description="training steps of the toy; none: default",
    )
    pretrain_batch_size: int | None = Field(
        default=None,
        ge=1,
        le=MOST_STEPS,
        description="batch size of these steps; none: default",
    )

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if bool(self.toy) == bool(self.path):
            text = "exactly one target is needed; write model.toy=tms_5-2 or model.path=FOLDER"
            check_conflicts([(("toy", "path"), text)])
        for name in ("pretrain_steps", "pretrain_batch_size"):
            if self.path and getattr(self, name) is not None:
                text = f"{name} is only for toys; leave it out"
                check_conflicts([((name, "path"), text)])
        return self


class SitesSection(Section):
    """The matrices to decompose, and their numbers of components."""

    names: Names = Field(
        default=(),
        description="globs of modules, such as model.layers.*.mlp.up_proj; none: toy defaults",
    )
    components: Count | Annotated[tuple[Count, ...], Field(max_length=MOST_NAMES)] | None = Field(
        default=None,
        description="components per module: one number, or one per name; none: the toy's defaults",
    )
    identities: Names = Field(
        default=(), description="globs of modules to insert and decompose an identity before"
    )
    identity_components: Count | None = Field(
        default=None, description="components per inserted identity"
    )
    tied: bool | None = Field(
        default=None,
        description="share components between matrices that are each other's transpose; none: "
        "the toy's default",
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for field, globs in (("names", self.names), ("identities", self.identities)):
            for glob in globs:
                if globs.count(glob) > 1:
                    text = f"{glob} is listed {globs.count(glob)} times; write it once"
                    check_conflicts([((field,), text)])
        if self.names and self.components is None:
            text = "names need components; write sites.components=512, or one number per name"
            check_conflicts([(("components", "names"), text)])
        if isinstance(self.components, tuple) and len(self.components) != len(self.names):
            text = f"{len(self.components)} numbers for {len(self.names)} names; write one per name"
            check_conflicts([(("components", "names"), text)])
        if bool(self.identities) != (self.identity_components is not None):
            text = "identities and identity_components must be set together; write both or neither"
            check_conflicts([(("identities", "identity_components"), text)])
        return self

    @property
    def patterns(self) -> dict[str, int]:
        """Components per module, by glob."""
        numbers = self.components
        if not isinstance(numbers, tuple):
            numbers = (numbers or 0,) * len(self.names)
        return dict(zip(self.names, numbers, strict=True))


class ImportanceSection(Section):
    """The function that predicts the importance of each component for an input."""

    kind: Literal["mlp", "vector_mlp", "shared_mlp", "global_shared_mlp", "global_transformer"] = (
        Field(
            default="vector_mlp",
            description="mlp (reads the component's activation), vector_mlp (reads the site's "
            "input, one MLP per component), shared_mlp (one MLP per site), global_shared_mlp and "
            "global_transformer (read the inputs of all sites)",
        )
    )
    hidden: Annotated[tuple[Width, ...], Field(min_length=1, max_length=16)] = Field(
        default=(8,), description="hidden layer widths of the MLP"
    )
    width: Width = Field(default=256, description="width of the global_transformer")
    blocks: int = Field(default=4, ge=1, le=256, description="blocks of the global_transformer")
    heads: int = Field(default=4, ge=1, le=1024, description="its attention heads per block")
    squash: Literal["leaky_hard", "normal", "hard", "swish_hard"] = Field(
        default="leaky_hard", description="sigmoid that maps logits to importances"
    )
    sampling: Literal["continuous", "binomial"] = Field(
        default="continuous", description="how masks are sampled: uniform in [0, 1], or 0 or 1"
    )

    @model_validator(mode="after")
    def _is_of_the_kind(self) -> Self:
        fields = type(self).model_fields
        for name in ("width", "blocks", "heads"):
            if self.kind != "global_transformer" and getattr(self, name) != fields[name].default:
                text = f"{name} is only for kind=global_transformer, not {self.kind}; leave it out"
                check_conflicts([((name, "kind"), text)])
        return self


class DecompositionSection(Section):
    """How components are trained."""

    seeds: int = Field(
        default=1, ge=1, le=MOST_SEEDS, description="decompositions to train at once (toys only)"
    )
    delta: bool = Field(
        default=True,
        description="include the weight residual (delta) in masked passes",
    )
    divergence: Literal["auto", "mse", "kl"] = Field(
        default="auto",
        description="how outputs are compared; auto: kl if they are logits, else mse",
    )
    warmup_steps: int = Field(
        default=200,
        ge=0,
        le=MOST_STEPS,
        description="steps with only the faithfulness loss, before the first step",
    )
    warmup_lr: float = Field(default=0.01, gt=0, le=1e3, description="learning rate of the warm-up")
    warmup_weight_decay: float = Field(
        default=0.1, ge=0, le=1e3, description="weight decay of the warm-up"
    )
    clip_components: float | None = Field(
        default=None,
        gt=0,
        le=LARGEST_NORM,
        description="gradient clipping norm of components, per seed; none: no clipping",
    )
    clip_importance: float | None = Field(
        default=None,
        gt=0,
        le=LARGEST_NORM,
        description="gradient clipping norm of importance functions; none: no clipping",
    )


class EvalTasksSection(Section):
    """How a decomposition is evaluated."""

    alive: float = Field(
        default=0.0, ge=0, lt=1, description="a component is active if its importance is above this"
    )
    tolerance: float = Field(
        default=0.2,
        gt=0,
        lt=0.5,
        description="largest error of an importance, from 0 or 1 (toys only)",
    )
    rounding: float = Field(
        default=0.0, ge=0, lt=1, description="rounded masks are 1 if the importance is above this"
    )
    batches: int = Field(default=4, ge=1, le=MOST_BATCHES, description="batches per evaluation")
    groups: Names = Field(default=(), description="globs of sites to report a summed L0 for")
    pgd_steps: int = Field(
        default=20, ge=0, le=10_000, description="steps of the final PGD attack; 0: no attack"
    )
    pgd_step_size: float = Field(
        default=0.1, gt=0, le=1, description="step size of the final PGD attack"
    )


SECTIONS = Sections(
    data=DecomposeData,
    model=TargetSection,
    sites=SitesSection,
    importance=ImportanceSection,
    losses=LossesSection,
    decomposition=DecompositionSection,
    eval_tasks=EvalTasksSection,
)
