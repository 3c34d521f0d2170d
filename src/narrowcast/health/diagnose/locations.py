"""Places where numbers are looked at: a module and a role, and the largest number it may hold."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from narrowcast.precision.plan.module_plan import ModulePlan, multiplies
from narrowcast.precision.plan.plan import Plan
from narrowcast.precision.plan.roles import GRADIENTS, OPERANDS, Role, roundings

SQUARE_ROOT = 2.0**64 * (1 - 2.0**-24)
"""The largest number whose square fp32 holds. Beyond it a gradient counts as not finite, because
Adam would square it; an activation of that size has lost all neighbours in any sum."""
LARGEST_TO_FP16 = 65519.0
"""From 65520 up, rounding to fp16 gives infinity."""


@dataclass(frozen=True)
class Location:
    """A role of a module; the whole model is named by nothing."""

    module: str
    role: Role
    format: str = ""
    """In force there; nothing where no product is made."""

    @property
    def limit(self) -> float:
        """The largest magnitude that is no reason to worry."""
        # What a product returns is in its format already, and infinite if it does not fit.
        cast_here = self.role in OPERANDS
        return LARGEST_TO_FP16 if cast_here and self.format == "fp16" else SQUARE_ROOT

    @property
    def in_backward(self) -> bool:
        """Whether it is a gradient."""
        return self.role in GRADIENTS

    def __str__(self) -> str:
        """Say it in words."""
        match self.role:
            case "batch":
                return "the batch"
            case "loss":
                return "the loss"
            case _:
                return f"{self.module or 'the model'} {self.role}"


class Formats:
    """The format in force at every place of a planned model."""

    def __init__(self, plan: Plan) -> None:
        self._plans: Mapping[str, ModulePlan] = {each.name: each for each in plan.modules}
        self._policy = plan.policy

    def location(self, module: str, role: Role) -> Location:
        """Return a place, with its format."""
        return Location(module, role, self._format(module, role))

    def use_location(self, module: str) -> Location:
        """Return the place of the gradient that a module makes of a weight, its own or another's.

        What a module without weights multiplies in its own code has the formats of its policy.
        """
        if module in self._plans:
            return self.location(module, "grad_weight")
        policy = self._policy.for_module(module)
        return Location(module, "grad_weight", roundings(policy, "grad_weight")[0])

    def holders(self, model: nn.Module) -> dict[nn.Parameter, str]:
        """Return the module of each weight; of those that share one, the first that multiplies."""
        results: dict[nn.Parameter, str] = {}
        for name, module in model.named_modules():
            for parameter in module.parameters(recurse=False):
                if parameter not in results or not self._multiplies(results[parameter]):
                    results[parameter] = (
                        name if self._multiplies(name) else results.get(parameter, name)
                    )
        return results

    def _multiplies(self, name: str) -> bool:
        module_plan = self._plans.get(name)
        return module_plan is not None and multiplies(module_plan.kind)

    def _format(self, module: str, role: Role) -> str:
        module_plan = self._plans.get(module)
        if module_plan is None:
            return ""
        # The first: what it cannot hold is where a number stops being finite.
        return roundings(module_plan.policy, role, kind=module_plan.kind)[0]


def written(value: float) -> str:
    """Write a magnitude with two digits: 7.1e4, 312."""
    if not math.isfinite(value):
        return "inf"
    if 1e-3 <= abs(value) < 1e4:
        return f"{value:.3g}"
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}"
