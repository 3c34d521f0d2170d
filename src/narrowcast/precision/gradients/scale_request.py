"""The loss scales that were asked for, and those that a policy then has."""

from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import nn

from narrowcast.errors import ConfigError
from narrowcast.precision.gradients.loss_scale import LossScale
from narrowcast.precision.gradients.loss_scales import Scales
from narrowcast.precision.gradients.scale_groups import find_parts, group_index
from narrowcast.precision.plan.policy import Policy

Settings = LossScale | Mapping[str, LossScale]
RequestedScale = float | LossScale | Mapping[str, float | LossScale]
"""What settings may be written as: a number is the scale to begin with."""


def settings_from(requested: RequestedScale | None) -> Settings | None:
    """Return the settings that somebody has written in one of these ways; refuse any other."""
    if isinstance(requested, Mapping):
        if not requested:
            raise ConfigError("loss_scale names no loss, got {}. Write one scale, or one per loss.")
        return {name: _scale_from(value) for name, value in requested.items()}
    return None if requested is None else _scale_from(requested)


def _scale_from(request: object) -> LossScale:
    if isinstance(request, LossScale):
        return request
    if isinstance(request, int | float) and not isinstance(request, bool):
        return LossScale(init_scale=request)
    instead = "Write a LossScale or the initial scale, or leave it out"
    if isinstance(request, torch.amp.GradScaler):
        instead = (
            "prepare() scales the loss itself, so remove the scaler and its scale(), unscale_(), "
            "step() and update() calls"
        )
        if request.is_enabled():
            instead += (
                f", and write loss_scale=LossScale(init_scale={request.get_scale():g}, "
                f"growth_interval={request.get_growth_interval()}), or nothing for the default"
            )
        else:
            instead += "; for another initial scale write loss_scale=1024.0"
    raise ConfigError(
        f"loss_scale must be a LossScale or a number, got {type(request).__name__}. {instead}."
    )


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
        self._wanted_anyway = False
        """Whether a scale was asked for under a policy that needs none: it stays under all."""
        self.parts = find_parts(model, scale_groups)
        """The modules of each group."""
        self._group_index = [group_index(name, scale_groups) for name in names]

    def first(self, policy: Policy) -> Scales:
        """Return the scales that a run begins with under this policy."""
        self._wanted_anyway = self._settings is not None and not policy.needs_loss_scale
        return _lossless(self._begun(self._settings), policy)

    def next(
        self, policy: Policy, *, scales: Scales, settings: Settings | None, keep: bool
    ) -> Scales:
        """Return the scales after a change of policy: those in force where they can go on.

        Where one begins, it has these settings, or those given before, or the default. `keep` lets
        one go on that the policy does not need.
        """
        if policy.needs_loss_scale and scales.value is None:
            scales = self._begun(settings or self._settings or LossScale())
        elif not (policy.needs_loss_scale or self._wanted_anyway or keep):
            scales = self._begun(None)
        return _lossless(scales, policy)  # needed before and after, or by nobody but asked for

    def _begun(self, settings: Settings | None) -> Scales:
        return Scales(
            settings, parts=self._groups, group_indices=self._group_index, device=self._device
        )


def _lossless(scales: Scales, policy: Policy) -> Scales:
    if scales.per_loss and policy.grads_format == "fp16":
        raise ConfigError(
            "Several loss scales are removed before gradients are added, where fp16 gradients "
            "become zero. Write grads=fp32 in the policy."
        )
    return scales
