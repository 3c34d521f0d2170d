"""Reconstruction under the sources that projected gradient ascent finds within the step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from narrowcast.errors import ConfigError
from narrowcast.workloads.decompose.importance.masks import Route
from narrowcast.workloads.decompose.losses.adversary import Adversarial, rising, shapes, split
from narrowcast.workloads.decompose.losses.divergence import wide
from narrowcast.workloads.decompose.losses.terms import Step

Init = Literal["random", "ones", "zeroes"]

BEGINNINGS: dict[Init, Callable[..., Tensor]] = {
    "random": torch.rand,
    "ones": torch.ones,
    "zeroes": torch.zeros,
}


@dataclass(frozen=True, kw_only=True)
class PGD(Adversarial):
    """Sources that begin anew in every step and move by signs of their gradient within [0, 1]."""

    kind: ClassVar[str] = "pgd"
    step_size: float = 1.0
    """How far an ascent moves each source."""
    init: Init = "random"
    """Where sources begin; with `ones`, what components leave included, that is the target, and no
    slope leads away from it."""
    scope: Literal["shared", "per_datapoint"] = "shared"
    """Whether all rows of a batch have one source, or each its own."""

    def check(self) -> None:
        """Refuse a step that goes nowhere."""
        super().check()
        if self.step_size <= 0:
            raise ConfigError(
                f"{self.name}: step_size must be above 0, got {self.step_size}. Write e.g. 0.1."
            )

    def __call__(self, step: Step, ascents: int = 1) -> Tensor:
        """Return the divergence after `ascents` moves of the sources."""
        separate = [self._worst(step, route, ascents) for route in self.routes(step)]
        return torch.stack(separate).mean(0)

    def _worst(self, step: Step, route: Route, ascents: int) -> Tensor:
        values = self._begun(step)
        held = step.hold()
        for _ in range(ascents):
            # Also where somebody only evaluates, without gradients.
            with torch.enable_grad():
                moving = [each.requires_grad_() for each in values]
                grads = rising(self.divergence(held, route, *split(moving, step)), moving)
            values = [
                (each.detach() + self.step_size * grad.sign()).clamp(0, 1)
                for each, grad in zip(moving, grads, strict=True)
            ]
        return self.divergence(step, route, *split(values, step))

    def _begun(self, step: Step) -> list[Tensor]:
        rows = 1 if self.scope == "shared" else step.rows
        like = wide(step.lower[0][0, 0])
        return [
            BEGINNINGS[self.init](shape, device=like.device, dtype=like.dtype)
            for shape in shapes(step, rows)
        ]
