"""Loss scales: powers of two that lift gradients into the range of a narrow format.

The running scale is three small tensors on the device, so no step waits for it. It never reaches
zero, where one good batch would divide by it and write NaN into every weight.

A part with its own scale multiplies the gradients inside it by that scale as well. When gradients
overflow, the part they overflowed in backs off, or the scale of the whole loss if none can.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn

from narrowcast.errors import ConfigError
from narrowcast.precision.gradients.check import Checked
from narrowcast.precision.modules.wrappers import OwnLossScale
from narrowcast.precision.plan.policy import Policy
from narrowcast.precision.swap import swap

# Powers of two that are normal fp32 numbers, as their inverses are.
SMALLEST_POWER, LARGEST_POWER = 2.0**-126, 2.0**126


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """Settings of the dynamic loss scale, named as in `torch.amp.GradScaler`.

    Example:
        >>> nc.prepare(model, optimizer, policy="fp16", loss_scale=nc.LossScale(init_scale=1024))
    """

    init_scale: float = 2.0**16
    """Scale of the first step, rounded down to a power of two, as are the bounds."""
    growth_factor: float = 2.0
    """Factor after `growth_interval` finite steps in a row: a power of two above 1."""
    backoff_factor: float = 0.5
    """Factor after an overflow: a power of two below 1."""
    growth_interval: int = 2000
    """Finite steps in a row before the scale grows."""
    min_scale: float = 1.0
    """The scale shrinks no further. Overflows here are reported, and in the end training stops."""
    max_scale: float = 2.0**18
    """The scale grows no further."""
    hysteresis: int = 1
    """Overflows in a row before the scale shrinks."""
    dynamic: bool = True
    """False: the scale stays at `init_scale`."""

    def __str__(self) -> str:
        """Return how it moves."""
        if not self.dynamic:
            return f"{self.init_scale:g}, static"
        strikes = "an overflow" if self.hysteresis == 1 else f"{self.hysteresis} overflows in a row"
        return (
            f"{self.init_scale:g} at first, from {self.min_scale:g} to {self.max_scale:g}; times "
            f"{self.growth_factor:g} after {self.growth_interval} finite steps, times "
            f"{self.backoff_factor:g} after {strikes}"
        )

    def __post_init__(self) -> None:
        for name in ("init_scale", "growth_factor", "backoff_factor", "min_scale", "max_scale"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(f"loss_scale.{name} must be a number, got {value!r}.")
        _check_factor("growth_factor", self.growth_factor, ends="above 1", least=2)
        _check_factor("backoff_factor", self.backoff_factor, ends="below 1", most=0.5)
        for name in ("init_scale", "min_scale", "max_scale"):
            # Rounded down, so that `max_scale` holds whatever was requested.
            object.__setattr__(self, name, power_of_two_below(getattr(self, name)))
            if not SMALLEST_POWER <= getattr(self, name) <= LARGEST_POWER:
                raise ConfigError(
                    f"loss_scale.{name} must be between {SMALLEST_POWER:g} and {LARGEST_POWER:g}, "
                    f"so that fp32 holds it and its inverse, got {getattr(self, name):g}."
                )
        if not self.min_scale <= self.init_scale <= self.max_scale:
            raise ConfigError(
                "loss_scale.init_scale must lie between min_scale and max_scale, got "
                f"init_scale={self.init_scale:g}, min_scale={self.min_scale:g} and "
                f"max_scale={self.max_scale:g}. Change the one that you did not mean."
            )
        if self.growth_interval < 1 or self.hysteresis < 1:
            raise ConfigError(
                "loss_scale.growth_interval and hysteresis must be at least 1, got "
                f"{self.growth_interval} and {self.hysteresis}."
            )


def _check_factor(
    name: str, value: float, *, ends: str, least: float = 0.0, most: float = math.inf
) -> None:
    """Raise unless a factor is a power of two within its bounds."""
    positive = value > 0 and math.isfinite(value)
    works = min(max(power_of_two_below(value), least), most) if positive else least or most
    if value != works:
        raise ConfigError(
            f"loss_scale.{name} must be a power of two {ends}, so that scaling loses no digits, "
            f"got {value:g}. Write {name}={works:g}."
        )


def power_of_two_below(value: float) -> float:
    """Return the largest power of two that is at most `value`."""
    if not (value > 0 and math.isfinite(value)):
        raise ConfigError(f"A loss scale must be a positive number, got {value}.")
    return math.ldexp(1.0, math.frexp(value)[1] - 1)


class RunningScale:
    """A loss scale in use: its value and its memory, on the device."""

    def __init__(self, settings: LossScale, device: torch.device) -> None:
        self.settings = settings
        self.value = torch.full((), settings.init_scale, dtype=torch.float32, device=device)
        self._calm = torch.zeros((), dtype=torch.int32, device=device)
        self._strikes = torch.zeros((), dtype=torch.int32, device=device)

    @property
    def can_give_way(self) -> Tensor:
        """Whether an overflow would still move the scale, now or after more of them."""
        lowest = self.settings.min_scale if self.settings.dynamic else self.settings.init_scale
        return self.value > lowest

    def update(self, finite: Tensor) -> None:
        """Move the scale after a step whose gradients were finite, or not. Does not wait."""
        if not self.settings.dynamic:
            return
        s = self.settings
        # In place: a captured step reads and writes the same memory whenever it is replayed.
        self._strikes.copy_(torch.where(finite, 0, self._strikes + 1))
        calm = torch.where(finite, self._calm + 1, 0)
        back_off = self._strikes >= s.hysteresis
        grow = calm >= s.growth_interval
        moved = torch.where(back_off, self.value * s.backoff_factor, self.value)
        moved = torch.where(grow, moved * s.growth_factor, moved)
        self.value.copy_(moved.clamp(s.min_scale, s.max_scale))
        self._calm.copy_(torch.where(grow, 0, calm))

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and its memory."""
        return {
            "value": self.value.clone(),
            "calm": self._calm.clone(),
            "strikes": self._strikes.clone(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved scale."""
        self.value.copy_(state["value"])
        self._calm.copy_(state["calm"])
        self._strikes.copy_(state["strikes"])


class GradientOwner(Protocol):
    """The weights of a run, whose gradients a loss scale is divided out of."""

    def check_gradients(self, present: Sequence[int], inv_scale: Tensor | None) -> Checked:
        """Take the norms of the gradients in these places."""

    def multiply_gradients(self, present: Sequence[int], factor: Tensor) -> None:
        """Multiply the gradients in these places."""


# A part's scale begins at one and stays within fp16's own spread of exponents of it.
PART_SPREAD = 2.0**15


class Scales:
    """The running scales, and which parameter is under which."""

    def __init__(
        self,
        settings: LossScale | Mapping[str, LossScale] | None,
        *,
        parts: Sequence[str],
        group_indices: Sequence[int],
        device: torch.device,
    ) -> None:
        named = settings if isinstance(settings, Mapping) else {"loss": settings}
        self._losses = {
            name: RunningScale(value, device) for name, value in named.items() if value is not None
        }
        # The tensor itself: a scale moves in place.
        self.value = next((scale.value for scale in self._losses.values()), None)
        """The scale of the first loss; None if losses are not scaled."""
        self.per_loss = isinstance(settings, Mapping) and len(self._losses) > 1
        if parts and (self.per_loss or not self._losses):
            raise ConfigError(
                "scale_groups needs a single loss scale, because parts of the model add their own "
                "scale to it. Write one loss scale and a policy that uses it (fp16)."
            )
        self.parts = {glob: RunningScale(self._part_settings(), device) for glob in parts}
        # 0 is the index of parameters outside all groups.
        self._group_of_weight = torch.tensor(group_indices, device=device)
        self._finite: dict[str, Tensor] = {}
        self._nothing_gives_way = torch.ones((), dtype=torch.bool, device=device)

    def of_loss(self, name: str) -> RunningScale | None:
        """Return the scale of a loss; None if losses are not scaled."""
        if not self._losses:
            return None
        if name not in self._losses:
            raise ConfigError(
                f"There is no loss scale for {name!r}; prepare() got scales for "
                f"{', '.join(self._losses)}. Use one of these names."
            )
        return self._losses[name]

    def growth_since(self, value: Tensor) -> Tensor | None:
        """Return how much larger gradients are than at `value`; None without one common scale."""
        return None if self.value is None or self.per_loss else self.value / value

    @property
    def settings(self) -> LossScale | None:
        """How the scale of the first loss begins and moves."""
        return next(iter(self._losses.values())).settings if self._losses else None

    @property
    def values(self) -> list[Tensor]:
        """Every scale: those of the losses, then those of the groups."""
        return [scale.value for scale in (*self._losses.values(), *self.parts.values())]

    @contextlib.contextmanager
    def set_to(self, values: Sequence[Tensor]) -> Iterator[None]:
        """Use other scale values inside the block and discard what it finds."""
        before, finite = [value.clone() for value in self.values], dict(self._finite)
        try:
            for scale, value in zip(self.values, values, strict=True):
                scale.copy_(value)
            yield
        finally:
            for scale, value in zip(self.values, before, strict=True):
                scale.copy_(value)
            self._finite = finite

    def take_unscaled(self, name: str, weights: "GradientOwner", present: Sequence[int]) -> None:
        """Divide one loss's scale out of its gradients at once, so that the next can be added."""
        scale = self._losses[name]
        inv_scale = scale.value.reciprocal()
        checked = weights.check_gradients(present, inv_scale)
        weights.multiply_gradients(present, inv_scale)
        before = self._finite.get(name)
        self._finite[name] = checked.finite if before is None else checked.finite & before

    def inv_scale(self, present: Sequence[int]) -> Tensor | None:
        """Return the factor that unscales, one for all or one for each of the given parameters."""
        if not self._losses or self.per_loss:
            return None
        inv_scale = next(iter(self._losses.values())).value.reciprocal()
        if not self.parts:
            return inv_scale
        return (inv_scale * self._part_factors())[self._group_indices(present)]

    def update(self, checked: Checked, present: Sequence[int]) -> Tensor:
        """Move every scale after a step; return whether none can give way to an overflow."""
        at_floor = self._nothing_gives_way
        if self.per_loss:
            for name, finite in self._finite.items():
                at_floor = at_floor & (finite | ~self._losses[name].can_give_way)
                self._losses[name].update(finite)
            self._finite.clear()
            return at_floor
        if not self._losses:
            return at_floor
        whole = next(iter(self._losses.values()))
        at_floor = ~whole.can_give_way
        if not self.parts:
            whole.update(checked.finite)
            return at_floor
        bad = torch.zeros(len(self.parts) + 1, device=checked.norms.device)
        bad.index_add_(0, self._group_indices(present), (~checked.norms.isfinite()).float())
        can_give_way = torch.zeros_like(checked.finite)
        for i, part in enumerate(self.parts.values(), start=1):
            blamed = bad[i] > 0
            can_give_way = can_give_way | (blamed & part.can_give_way)
            part.update(~blamed)
        whole.update(checked.finite | can_give_way)
        return at_floor & ~can_give_way

    def state_dict(self) -> dict[str, Any]:
        """Return every scale and its memory."""
        return {
            "losses": {name: scale.state_dict() for name, scale in self._losses.items()},
            "parts": {glob: scale.state_dict() for glob, scale in self.parts.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore saved scales."""
        for name, scale in self._losses.items():
            scale.load_state_dict(state["losses"][name])
        for glob, scale in self.parts.items():
            scale.load_state_dict(state["parts"][glob])

    def _part_settings(self) -> LossScale:
        whole = next(iter(self._losses.values())).settings
        return replace(whole, init_scale=1.0, min_scale=1 / PART_SPREAD, max_scale=PART_SPREAD)

    def _part_factors(self) -> Tensor:
        one = torch.ones((), device=self._group_of_weight.device)
        return torch.stack([one, *(part.value.reciprocal() for part in self.parts.values())])

    def _group_indices(self, present: Sequence[int]) -> Tensor:
        if len(present) == len(self._group_of_weight):
            return self._group_of_weight
        return self._group_of_weight[
            torch.tensor(list(present), device=self._group_of_weight.device)
        ]


def group_index(name: str, globs: Sequence[str]) -> int:
    """Return which part a weight is in, counted from one; zero for none."""
    for i, glob in enumerate(globs, start=1):
        pieces = name.split(".")
        if any(fnmatchcase(".".join(pieces[: n + 1]), glob) for n in range(len(pieces))):
            return i
    return 0


def find_parts(model: nn.Module, globs: Sequence[str]) -> dict[str, list[nn.Module]]:
    """Return the modules each glob names, unless a weight would then be under two scales."""
    inside: set[nn.Module] = set()
    parts = {}
    for glob in globs:
        matches = [m for name, m in model.named_modules() if fnmatchcase(name, glob)]
        if not matches:
            raise ConfigError(
                f"loss_scale.scale_groups: {glob!r} matches no module. Print the plan to see the "
                "module names."
            )
        for module in matches:
            if inside & set(module.modules()):
                raise ConfigError(
                    f"loss_scale.scale_groups: {glob!r} overlaps with another group. Write globs "
                    "that share no module."
                )
            inside |= set(module.modules())
        parts[glob] = matches
    _check_shared_weights(model, inside)
    return parts


def scale_parts(
    parts: Mapping[str, Sequence[nn.Module]], scales: Mapping[str, RunningScale]
) -> None:
    """Make modules multiply their gradients by the scale of their group."""
    for glob, modules in parts.items():
        for module in modules:
            swap(module, OwnLossScale, nc_scale=scales[glob])


def _check_shared_weights(model: nn.Module, inside: set[nn.Module]) -> None:
    within = {p for module in inside for p in module.parameters(recurse=False)}
    for name, module in model.named_modules():
        shared = module not in inside and within & set(module.parameters(recurse=False))
        if shared:
            raise ConfigError(
                f"loss_scale.scale_groups: {name} shares a weight with a module outside its "
                "group, so its gradients would have two scales. Write globs that match all "
                "modules with this weight, or none."
            )


Settings = LossScale | Mapping[str, LossScale]
RequestedScale = float | LossScale | Mapping[str, float | LossScale]
"""What settings may be written as: a number is the scale to begin with."""


def settings_from(requested: RequestedScale | None) -> Settings | None:
    """Return the settings of any accepted form; raise for others."""
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
    """Arguments of `prepare` about loss scales, and the weights they apply to."""

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
        """Return the scales after a change of policy; those in force continue where they can.

        `keep` keeps one that the policy does not need.
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
