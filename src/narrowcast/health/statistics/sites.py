"""One tensor of a model that is looked at."""

from dataclasses import dataclass

from torch import Tensor

from narrowcast.precision.plan.policy import Policy
from narrowcast.precision.plan.roles import OPERANDS, roundings


@dataclass(frozen=True, eq=False)
class TensorSite:
    """One tensor of a model that is looked at: whose it is, what it is rounded to, and a sample."""

    module: str
    role: str
    format: str
    scaling: str
    sample: Tensor
    """All zeros until something has passed."""


def make_site(module: str, role: str, policy: Policy, *, sample: Tensor) -> TensorSite:
    """Return the site of a role of a module that has a policy."""
    rounded_to = roundings(policy, role)[-1]  # what that one loses is lost to the product
    scaling = policy.scaling if role in OPERANDS else "none"
    return TensorSite(module=module, role=role, format=rounded_to, scaling=scaling, sample=sample)
