"""Roles: the tensors of a module that have a format."""

from typing import Literal

Role = Literal["batch", "input", "weight", "output", "loss", "grad_output", "grad_weight"]
ROLES: tuple[Role, ...] = ("input", "weight", "output", "grad_output", "grad_weight")
"""Those that a module has."""
