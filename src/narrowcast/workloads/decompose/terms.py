"""The `losses` section of a recipe: a term is used if it has a coefficient."""

from typing import Literal, Self

from pydantic import Field, model_validator

from narrowcast.config.limits import MOST_STEPS
from narrowcast.config.section import Section, check_conflicts

LARGEST = 1e12
"""Of a coefficient: faithfulness is weighed with up to 1e7."""
EPSILON = 1e-12
"""Added to an importance: 0 to a power below 1 has no finite slope. As published."""


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
        """Raise for settings of an unused term, unless its coefficient is set to none."""
        if "coefficient" in self.model_fields_set:
            return self
        fields = type(self).model_fields
        changed = [
            name
            for name, field in fields.items()
            if name != "coefficient" and getattr(self, name) != field.default
        ]
        if self.coefficient is None and changed:
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


class MinimalityTerm(Annealed):
    """Sum of importances to a power."""

    p: float = Field(default=1.0, gt=0, le=16, description="power of the importances")
    p_final: float | None = Field(
        default=None, gt=0, le=16, description="value of p at the end; none: constant"
    )
    epsilon: float = Field(
        default=EPSILON, gt=0, lt=1, description="added to importances; bounds their gradient"
    )


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


class LossesSection(Section):
    """The loss: every term with a coefficient."""

    faithfulness: Term = Field(default_factory=Term, description="weight residual of components")
    minimality: MinimalityTerm = Field(
        default_factory=MinimalityTerm, description="sum of importances to a power"
    )
    smooth_l0: SmoothL0Term = Field(
        default_factory=SmoothL0Term, description="smooth count of important components"
    )
    stochastic: MaskedTerm = Field(
        default_factory=MaskedTerm, description="outputs with random masks"
    )
    stochastic_layerwise: LayerwiseTerm = Field(
        default_factory=LayerwiseTerm, description="the same, one site at a time"
    )
    stochastic_subset: SubsetTerm = Field(
        default_factory=SubsetTerm, description="the same, random sites at each position"
    )
    importance_masked: MaskedTerm = Field(
        default_factory=MaskedTerm,
        description="outputs with importances as masks",
    )
    importance_masked_layerwise: LayerwiseTerm = Field(
        default_factory=LayerwiseTerm, description="the same, one site at a time"
    )
    importance_masked_subset: SubsetTerm = Field(
        default_factory=SubsetTerm, description="the same, random sites at each position"
    )
    unmasked: MaskedTerm = Field(
        default_factory=MaskedTerm, description="outputs with all components and no residual"
    )
    hidden_activations: MaskedTerm = Field(
        default_factory=MaskedTerm, description="inputs of sites with random masks"
    )
    pgd: PGDTerm = Field(
        default_factory=PGDTerm, description="outputs with adversarial masks (PGD)"
    )
    pgd_layerwise: PGDLayerwiseTerm = Field(
        default_factory=PGDLayerwiseTerm, description="the same, one site at a time"
    )
    pgd_subset: PGDSubsetTerm = Field(
        default_factory=PGDSubsetTerm, description="the same, random sites at each position"
    )
    persistent_pgd: PersistentTerm = Field(
        default_factory=PersistentTerm,
        description="outputs with persistent adversarial masks",
    )
    persistent_pgd_subset: PersistentSubsetTerm = Field(
        default_factory=PersistentSubsetTerm, description="the same, random sites at each position"
    )

    @model_validator(mode="after")
    def _is_a_loss(self) -> Self:
        if not self.chosen:
            text = "no loss has a coefficient; write e.g. losses.stochastic.coefficient=1"
            check_conflicts([(("stochastic",), text)])
        return self

    @property
    def chosen(self) -> dict[str, Term]:
        """The terms of the total by name."""
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
