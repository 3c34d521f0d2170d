"""The sections of a recipe that takes a trained network apart; names are the field's."""

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
    """What the target is shown; a toy draws its own, and needs none of these."""

    places: ClassVar[tuple[str, ...]] = ("text",)

    text: Names = Field(
        default=(), description="paths or globs of UTF-8 text files (model.path); none for a toy"
    )
    length: int = Field(
        default=128, ge=2, le=MOST_TOKENS, description="tokens of a sample (model.path)"
    )

    @property
    def required_files(self) -> Mapping[str, tuple[str, ...]]:
        """The text files."""
        return {"text": self.text}


class TargetSection(Section):
    """The trained network that is taken apart, frozen: a toy, or a language model."""

    toy: str = Field(
        default="",
        max_length=64,
        description="a toy that is trained on the spot: tms_5-2 (features-dimensions, any), "
        "tms_5-2-id, resid_mlp1 to resid_mlp3, induction",
    )
    path: str = Field(
        default="",
        max_length=4096,
        description="instead: a language model: the folder of a run of lm, of a Hugging Face "
        "model or of llama2.c, or a .gguf file",
    )
    pretrain_steps: int | None = Field(
        default=None, ge=1, le=MOST_STEPS, description="steps a toy is trained; none: its own"
    )
    pretrain_batch_size: int | None = Field(
        default=None, ge=1, le=MOST_STEPS, description="samples of each; none: its own"
    )

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        """Refuse two targets, and none."""
        if bool(self.toy) == bool(self.path):
            text = "a decomposition has one target; write model.toy=tms_5-2, or model.path=FOLDER"
            check_conflicts([(("toy", "path"), text)])
        for name in ("pretrain_steps", "pretrain_batch_size"):
            if self.path and getattr(self, name) is not None:
                text = f"a model of path is trained already; leave {name} out"
                check_conflicts([((name, "path"), text)])
        return self


class SitesSection(Section):
    """Which matrices are taken apart, into how many components."""

    names: Names = Field(
        default=(),
        description="globs of modules, such as model.layers.*.mlp.up_proj; none: those of the toy",
    )
    components: Count | Annotated[tuple[Count, ...], Field(max_length=MOST_NAMES)] | None = Field(
        default=None,
        description="components of each: a number for all, or one for each of names; none: those "
        "of the toy",
    )
    identities: Names = Field(
        default=(), description="globs of modules before which an identity is taken apart too"
    )
    identity_components: Count | None = Field(
        default=None, description="components of each such identity"
    )
    tied: bool | None = Field(
        default=None,
        description="components shared by matrices that are each other's transpose; none: as the "
        "toy has them",
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        """Refuse names without a number of components, and a name that has two."""
        for field, globs in (("names", self.names), ("identities", self.identities)):
            for glob in globs:
                if globs.count(glob) > 1:
                    text = f"{glob} is there {globs.count(glob)} times; write it once"
                    check_conflicts([((field,), text)])
        if self.names and self.components is None:
            text = "say how many components: sites.components=512, or a number for each name"
            check_conflicts([(("components", "names"), text)])
        if isinstance(self.components, tuple) and len(self.components) != len(self.names):
            text = f"{len(self.components)} numbers for {len(self.names)} names; give one for each"
            check_conflicts([(("components", "names"), text)])
        if bool(self.identities) != (self.identity_components is not None):
            text = "identities and identity_components go together; write both, or neither"
            check_conflicts([(("identities", "identity_components"), text)])
        return self

    @property
    def patterns(self) -> dict[str, int]:
        """How many components the modules of each glob are given."""
        numbers = self.components
        if not isinstance(numbers, tuple):
            numbers = (numbers or 0,) * len(self.names)
        return dict(zip(self.names, numbers, strict=True))


class ImportanceSection(Section):
    """The function that tells which components matter for an input."""

    kind: Literal["mlp", "vector_mlp", "shared_mlp", "global_shared_mlp", "global_transformer"] = (
        Field(
            default="vector_mlp",
            description="mlp (of a component's activation), vector_mlp (of the site's input, an "
            "MLP for each component), shared_mlp (one for all), global_shared_mlp and "
            "global_transformer (of the inputs of all sites)",
        )
    )
    hidden: Annotated[tuple[Width, ...], Field(min_length=1, max_length=16)] = Field(
        default=(8,), description="hidden widths of the MLP"
    )
    width: Width = Field(default=256, description="width of a global_transformer")
    blocks: int = Field(default=4, ge=1, le=256, description="its blocks")
    heads: int = Field(default=4, ge=1, le=1024, description="heads of each")
    squash: Literal["leaky_hard", "normal", "hard", "swish_hard"] = Field(
        default="leaky_hard", description="the sigmoid that brings importances into 0 to 1"
    )
    sampling: Literal["continuous", "binomial"] = Field(
        default="continuous", description="how masks are drawn: evenly from 0 to 1, or 0 or 1"
    )

    @model_validator(mode="after")
    def _is_of_the_kind(self) -> Self:
        """Refuse what only a transformer has."""
        fields = type(self).model_fields
        for name in ("width", "blocks", "heads"):
            if self.kind != "global_transformer" and getattr(self, name) != fields[name].default:
                text = f"{name} is of kind=global_transformer, not of {self.kind}; leave it out"
                check_conflicts([((name, "kind"), text)])
        return self


class DecompositionSection(Section):
    """How components are trained, beside what every recipe has."""

    seeds: int = Field(
        default=1, ge=1, le=MOST_SEEDS, description="decompositions trained at once (toys)"
    )
    delta: bool = Field(
        default=True,
        description="whether what components leave of a weight takes part in masked passes",
    )
    divergence: Literal["auto", "mse", "kl"] = Field(
        default="auto",
        description="how outputs are compared; auto: kl of a language model, mse of a toy",
    )
    warmup_steps: int = Field(
        default=200,
        ge=0,
        le=MOST_STEPS,
        description="steps of faithfulness alone, before the first of the run",
    )
    warmup_lr: float = Field(default=0.01, gt=0, le=1e3, description="learning rate of these")
    warmup_weight_decay: float = Field(default=0.1, ge=0, le=1e3, description="and weight decay")
    clip_components: float | None = Field(
        default=None,
        gt=0,
        le=LARGEST_NORM,
        description="largest norm of the gradients of components, of each seed; none: no clipping",
    )
    clip_importance: float | None = Field(
        default=None, gt=0, le=LARGEST_NORM, description="the same for importance functions"
    )


class EvalTasksSection(Section):
    """How a decomposition is judged."""

    alive: float = Field(
        default=0.0, ge=0, lt=1, description="a component is in use where its importance is above"
    )
    tolerance: float = Field(
        default=0.2, gt=0, lt=0.5, description="how far an importance may be from 0 or 1 (toys)"
    )
    rounding: float = Field(
        default=0.0, ge=0, lt=1, description="rounded masks are 1 where importances are above"
    )
    batches: int = Field(
        default=4, ge=1, le=MOST_BATCHES, description="batches an evaluation looks at"
    )
    groups: Names = Field(default=(), description="globs of sites whose L0 is added up")
    pgd_steps: int = Field(
        default=20, ge=0, le=10_000, description="steps of the adversary at the end; 0: none"
    )
    pgd_step_size: float = Field(default=0.1, gt=0, le=1, description="and how far each goes")


SECTIONS = Sections(
    data=DecomposeData,
    model=TargetSection,
    sites=SitesSection,
    importance=ImportanceSection,
    losses=LossesSection,
    decomposition=DecompositionSection,
    eval_tasks=EvalTasksSection,
)
