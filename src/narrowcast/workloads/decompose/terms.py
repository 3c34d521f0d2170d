"""The `losses` section of a recipe: every term; it counts where it has a coefficient."""

from typing import Literal, Self

from pydantic import Field, model_validator

from narrowcast.config.limits import MOST_STEPS
from narrowcast.config.section import Section, check_conflicts

LARGEST = 1e12
"""Of a coefficient: faithfulness is weighed with up to 1e7."""
EPSILON = 1e-12
"""Added to an importance: 0 to a power below 1 has no finite slope. As published."""


class Term(Section):
    """A term of the loss, which is part of it where it has a coefficient."""

    coefficient: float | None = Field(
        default=None, gt=0, le=LARGEST, description="its weight in the loss; none: left out"
    )

    @model_validator(mode="after")
    def _is_weighed(self) -> Self:
        """Refuse settings of a term that is not there, unless somebody wrote that it is not."""
        if "coefficient" in self.model_fields_set:
            return self
        fields = type(self).model_fields
        changed = [
            name
            for name, field in fields.items()
            if name != "coefficient" and getattr(self, name) != field.default
        ]
        if self.coefficient is None and changed:
            text = "this loss has no coefficient, so it is left out; write its coefficient"
            check_conflicts([((name, "coefficient"), text) for name in changed[:1]])
        return self


class Annealed(Term):
    """A penalty of importances that changes its shape in the course of the run."""

    anneal_from: float = Field(default=0.0, ge=0, lt=1, description="share of the run it begins at")
    anneal_to: float = Field(default=1.0, gt=0, le=1, description="share of the run it ends at")
    beta: float = Field(
        default=0.0, ge=0, le=LARGEST, description="weight of the frequency of a component in it"
    )
    reference_rows: int | None = Field(
        default=None, ge=1, le=MOST_STEPS, description="rows that frequencies are counted in"
    )


class MinimalityTerm(Annealed):
    """Importances to a power."""

    p: float = Field(default=1.0, gt=0, le=16, description="the power")
    p_final: float | None = Field(default=None, gt=0, le=16, description="what it becomes")
    epsilon: float = Field(
        default=EPSILON, gt=0, lt=1, description="added to importances first: bounds their slope"
    )


class SmoothL0Term(Annealed):
    """How many importances are well above a width."""

    gamma: float = Field(default=1.0, gt=0, le=1e3, description="the width")
    gamma_final: float = Field(default=0.01, gt=0, le=1e3, description="what it becomes")


class MaskedTerm(Term):
    """A term of masked passes."""

    recompute: bool = Field(
        default=False, description="compute passes again in the backward pass: less memory"
    )


class LayerwiseTerm(MaskedTerm):
    """One pass for each site."""

    batched: bool | None = Field(
        default=False,
        description="all of them as one pass of a larger batch; null: where there are kernels",
    )


class SubsetTerm(MaskedTerm):
    """One pass, in which a random subset of sites computes with components at each position."""

    routing: Literal["uniform_k_subset", "static_probability"] = Field(
        default="uniform_k_subset", description="how subsets are drawn"
    )
    probability: float | None = Field(
        default=None, gt=0, le=1, description="of each site (routing=static_probability)"
    )


class Budget(Section):
    """How hard an adversary looks."""

    steps: int = Field(default=1, ge=1, le=10_000, description="steps of the adversary")
    early_steps: int | None = Field(
        default=None, ge=1, le=10_000, description="fewer of them early in the run"
    )
    early_until: float = Field(default=0.0, ge=0, lt=1, description="share of the run that is")
    every: int = Field(
        default=1, ge=1, le=MOST_STEPS, description="the term is part of every so manieth step"
    )


class PGDBudget(Budget):
    """An adversary that begins anew in every step."""

    step_size: float = Field(default=1.0, gt=0, le=1, description="how far a step goes")
    init: Literal["random", "ones", "zeroes"] = Field(default="random", description="where from")
    scope: Literal["shared", "per_datapoint"] = Field(
        default="shared", description="one mask for a batch, or one for each position"
    )


class PersistentBudget(Budget):
    """An adversary that goes on from step to step."""

    optimizer: Literal["adam", "sign"] = Field(default="adam", description="how it moves")
    lr: float = Field(default=0.01, gt=0, le=1e3, description="how far a step goes")
    beta1: float = Field(default=0.5, ge=0, lt=1, description="of Adam")
    beta2: float = Field(default=0.99, ge=0, lt=1, description="of Adam")
    scope: Literal["single", "broadcast_across_batch", "repeat_across_batch", "per_position"] = (
        Field(default="single", description="who shares a mask: all, a position in all texts, …")
    )
    repeat: int = Field(default=1, ge=1, le=MOST_STEPS, description="of repeat_across_batch")
    sigmoid: bool = Field(default=False, description="masks as the sigmoid of what moves")


class PGDTerm(MaskedTerm, PGDBudget):
    """All sites, under the worst masks found."""


class PGDLayerwiseTerm(LayerwiseTerm, PGDBudget):
    """One site at a time, under the worst masks found."""


class PGDSubsetTerm(SubsetTerm, PGDBudget):
    """Random subsets of sites, under the worst masks found."""


class PersistentTerm(MaskedTerm, PersistentBudget):
    """All sites, under masks that go on getting worse."""


class PersistentSubsetTerm(SubsetTerm, PersistentBudget):
    """Random subsets of sites, under masks that go on getting worse."""


class LossesSection(Section):
    """The loss: every term with a coefficient."""

    faithfulness: Term = Field(default_factory=Term, description="what components leave of weights")
    minimality: MinimalityTerm = Field(
        default_factory=MinimalityTerm, description="importances to a power, summed"
    )
    smooth_l0: SmoothL0Term = Field(
        default_factory=SmoothL0Term, description="how many importances are well above 0"
    )
    stochastic: MaskedTerm = Field(
        default_factory=MaskedTerm, description="outputs under masks drawn at random"
    )
    stochastic_layerwise: LayerwiseTerm = Field(
        default_factory=LayerwiseTerm, description="the same, one site at a time"
    )
    stochastic_subset: SubsetTerm = Field(
        default_factory=SubsetTerm, description="the same, random sites at each position"
    )
    importance_masked: MaskedTerm = Field(
        default_factory=MaskedTerm,
        description="outputs under importances as masks",
    )
    importance_masked_layerwise: LayerwiseTerm = Field(
        default_factory=LayerwiseTerm, description="the same, one site at a time"
    )
    importance_masked_subset: SubsetTerm = Field(
        default_factory=SubsetTerm, description="the same, random sites at each position"
    )
    unmasked: MaskedTerm = Field(
        default_factory=MaskedTerm, description="outputs of the sums of components"
    )
    hidden_activations: MaskedTerm = Field(
        default_factory=MaskedTerm, description="inputs of sites under masks drawn at random"
    )
    pgd: PGDTerm = Field(default_factory=PGDTerm, description="outputs under the worst masks found")
    pgd_layerwise: PGDLayerwiseTerm = Field(
        default_factory=PGDLayerwiseTerm, description="the same, one site at a time"
    )
    pgd_subset: PGDSubsetTerm = Field(
        default_factory=PGDSubsetTerm, description="the same, random sites at each position"
    )
    persistent_pgd: PersistentTerm = Field(
        default_factory=PersistentTerm,
        description="outputs under masks that go on getting worse",
    )
    persistent_pgd_subset: PersistentSubsetTerm = Field(
        default_factory=PersistentSubsetTerm, description="the same, random sites at each position"
    )

    @model_validator(mode="after")
    def _is_a_loss(self) -> Self:
        """Refuse a loss without terms."""
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
