"""What becomes of a frozen weight that is kept in e4m3: multiplied as it is, or widened first."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from narrowcast.hardware import Speeds
from narrowcast.precision.plan.folding import decibel_range
from narrowcast.precision.plan.gains import in_one_format
from narrowcast.precision.plan.policy import FP8_FORMATS, Policy
from narrowcast.precision.quantized_frozen import QuantizedFrozenInfo, QuantizedFrozenLayer

SCALING: Final = "row"
"""How a kept weight is scaled, and so what is multiplied by it."""


@dataclass(frozen=True, kw_only=True)
class QuantizedFrozenPlan:
    """How one module keeps its weight, and what that has lost."""

    format: str = "e4m3"
    snr_db: float | None
    """None where nobody has measured it, ∞ where nothing was lost."""
    widened: bool
    """Whether products have it in a wider format, made of the bytes for each of them."""

    @classmethod
    def of(cls, module: QuantizedFrozenLayer, policy: Policy) -> "QuantizedFrozenPlan":
        """Return the plan of a module whose products have this policy."""
        return cls(snr_db=module.quantized.snr_db, widened=policy.forward not in FP8_FORMATS)

    def to_json(self) -> dict[str, Any]:
        """Return plain data; the loss of a weight that lost nothing is null."""
        lossless = self.snr_db is None or self.snr_db == float("inf")
        return {
            "format": self.format,
            "snr_db": None if lossless else self.snr_db,
            "widened": self.widened,
        }


def frozen_product_policy(policy: Policy, stored: QuantizedFrozenInfo) -> Policy:
    """Return the policy of a kept weight's products: row scales, and in fp8 or not as asked."""
    narrow = policy.forward in FP8_FORMATS
    if stored.products == "wide" or policy.forward not in ("e4m3", "bf16", "fp16", "fp32", "tf32"):
        return in_one_format(policy, policy.functional)
    if stored.products == "fp8" and not narrow:
        return replace(
            policy,
            forward="e4m3",
            output="",
            grad_input="e5m2",
            grad_weight="e5m2",
            scaling=SCALING,
            accumulator="fast",
        )
    return replace(policy, scaling=SCALING) if narrow else policy


def relative_speed(
    module: QuantizedFrozenLayer, policy: Policy, speeds: Speeds | None, *, rows: int
) -> tuple[float | None, str]:
    """Return how fast a kept weight's products are beside those of a bf16 weight, and a word."""
    kind = "frozen-row" if policy.forward in FP8_FORMATS else "frozen-wide"
    outputs, inputs = module.weight_e4m3.shape
    gain = None
    if speeds is not None:
        gain = speeds.gain(kind, tokens=rows, inputs=inputs, outputs=outputs, against="frozen-bf16")
    if gain is None:
        return None, "speed not measured here"
    return gain, f"{gain:.2f} × a bf16 weight at {rows}×{inputs}×{outputs}"


def describe_loss(alike: Sequence[QuantizedFrozenPlan | None]) -> str:
    """Return what the weights of some modules have lost."""
    matches = [each.snr_db for each in alike if each is not None]
    return decibel_range([value for value in matches if value is not None])
