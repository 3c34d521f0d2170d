"""One tensor of a model that is looked at."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Site:
    """One tensor of a model that is looked at: whose it is, what it is rounded to, and a sample."""

    module: str
    role: str
    format: str
    scaling: str
    sample: Tensor
    """All zeros until something has passed."""
