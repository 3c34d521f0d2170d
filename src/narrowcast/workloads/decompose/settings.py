"""The sections of a decompose recipe."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from narrowcast.config.limits import MOST_STEPS
from narrowcast.config.section import Section, check_conflicts
from narrowcast.config.sections import DataSection, Sections

MOST_NAMES = 1024
MOST_COMPONENTS = 2**20
MOST_SEEDS = 4096
WIDEST = 2**16
MOST_TOKENS = 2**20
MOST_BATCHES = 10**6
LARGEST_NORM = 1e6
LARGEST = 1e12
"""Of a coefficient: faithfulness is weighed with up to 1e7."""
EPSILON = 1e-12
"""Added to an importance: 0 to a power below 1 has no finite slope. As published."""

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

    shuffle: bool = Field(
        default=False,
        description="shuffle the entries of each weight matrix of the trained target: a control "
        "without learned structure",
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


class Term(Section):
    """A term of the loss, used if it has a coefficient."""

    coefficient: float | None = Field(
        default=None,
        gt=0,
        le=LARGEST,
        description="weight of this term in the loss; none: not used",
    )

    @model_validator(mode="after")
    def _is_weighed(self) -> Self:
        if "coefficient" in self.model_fields_set:
            return self
        fields = type(self).model_fields
        changed = [name for name, each in fields.items() if getattr(self, name) != each.default]
        text = "this loss has no coefficient, so it is not used; write its coefficient"
        check_conflicts([((name, "coefficient"), text) for name in changed[:1]])
        return self


class Annealed(Term):
    """A penalty on importances that changes during the run."""

    anneal_from: float = Field(
        default=0.0, ge=0, lt=1, description="share of the run at which it starts"
    )
    anneal_to: float = Field(
        default=1.0, gt=0, le=1, description="share of the run at which it ends"
    )
    beta: float = Field(
        default=0.0, ge=0, le=LARGEST, description="weight of the frequency term; 0: not used"
    )
    reference_rows: int | None = Field(
        default=None,
        ge=1,
        le=MOST_STEPS,
        description="rows to scale frequencies to; none: those of the batch",
    )

    @model_validator(mode="after")
    def _anneals(self) -> Self:
        if self.anneal_from >= self.anneal_to:
            text = "anneal_from must be below anneal_to; write e.g. 0.0 and 1.0"
            check_conflicts([(("anneal_from", "anneal_to"), text)])
        if self.reference_rows is not None and not self.beta:
            text = "reference_rows is only for the frequency term; write beta, or leave it out"
            check_conflicts([(("reference_rows", "beta"), text)])
        return self


class MinimalityTerm(Annealed):
    """Sum of importances to a power."""

    p: float = Field(default=1.0, gt=0, le=16, description="power of the importances")
    p_final: float | None = Field(
        default=None, gt=0, le=16, description="value of p at the end; none: constant"
    )
    epsilon: float = Field(
        default=EPSILON, gt=0, lt=1, description="added to importances; bounds their gradient"
    )

    @model_validator(mode="after")
    def _has_an_end(self) -> Self:
        if self.p_final is None and (self.anneal_from, self.anneal_to) != (0.0, 1.0):
            text = "annealing needs p_final; write p_final"
            check_conflicts([(("anneal_from", "anneal_to", "p_final"), text)])
        return self


class SmoothL0Term(Annealed):
    """Smooth count of importances above gamma."""

    gamma: float = Field(default=1.0, gt=0, le=1e3, description="width of the smooth step")
    gamma_final: float = Field(default=0.01, gt=0, le=1e3, description="value of gamma at the end")


class MaskedTerm(Term):
    """A term of masked passes."""

    recompute: bool = Field(
        default=False, description="recompute activations in the backward pass to save memory"
    )


class LayerwiseTerm(MaskedTerm):
    """One pass per site."""

    batched: bool | None = Field(
        default=False,
        description="run all sites as one larger batch; null: on devices with Triton kernels",
    )


class SubsetTerm(MaskedTerm):
    """One pass, with a random subset of sites masked at each position."""

    routing: Literal["uniform_k_subset", "static_probability"] = Field(
        default="uniform_k_subset", description="how subsets are sampled"
    )
    probability: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="probability of each site (routing=static_probability)",
    )

    @model_validator(mode="after")
    def _has_a_probability(self) -> Self:
        if (self.probability is not None) != (self.routing == "static_probability"):
            text = "routing=static_probability and probability must be set together"
            check_conflicts([(("probability", "routing"), text)])
        return self


class Budget(Section):
    """Steps of an adversary."""

    steps: int = Field(default=1, ge=1, le=10_000, description="adversary steps per training step")
    early_steps: int | None = Field(
        default=None, ge=1, le=10_000, description="adversary steps early in the run; none: steps"
    )
    early_until: float = Field(
        default=0.0, ge=0, lt=1, description="share of the run that uses early_steps"
    )
    every: int = Field(
        default=1, ge=1, le=MOST_STEPS, description="use this term every so many training steps"
    )

    @model_validator(mode="after")
    def _is_early_until(self) -> Self:
        if (self.early_steps is not None) != (self.early_until > 0):
            text = "early_steps and early_until must be set together; write e.g. 1 and 0.5"
            check_conflicts([(("early_steps", "early_until"), text)])
        return self


class PGDBudget(Budget):
    """An adversary that starts again at every training step."""

    step_size: float = Field(default=1.0, gt=0, le=1, description="size of an adversary step")
    init: Literal["random", "ones", "zeroes"] = Field(default="random", description="initial masks")
    scope: Literal["shared", "per_datapoint"] = Field(
        default="shared", description="one mask per batch, or one per position"
    )


class PersistentBudget(Budget):
    """An adversary that keeps its masks between training steps."""

    optimizer: Literal["adam", "sign"] = Field(
        default="adam", description="optimizer of the adversary"
    )
    lr: float = Field(default=0.01, gt=0, le=1e3, description="learning rate of the adversary")
    beta1: float = Field(default=0.5, ge=0, lt=1, description="beta1 of Adam")
    beta2: float = Field(default=0.99, ge=0, lt=1, description="beta2 of Adam")
    scope: Literal["single", "broadcast_across_batch", "repeat_across_batch", "per_position"] = (
        Field(default="single", description="positions that share a mask")
    )
    repeat: int = Field(
        default=1,
        ge=1,
        le=MOST_STEPS,
        description="samples with their own masks (repeat_across_batch)",
    )
    sigmoid: bool = Field(
        default=False, description="keep masks in [0, 1] by a sigmoid, not by clamping"
    )

    @model_validator(mode="after")
    def _is_used(self) -> Self:
        if self.optimizer == "sign" and (self.beta1, self.beta2) != (0.5, 0.99):
            text = "optimizer=sign has no beta1 and beta2; leave them out"
            check_conflicts([(("optimizer", "beta1", "beta2"), text)])
        if self.repeat > 1 and self.scope != "repeat_across_batch":
            text = "repeat needs scope=repeat_across_batch; write both, or neither"
            check_conflicts([(("repeat", "scope"), text)])
        return self


class PGDTerm(MaskedTerm, PGDBudget):
    """All sites, with adversarial masks."""


class PGDLayerwiseTerm(LayerwiseTerm, PGDBudget):
    """One site at a time, with adversarial masks."""


class PGDSubsetTerm(SubsetTerm, PGDBudget):
    """Random subsets of sites, with adversarial masks."""


class PersistentTerm(MaskedTerm, PersistentBudget):
    """All sites, with persistent adversarial masks."""


class PersistentSubsetTerm(SubsetTerm, PersistentBudget):
    """Random subsets of sites, with persistent adversarial masks."""


def _term(kind: type[Term], description: str) -> Any:
    return Field(default_factory=kind, description=description)


class LossesSection(Section):
    """The loss: every term with a coefficient."""

    faithfulness: Term = _term(Term, "weight residual of components")
    minimality: MinimalityTerm = _term(MinimalityTerm, "sum of importances to a power")
    smooth_l0: SmoothL0Term = _term(SmoothL0Term, "smooth count of important components")
    stochastic: MaskedTerm = _term(MaskedTerm, "outputs with random masks")
    stochastic_layerwise: LayerwiseTerm = _term(LayerwiseTerm, "the same, one site at a time")
    stochastic_subset: SubsetTerm = _term(SubsetTerm, "the same, random sites at each position")
    importance_masked: MaskedTerm = _term(MaskedTerm, "outputs with importances as masks")
    importance_masked_layerwise: LayerwiseTerm = _term(
        LayerwiseTerm, "the same, one site at a time"
    )
    importance_masked_subset: SubsetTerm = _term(
        SubsetTerm, "the same, random sites at each position"
    )
    unmasked: MaskedTerm = _term(MaskedTerm, "outputs with all components and no residual")
    hidden_activations: MaskedTerm = _term(MaskedTerm, "inputs of sites with random masks")
    pgd: PGDTerm = _term(PGDTerm, "outputs with adversarial masks (PGD)")
    pgd_layerwise: PGDLayerwiseTerm = _term(PGDLayerwiseTerm, "the same, one site at a time")
    pgd_subset: PGDSubsetTerm = _term(PGDSubsetTerm, "the same, random sites at each position")
    persistent_pgd: PersistentTerm = _term(
        PersistentTerm, "outputs with persistent adversarial masks"
    )
    persistent_pgd_subset: PersistentSubsetTerm = _term(
        PersistentSubsetTerm, "the same, random sites at each position"
    )

    @model_validator(mode="after")
    def _is_a_loss(self) -> Self:
        if not self.chosen:
            text = "no loss has a coefficient; write e.g. losses.stochastic.coefficient=1"
            check_conflicts([(("stochastic",), text)])
        sometimes = [name for name, term in self.chosen.items() if getattr(term, "every", 1) > 1]
        if len(sometimes) == len(self.chosen):
            text = "some steps would have no loss; leave every out, or add a loss without it"
            check_conflicts([((f"{name}.every",), text) for name in sometimes[:1]])
        return self

    @property
    def chosen(self) -> dict[str, Term]:
        """The terms with a coefficient, by name."""
        terms = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: term for name, term in terms.items() if term.coefficient is not None}

    @property
    def depends_on_steps(self) -> bool:
        """Whether a term anneals, or has an easier adversary early in the run."""
        terms = self.chosen.values()
        return any(
            isinstance(term, SmoothL0Term)
            or getattr(term, "p_final", None) is not None
            or getattr(term, "early_steps", None) is not None
            for term in terms
        )


class DecompositionSection(Section):
    """How components are trained."""

    seeds: int = Field(
        default=1, ge=1, le=MOST_SEEDS, description="decompositions to train at once (toys only)"
    )
    start_from: str = Field(
        default="",
        max_length=4096,
        description="finished run on the same target whose components and importance functions "
        "to start from, without warm-up; empty: random ones",
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
