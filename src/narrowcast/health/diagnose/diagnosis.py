"""A verdict: the first number of a step that was not finite, in words that name its place."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from narrowcast.health.diagnose.inputs import Extreme, Location, written
from narrowcast.precision.plan.policy import Policy
from narrowcast.precision.plan.wording import Wording


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """What makes the step finite: a smaller loss scale or a policy; neither if not tried."""

    scale: Literal["", "gives way", "too high"] = ""
    """A scale that is too high moves by itself, unless it is a static one."""
    policy: Policy | None = None
    exceptions: Mapping[str, str] = field(default_factory=dict)
    """All that the policy has and the one in force has not; empty if more is another."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Diagnosis:
    """Where the first bad value of a step appeared, and what helps. Prints as a sentence."""

    location: Location
    amax: float
    """Largest magnitude there: inf, NaN, or finite and too large."""
    micro_batch: int
    """Counted from 1."""
    micro_batches: int
    rank: int | None = None
    """The rank of that micro-batch, if several share the weights and not all saw a bad value."""
    evidence: str = ""
    """What the values around it were."""
    extreme: Extreme | None = None
    """The first bad value of the batch, if the input data is the cause."""
    neighbour: str | None = None
    """The module checked just before."""
    remedy: Remedy | None = None
    """A change that makes the step finite; None if none was found."""
    wording: Wording = field(default_factory=Wording)
    """Whether advice names recipe settings or Python arguments."""

    def __str__(self) -> str:
        return self.sentence

    def __repr__(self) -> str:
        return f"<Diagnosis: {self.sentence}>"

    def has_same_location(self, other: "Diagnosis") -> bool:
        """Return whether both name the same place and micro-batch."""
        return (self.location.module, self.location.role, self.micro_batch) == (
            other.location.module,
            other.location.role,
            other.micro_batch,
        )

    @property
    def sample(self) -> int | None:
        """Index of the first bad sample, if the input data is the cause."""
        return None if self.extreme is None else self.extreme.sample

    @property
    def module(self) -> str:
        """Name of the module; empty for the model itself."""
        return self.location.module

    @property
    def role(self) -> str:
        """`batch`, `input`, `weight`, `output`, `loss`, `grad_output` or `grad_weight`."""
        return self.location.role

    @property
    def kind(self) -> Literal["nan", "inf", "large"]:
        """`nan`, `inf`, or `large`: finite, but too large for its format or its square."""
        if math.isnan(self.amax):
            return "nan"
        return "inf" if math.isinf(self.amax) else "large"

    @property
    def phase(self) -> Literal["forward", "backward"]:
        """The pass in which it happened."""
        return "backward" if self.location.in_backward else "forward"

    @property
    def origin(self) -> Literal["data", "model"]:
        """Whether the data or the model is the cause."""
        return "data" if self.location.role == "batch" else "model"

    @property
    def what(self) -> str:
        """Short name of the problem."""
        if self.kind == "nan":
            return "NaN"
        if self.origin == "data" and self.kind == "large":
            return "huge number"
        return "overflow" if self.location.role not in ("batch", "weight") else "infinity"

    @property
    def outgrew_format(self) -> bool:
        """Whether a format with more range would have held the value."""
        if self.location.format != "fp16" or self.kind == "nan":
            return False
        return self.kind == "large" or self.location.role != "weight"

    @property
    def overflowed_at(self) -> tuple[str, str] | None:
        """The module that a wider format helps, and the role that overflowed."""
        if not self.outgrew_format or self.remedy is None:
            return None
        return next(iter(self.remedy.exceptions), self.module), self.role

    @property
    def where(self) -> str:
        """The place and the micro-batch."""
        return f"{self.location}, {self._turn}"

    @property
    def sentence(self) -> str:
        """One sentence: where, what, how large, and the values around it."""
        if self.extreme is not None:
            return f"{self.extreme.describe} ({self._turn})"
        size = "" if self.kind == "nan" else f"amax {written(self.amax)}, "
        tail = f"; {self.evidence}" if self.evidence else ""
        return f"{self.location} {self._verb} ({size}{self._turn}){tail}"

    def advice(self, *, loss_scale: float | None = None) -> str:
        """Return what its owner may try; with a loss scale of one, nothing is left to that."""
        if self.extreme is not None:
            return f"look at {self.extreme.where}: no format can help"
        if self.location.role == "weight" and self.remedy is None:
            return "the weights were bad before the step: restore an earlier checkpoint"
        gives_way = loss_scale is None or loss_scale > 1
        match self.remedy:
            case Remedy(policy=Policy() as policy, scale=scale, exceptions=exceptions):
                terms = self.wording
                tried = terms.formats(exceptions) if exceptions else terms.whole(policy)
                lower = " and a lower loss scale" if scale else ""
                return f"try {tried}: with it{lower} this step is finite. Or {self._calmer}"
            case Remedy(scale="gives way") if gives_way:
                return "the loss scale was too high for this gradient, and backs off by itself"
            case Remedy(scale="too high"):
                smaller = self.wording.loss_scale("init_scale")
                return f"the loss scale is too high for this gradient: write a smaller {smaller}"
            case Remedy():
                return (
                    f"try a wider format for {self.location.module or 'the model'}, {self._calmer}"
                )
        if self.location.role == "loss":
            return "no format helps: check the loss for a logarithm or division of 0"
        return f"no format helps: try {self._calmer}, or check the data"

    @property
    def _calmer(self) -> str:
        return f"a lower {self.wording.lr}, or {self.wording.clip}"

    @property
    def _turn(self) -> str:
        rank = "" if self.rank is None else f" on rank {self.rank}"
        return f"micro-batch {self.micro_batch} of {self.micro_batches}{rank}"

    @property
    def _verb(self) -> str:
        if self.kind == "nan":
            return "became NaN" if self.location.role != "weight" else "is NaN"
        if self.location.role == "weight" and self.kind == "inf":
            return "is infinite"
        if self.kind == "large" and self.amax > self._holds:
            return f"overflowed {self.location.format}"
        if self.kind == "large":
            return "grew beyond what fp32 can square"
        return f"overflowed {self.location.format}" if self.location.format else "became infinite"

    @property
    def _holds(self) -> float:
        return self.location.limit if self.location.format == "fp16" else math.inf
