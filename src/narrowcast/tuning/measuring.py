"""What every option of every group of layers costs: lost progress, time and memory."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import final

from torch import nn

from narrowcast.errors import ConfigError
from narrowcast.hardware import Hardware
from narrowcast.precision.plan.policy import Policy
from narrowcast.tuning.groups import LayerGroup, LinearLayer, layer_groups, linear_layers, split
from narrowcast.tuning.options import (
    Option,
    Rates,
    faster_options,
    fp8_options,
    group_seconds,
    option_bytes,
    wide_option,
)
from narrowcast.tuning.result import OptionCost
from narrowcast.tuning.updates import UpdateError, UpdateMeter

Progress = Callable[[str], None]

SENSITIVE = 3.0
"""A layer that loses so many times the median of its kind is a group of its own."""
MOST_SENSITIVE = 12
"""Layers that become groups of their own, those that lose most first."""
BACKWARD = ("grad_input", "grad_weight")


@dataclass(frozen=True, kw_only=True)
class MeasuredGroup:
    """A group of layers, its options, and what each of them costs."""

    group: LayerGroup
    options: tuple[Option, ...]
    costs: tuple[OptionCost, ...]

    def cost(self, name: str) -> OptionCost:
        """Return what the option of a name costs."""
        return next(cost for cost in self.costs if cost.name == name)

    def option_under(self, policy: Policy, *, otherwise: str) -> str:
        """Return the option that a policy gives the layers; `otherwise` if it is none of these."""
        wanted = {layer_formats(policy, layer.name) for layer in self.group.layers}
        matching = [option.name for option in self.options if {option.formats} == wanted]
        return matching[0] if matching else otherwise


@final
class GroupMeter:
    """Measures the groups of a model on its batches, for some hardware."""

    def __init__(
        self, model: nn.Module, rates: Rates, meter: UpdateMeter, *, tell: Progress
    ) -> None:
        hardware = rates.hardware
        self._model, self._rates, self._meter, self._tell = model, rates, meter, tell
        self.sixteen = wide_option("fp16" if _has_only_fp16(hardware) else "bf16")
        """The 16-bit format of the hardware."""
        self.wide = [wide_option("fp32")]
        """Formats of 32 bits."""
        if hardware.support("tf32").how == "native":
            self.wide.append(wide_option("tf32"))
        self.names = linear_layers(model, self.sixteen.name, hardware)
        if not self.names:
            raise ConfigError(
                "The model has no linear layer to tune. Choose a preset for its other products, "
                "for example bf16."
            )
        # Without times nothing is chosen in fp8, but its errors are worth a look.
        scalings = rates.scalings() or (() if rates.source else ("tensor",))
        self._eligible = {
            one: frozenset(linear_layers(model, f"fp8-{one}, head=", hardware)) for one in scalings
        }

    def groups(self) -> list[MeasuredGroup]:
        """Return every group with its options and costs."""
        groups = self._screened()
        options = [self._fp8(group) for group in groups]
        passes = [
            len(self.wide) + 3 * len({_stand_in(scaling) for scaling in fp8}) for fp8 in options
        ]
        count = _Count(self._tell, total=sum(passes))
        return [self._measured(*each, count) for each in zip(groups, options, strict=True)]

    def outside(self) -> float:
        """Return what products outside linear layers lose in 16 bits."""
        self._tell("measuring products outside linear layers")
        wide = dict.fromkeys(self.names, "fp32")
        return self._meter.error(self.sixteen.policy.with_exceptions(wide)).lost

    def fits_fp8(self, group: LayerGroup) -> bool:
        """Return whether the layers of a group can be in 8 bits."""
        return any(group.names <= names for names in self._eligible.values())

    def _screened(self) -> list[LayerGroup]:
        """Return the groups, with layers that lose much more than their kind as their own."""
        groups = layer_groups(self._model, self.names)
        several = [group for group in groups if len(group.units) > 1]
        count = _Count(self._tell, total=sum(len(group.units) for group in several))
        outliers: list[tuple[float, LayerGroup, tuple[LinearLayer, ...]]] = []
        for group in several:
            lost = [self._lost_alone(unit, self._narrowest(group), count) for unit in group.units]
            usual = sorted(lost)[(len(lost) - 1) // 2]
            outliers += [
                (value, group, unit)
                for value, unit in zip(lost, group.units, strict=True)
                if value > SENSITIVE * usual
            ]
        outliers.sort(key=lambda each: -each[0])
        return [
            part
            for group in groups
            for part in split(
                group, [unit for _, whole, unit in outliers[:MOST_SENSITIVE] if whole is group]
            )
        ]

    def _lost_alone(self, unit: tuple[LinearLayer, ...], option: Option, count: "_Count") -> float:
        count.next(f"looking for sensitive layers: {unit[0].name}")
        return self._meter.error(_alone((layer.name for layer in unit), option), batches=1).lost

    def _narrowest(self, group: LayerGroup) -> Option:
        for scaling, names in self._eligible.items():
            if group.names <= names:
                return fp8_options(scaling)[-1]
        return self.sixteen

    def _fp8(self, group: LayerGroup) -> dict[str, list[Option]]:
        """Return the fp8 options of a group that gain time, by scaling; all without times."""
        result = {}
        for scaling, names in self._eligible.items():
            options = fp8_options(scaling) if group.names <= names else []
            if self._rates.source:
                options = faster_options(group, options, self._rates, wide=self.sixteen)
            if options:
                result[scaling] = options
        return result

    def _measured(
        self, group: LayerGroup, fp8: dict[str, list[Option]], count: "_Count"
    ) -> MeasuredGroup:
        """Measure the update under every option of a group."""
        errors = {"fp32": UpdateError(relative=0.0, cosine=1.0)}
        for option in (*self.wide[1:], self.sixteen):
            count.next(f"{group.label} in {option.name}")
            errors[option.name] = self._meter.error(_alone(group.names, option))
        costs = [
            self._cost(group, option, lost=errors[option.name].lost, error=errors[option.name])
            for option in (*self.wide, self.sixteen)
        ]
        shares: dict[str, dict[str, float]] = {}
        for scaling, some in fp8.items():
            alike = _stand_in(scaling)
            if alike not in shares:
                shares[alike] = self._shares(group, alike, count)
            for option in some:
                lost = {role: shares[alike][role] for role in option.narrow_products}
                costs.append(self._cost(group, option, lost=sum(lost.values()), by_product=lost))
        options = (*self.wide, self.sixteen, *(each for those in fp8.values() for each in those))
        return MeasuredGroup(group=group, options=options, costs=tuple(costs))

    def _shares(self, group: LayerGroup, scaling: str, count: "_Count") -> dict[str, float]:
        """Return what each product loses in 8 bits; those of the backward pass beside forward.

        Tensor cores have no 8-bit backward product without an 8-bit forward one.
        """
        forward, *both = fp8_options(scaling)[:3]
        count.next(f"{group.label} in {forward.name}")
        first = self._meter.error(_alone(group.names, forward)).lost
        shares = {"forward": first}
        for role, option in zip(BACKWARD, both, strict=True):
            count.next(f"{group.label} in {option.name}")
            lost = self._meter.error(_alone(group.names, option)).lost
            shares[role] = max(lost - first, 0.0) if first < math.inf else math.inf
        return shares

    def _cost(
        self,
        group: LayerGroup,
        option: Option,
        *,
        lost: float,
        error: UpdateError | None = None,
        by_product: dict[str, float] | None = None,
    ) -> OptionCost:
        return OptionCost(
            name=option.name,
            lost=lost,
            seconds=group_seconds(group, option, self._rates),
            bytes=option_bytes(group, option, rows=self._rates.rows, params="fp32"),
            error=error,
            by_product=by_product or {},
        )


@dataclass
class _Count:
    """Counts passes, so that progress says how many are left."""

    tell: Progress
    total: int
    done: int = 0

    def next(self, what: str) -> None:
        """Say what is measured next."""
        self.done += 1
        self.tell(f"{self.done} of {self.total}: {what}")


def layer_formats(policy: Policy, name: str) -> tuple[str, ...]:
    """Return the formats of a layer's products and its scaling under a policy."""
    own = policy.for_module(name)
    return own.forward, own.grad_input, own.grad_weight, own.scaling


def _alone(names: Iterable[str], option: Option) -> Policy:
    """Return fp32 with an exception for some layers."""
    return Policy().with_exceptions(dict.fromkeys(names, option.roles))


def _stand_in(scaling: str) -> str:
    """Return the scaling whose error is measured: delayed scales follow those of the tensor."""
    return "tensor" if scaling == "delayed" else scaling


def _has_only_fp16(hardware: Hardware) -> bool:
    native = {name: hardware.support(name).how == "native" for name in ("bf16", "fp16")}
    return native["fp16"] and not native["bf16"]
