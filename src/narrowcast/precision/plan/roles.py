"""Roles: the tensors of a module that have a format, and which formats they are rounded to."""

from typing import Literal

from narrowcast.precision.plan.module_plan import Kind, multiplies
from narrowcast.precision.plan.policy import Policy

Role = Literal["batch", "input", "weight", "output", "loss", "grad_output", "grad_weight", "update"]
ROLES: tuple[Role, ...] = ("input", "weight", "output", "grad_output", "grad_weight")
"""Those that a module has, in the order in which a step comes by them."""
OPERANDS: tuple[Role, ...] = ("input", "weight", "grad_output")
"""Those that a product takes, and so casts: in 8 bits they have a scale."""
GRADIENTS: frozenset[str] = frozenset({"grad_output", "grad_weight"})
"""Those of the backward pass."""


def roundings(policy: Policy, role: str, *, kind: Kind = "linear") -> tuple[str, ...]:
    """Return the formats that a role's tensor is rounded to in a module, one after the other.

    What is too large for the first is not finite from there on; what the last one loses, the
    product, or whoever keeps the tensor, does without.
    """
    if not multiplies(kind):
        return (policy.params if kind == "embedding" else policy.reduce,)
    match role:
        case "input" | "weight":
            return (policy.forward,)
        case "output":
            return (policy.output_format,)
        case "grad_output":
            # What comes back has the format of what went out. The operand made of it is in this
            # format in the product for the input's gradient, and in `policy.grad_weight` in that
            # for the weight's.
            return (policy.output_format, policy.grad_input)
        case "grad_weight":
            # As the product returns it, and as it is kept.
            return (policy.output_format, policy.grads_format)
        case "update":
            return (policy.params,)
        case _:
            raise AssertionError(f"a module has no {role}")
