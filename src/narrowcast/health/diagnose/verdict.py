"""A verdict: the first number of a step that was not finite, in words that name its place."""

import math
from dataclasses import dataclass
from typing import Literal

from narrowcast.health.diagnose.places import Place


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Where a step went wrong first."""

    place: Place
    amax: float
    """The largest magnitude there; infinite, NaN, or finite and too large."""
    micro_batch: int
    """From one on."""
    micro_batches: int
    evidence: str = ""
    """What was seen around it."""
    sample: int | None = None
    """The first bad sample, where the batch itself is to blame."""

    @property
    def module(self) -> str:
        """The module; nothing for the model as a whole."""
        return self.place.module

    @property
    def role(self) -> str:
        """`batch`, `input`, `weight`, `output`, `loss`, `grad_output` or `grad_weight`."""
        return self.place.role

    @property
    def kind(self) -> Literal["nan", "inf", "large"]:
        """NaN, infinite, or finite but more than its format, or a square, can hold."""
        if math.isnan(self.amax):
            return "nan"
        return "inf" if math.isinf(self.amax) else "large"

    @property
    def phase(self) -> Literal["forward", "backward"]:
        """The pass it happened in."""
        return "backward" if self.place.in_backward else "forward"

    @property
    def origin(self) -> Literal["data", "model"]:
        """Whose fault it is."""
        return "data" if self.place.role == "batch" else "model"

    @property
    def what(self) -> str:
        """What it is, in a word or two."""
        if self.kind == "nan":
            return "NaN"
        return "overflow" if self.place.role not in ("batch", "weight") else "infinity"

    @property
    def outgrew_format(self) -> bool:
        """Whether a format of more range would have held it; of a NaN nobody knows."""
        if self.place.format != "fp16" or self.kind == "nan":
            return False
        return self.kind == "large" or self.place.role != "weight"

    @property
    def where(self) -> str:
        """The place and the micro-batch."""
        return f"{self.place}, {self._turn}"

    @property
    def told(self) -> str:
        """One sentence: where, what, how large, and what was seen around it."""
        if self.sample is not None:
            what = "a NaN" if self.kind == "nan" else "an infinity"
            return f"the batch itself holds {what} at index {self.sample} ({self._turn})"
        size = "" if self.kind == "nan" else f"amax {written(self.amax)}, "
        tail = f"; {self.evidence}" if self.evidence else ""
        return f"{self.place} {self._verb} ({size}{self._turn}){tail}"

    def advice(self, *, loss_scale: float) -> str:
        """Say what its owner may try."""
        if self.origin == "data":
            return f"look at sample {self.sample} of that batch: no format can help"
        if self.place.role == "weight":
            return "the weights were bad before the step: resume from an earlier checkpoint"
        narrow = self.place.format == "fp16"
        if narrow and self.phase == "backward" and self.kind != "nan" and loss_scale > 1:
            return "the loss scale was too high for this gradient, and gives way by itself"
        calmer = "a lower optimizer.lr, or a lower clip_norm"
        if self.place.format in ("", "fp32"):
            return f"try {calmer}"
        wider = "bf16" if narrow else "fp32"
        return f'try precision.overrides={{"{self.module or "*"}": {wider}}}, {calmer}'

    @property
    def _turn(self) -> str:
        return f"micro-batch {self.micro_batch} of {self.micro_batches}"

    @property
    def _verb(self) -> str:
        if self.kind == "nan":
            return "became NaN" if self.place.role != "weight" else "is NaN"
        if self.place.role == "weight" and self.kind == "inf":
            return "is infinite"
        if self.kind == "large" and self.amax > self._holds:
            return f"overflowed {self.place.format}"
        if self.kind == "large":
            return "grew beyond what fp32 can square"
        return f"overflowed {self.place.format}" if self.place.format else "became infinite"

    @property
    def _holds(self) -> float:
        return self.place.limit if self.place.format == "fp16" else math.inf


def written(value: float) -> str:
    """Write a magnitude with two digits: 7.1e4, 312."""
    if not math.isfinite(value):
        return "inf"
    if 1e-3 <= value < 1e4:
        return f"{value:.3g}"
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}"
