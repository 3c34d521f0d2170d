"""A plan carried out on a model, and how another takes its place between two steps."""

from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import nn

from narrowcast.errors import RecipeError
from narrowcast.precision.fp8.state import Fp8Model
from narrowcast.precision.gradients.loss_scale import LossScale
from narrowcast.precision.gradients.loss_scales import Scales
from narrowcast.precision.gradients.scale_groups import find_parts, part_of, scale_parts
from narrowcast.precision.plan.plan import Plan
from narrowcast.precision.plan.policy import Policy
from narrowcast.precision.products.regions import Region
from narrowcast.precision.step.checks import refuse_foreign_plan, refuse_watched
from narrowcast.precision.weights.trained import TrainedWeights
from narrowcast.precision.weights.update_path import update_path

Settings = LossScale | Mapping[str, LossScale]


@final
class Carried:
    """What is in force: the weights as they are kept, the loss scales, the fp8 side, the update."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        chosen: Plan,
        *,
        loss_scale: Settings | None,
        scale_groups: Sequence[str],
        one_pass: bool | None,
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._settings, self._scaled_parts, self._asked = loss_scale, scale_groups, one_pass
        self.weights = TrainedWeights(model, optimizer)
        # What can be refused is refused before anything is changed.
        self._parts = find_parts(model, scale_groups)
        self.scales = self._begun_scales(loss_scale)
        _refuse_lost_gradients(self.scales, chosen.policy)
        in_one_pass, self.update_path = update_path(optimizer, chosen.policy, asked=one_pass)
        self.plan, self.region = chosen, Region.of(chosen)
        self.weights.narrow(chosen, one_pass=in_one_pass)
        self.fp8 = Fp8Model(model)
        scale_parts(self._parts, self.scales.parts)

    def change(self, chosen: Plan, *, loss_scale: Settings | None, seed: int) -> None:
        """Put another plan in the place of the one in force. Waits for the device.

        What cannot be is refused before anything is changed. A loss scale that both policies need
        goes on; one that begins has the settings given here, or those given before, or the default.
        Histories of delayed scaling go on where a module of the same name had one.
        """
        refuse_watched(self._model, doing="change()")
        in_one_pass, path, scales = self.terms(chosen, loss_scale=loss_scale)
        before = self.fp8
        self.weights.change(self.plan, chosen, one_pass=in_one_pass, seed=seed)
        self.plan, self.region = chosen, Region.of(chosen)
        self.scales, self.update_path = scales, path
        self.fp8 = Fp8Model(self._model)
        self.fp8.take_over(before)
        scale_parts(self._parts, scales.parts)

    def terms(
        self, chosen: Plan, *, loss_scale: Settings | None = None
    ) -> tuple[bool, str, Scales]:
        """Return whether the update would be in one pass, and why, and the loss scales; or refuse.

        Changes nothing.
        """
        refuse_foreign_plan(self._model, chosen, mine=self.plan)
        in_one_pass, path = update_path(self._optimizer, chosen.policy, asked=self._asked)
        scales = self._scales_under(chosen.policy, loss_scale)
        _refuse_lost_gradients(scales, chosen.policy)
        return in_one_pass, path, scales

    @property
    def decides_on_device(self) -> bool:
        """Whether the update skips by itself.

        Any other must be told by the host, which costs nothing on a CPU and one wait a step on a
        GPU.
        """
        fused = bool(getattr(self._optimizer, "_step_supports_amp_scaling", False))
        on_gpu = self.weights.device.type == "cuda"
        return self.weights.one_pass is not None or (fused and on_gpu)

    def _begun_scales(self, settings: Settings | None) -> Scales:
        return Scales(
            settings,
            parts=self._scaled_parts,
            part_of=[part_of(name, self._scaled_parts) for name in self.weights.names],
            device=self.weights.device,
        )

    def _scales_under(self, policy: Policy, settings: Settings | None) -> Scales:
        if policy.needs_loss_scale and self.scales.value is None:
            return self._begun_scales(settings or self._settings or LossScale())
        if not policy.needs_loss_scale and self.plan.policy.needs_loss_scale:
            return self._begun_scales(None)
        return self.scales  # needed before and after, or by nobody but asked for


def _refuse_lost_gradients(scales: Scales, policy: Policy) -> None:
    if scales.per_loss and policy.grads_format == "fp16":
        raise RecipeError(
            "several loss scales are divided out before the gradients are added, and fp16 "
            "gradients would vanish there; write grads=fp32 in the policy"
        )
