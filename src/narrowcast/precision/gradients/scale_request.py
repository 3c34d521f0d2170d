"""The loss scales that were asked for, and those that a policy then has."""

from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import nn

from narrowcast.errors import RecipeError
from narrowcast.precision.gradients.loss_scale import LossScale
from narrowcast.precision.gradients.loss_scales import Scales
from narrowcast.precision.gradients.scale_groups import find_parts, part_of
from narrowcast.precision.plan.policy import Policy

Settings = LossScale | Mapping[str, LossScale]


@final
class ScaleRequest:
    """What `prepare` was told of loss scales, and which weights it is about."""

    def __init__(
        self,
        model: nn.Module,
        *,
        settings: Settings | None,
        scale_groups: Sequence[str],
        names: Sequence[str],
        device: torch.device,
    ) -> None:
        self._settings, self._groups, self._device = settings, scale_groups, device
        self.parts = find_parts(model, scale_groups)
        """The modules of each group."""
        self._part_of = [part_of(name, scale_groups) for name in names]

    def first(self, policy: Policy) -> Scales:
        """Return the scales that a run begins with under this policy."""
        return _lossless(self._begun(self._settings), policy)

    def next(
        self, policy: Policy, *, before: Policy, scales: Scales, settings: Settings | None
    ) -> Scales:
        """Return the scales after a change of policy: those in force where they can go on.

        Where one begins, it has these settings, or those given before, or the default.
        """
        if policy.needs_loss_scale and scales.value is None:
            scales = self._begun(settings or self._settings or LossScale())
        elif not policy.needs_loss_scale and before.needs_loss_scale:
            scales = self._begun(None)
        return _lossless(scales, policy)  # needed before and after, or by nobody but asked for

    def _begun(self, settings: Settings | None) -> Scales:
        return Scales(settings, parts=self._groups, part_of=self._part_of, device=self._device)


def _lossless(scales: Scales, policy: Policy) -> Scales:
    if scales.per_loss and policy.grads_format == "fp16":
        raise RecipeError(
            "several loss scales are divided out before the gradients are added, and fp16 "
            "gradients would vanish there; write grads=fp32 in the policy"
        )
    return scales
