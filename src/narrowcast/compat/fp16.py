"""The FP16 trainer of the forecasting library neuro-divergent: its names, on narrowcast's engine.

The computations are those of `narrowcast.prepare`. Formats are real fp16, not the fixed-point
numbers of the original; `fixed_point_f16` computes those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowcast.errors import ConfigError
from narrowcast.numerics import FP16, cast
from narrowcast.precision.gradients.loss_scale import LossScale, RunningScale
from narrowcast.precision.step.prepared import Prepared, prepare


@dataclass(frozen=True, kw_only=True)
class MixedPrecisionConfig:
    """Settings of the FP16 trainer, with its defaults.

    Example:
        >>> config = MixedPrecisionConfig(growth_interval=500)
        >>> run = nc.prepare(model, optimizer, policy=config.policy, loss_scale=config.loss_scale)
    """

    enabled: bool = True
    """False: train in fp32, without a loss scale."""
    initial_scale: float = 2.0**16
    """Loss scale of the first step: a power of two."""
    scale_growth_factor: float = 2.0
    """Factor after `growth_interval` finite steps in a row: a power of two above 1."""
    scale_backoff_factor: float = 0.5
    """Factor after an overflow: a power of two below 1."""
    growth_interval: int = 2000
    """Finite steps in a row before the scale grows."""
    min_scale: float = 1.0
    max_scale: float = 2.0**18
    dynamic_scaling: bool = True
    """False: the scale stays at `initial_scale`."""
    check_finite: bool = True
    """Must be True: gradients are always checked."""
    master_weights: bool = True
    """Keep fp32 master weights beside the fp16 weights."""

    def __post_init__(self) -> None:
        if not self.check_finite:
            raise ConfigError(
                f"check_finite must be True, got {self.check_finite}. Leave it out: steps with inf "
                "or NaN gradients are always skipped."
            )
        _ = self.loss_scale

    @classmethod
    def conservative(cls) -> MixedPrecisionConfig:
        """Return settings that start low and grow seldom. The original grows by 1.5, this by 2."""
        return cls(initial_scale=2.0**15, growth_interval=5000)

    @classmethod
    def aggressive(cls) -> MixedPrecisionConfig:
        """Return settings that start high and grow often. The original grows by 2.5, this by 2."""
        return cls(initial_scale=2.0**17, growth_interval=1000)

    @property
    def policy(self) -> str:
        """The policy to pass to `narrowcast.prepare`."""
        if not self.enabled:
            return "fp32"
        return f"fp16, params=fp16, master={'fp32' if self.master_weights else 'none'}"

    @property
    def loss_scale(self) -> LossScale | None:
        """The loss scale to pass to `narrowcast.prepare`; None if mixed precision is off."""
        if not self.enabled:
            return None
        return LossScale(
            init_scale=self.initial_scale,
            growth_factor=self.scale_growth_factor,
            backoff_factor=self.scale_backoff_factor,
            growth_interval=self.growth_interval,
            min_scale=self.min_scale,
            max_scale=self.max_scale,
            dynamic=self.dynamic_scaling,
        )


class UpdateStatus(NamedTuple):
    """What `GradScaler.update` did to the scale."""

    kind: Literal["increased", "decreased", "no update"]
    """As decided, also at a bound, where the scale stays the same."""
    old: float
    new: float


class GradScaler:
    """A dynamic loss scale for loops that scale, unscale and check gradients themselves.

    With wide bounds it moves as `torch.amp.GradScaler` does. A `prepare`d run has its own.
    """

    def __init__(self, config: MixedPrecisionConfig | None = None) -> None:
        self.config = config or MixedPrecisionConfig()
        self.reset()

    def reset(self) -> None:
        """Go back to the initial scale."""
        settings = self.config.loss_scale or LossScale(init_scale=1.0, dynamic=False)
        self._running = RunningScale(settings, torch.device("cpu"))
        self._finite_steps = 0

    @property
    def scale(self) -> float:
        """The loss scale; 1 if mixed precision is off."""
        return float(self._running.value)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale."""
        return loss * self.scale

    def unscale(self, gradients: Iterable[Tensor]) -> list[Tensor]:
        """Return fp32 gradients divided by the scale. Exact, because it is a power of two."""
        return [gradient.float() / self.scale for gradient in gradients]

    def check_finite_gradients(self, gradients: Iterable[Tensor]) -> bool:
        """Return whether no gradient has an inf or NaN. Synchronises with the device."""
        return all(bool(gradient.isfinite().all()) for gradient in gradients)

    def update(self, found_inf: bool) -> UpdateStatus:
        """Move the scale after a step.

        Args:
            found_inf: Whether a gradient of the step had an inf or NaN.

        Returns:
            What happened to the scale.
        """
        old = self.scale
        self._running.update(torch.tensor(not found_inf))
        if not self._running.settings.dynamic:
            return UpdateStatus("no update", old, old)
        self._finite_steps = 0 if found_inf else self._finite_steps + 1
        if found_inf:
            return UpdateStatus("decreased", old, self.scale)
        if self._finite_steps < self.config.growth_interval:
            return UpdateStatus("no update", old, old)
        self._finite_steps = 0
        return UpdateStatus("increased", old, self.scale)


class WeightManager:
    """fp16 weights updated by plain gradient descent, with fp32 master weights or without.

    `narrowcast.prepare` does the same for any torch optimizer.
    """

    def __init__(self, weights: Sequence[Tensor], *, use_master: bool = True) -> None:
        self.weights = [to_fp16(weight.detach()) for weight in weights]
        self.master_weights = (
            [weight.detach().float().clone() for weight in weights] if use_master else []
        )

    def update(self, gradients: Sequence[Tensor], lr: float) -> None:
        """Subtract `lr` times each gradient."""
        exact = self.master_weights or [weight.float() for weight in self.weights]
        for weight, master, gradient in zip(self.weights, exact, gradients, strict=True):
            master.sub_(gradient.float(), alpha=lr)
            weight.copy_(to_fp16(master))

    def sync(self) -> None:
        """Round the master weights to the fp16 weights again."""
        for weight, master in zip(self.weights, self.master_weights, strict=False):
            weight.copy_(to_fp16(master))


@dataclass(frozen=True, kw_only=True)
class MixedPrecisionStats:
    """Counts of an FP16 trainer since its beginning or last reset."""

    total_steps: int
    overflow_count: int
    """Steps that were skipped because a gradient had an inf or NaN."""
    current_scale: float
    avg_grad_norm: float
    """Mean over the applied steps. The original has a moving average that starts at 0."""
    scale_increases: int
    scale_decreases: int
    overflow_rate: float
    """`overflow_count` per step."""


class MixedPrecisionTrainer:
    """Trains a model in fp16 with a loss scale and master weights.

    Example:
        >>> trainer = MixedPrecisionTrainer(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> loss = trainer.train_step(inputs, targets)
        >>> trainer.stats().overflow_rate
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        config: MixedPrecisionConfig | None = None,
    ) -> None:
        self.config = config or MixedPrecisionConfig()
        self._model, self._optimizer = model, optimizer
        self.run = self._prepare()
        """The prepared run, for its plan, checkpoints and findings."""

    def _prepare(self) -> Prepared:
        return prepare(
            self._model,
            self._optimizer,
            policy=self.config.policy,
            loss_scale=self.config.loss_scale,
        )

    def train_step(
        self,
        inputs: Tensor,
        targets: Tensor,
        loss_fn: Callable[[Tensor, Tensor], Tensor] = F.mse_loss,
    ) -> float:
        """Train on one batch and return its loss, without the scale.

        A step with inf or NaN gradients leaves the weights as they are. Synchronises with the
        device.
        """
        with self.run.autocast():
            loss = loss_fn(self._model(inputs), targets)
        self.run.step(loss)
        return loss.item()

    @property
    def current_scale(self) -> float:
        """The loss scale of the next step; 1 if mixed precision is off."""
        return self.stats().current_scale

    def stats(self) -> MixedPrecisionStats:
        """Return the counts so far. Synchronises with the device."""
        counts = self.run.stats()
        return MixedPrecisionStats(
            total_steps=counts.steps,
            overflow_count=counts.skipped,
            current_scale=counts.current_scale,
            avg_grad_norm=counts.average_grad_norm,
            scale_increases=counts.scale_increases,
            scale_decreases=counts.scale_decreases,
            overflow_rate=counts.overflow_rate,
        )

    def reset(self) -> None:
        """Begin again with the initial scale and new counts. The weights stay."""
        self.run.release()
        self.run = self._prepare()


class Fp16Safety(NamedTuple):
    """Whether a tensor can be stored in fp16."""

    has_overflow: bool
    """Some values are beyond ±65504, or NaN."""
    has_underflow: bool
    """Some values are subnormal in fp16 or become zero, so they lose digits."""


def is_in_range(x: Tensor) -> Tensor:
    """Return, per element, whether fp16 can hold it: at most 65504 in magnitude, and not NaN."""
    return x.abs() <= FP16.largest


def would_underflow(x: Tensor) -> Tensor:
    """Return, per element, whether it is nonzero and below the normal numbers of fp16 (2⁻¹⁴)."""
    return (x != 0) & (x.abs() < FP16.smallest_normal)


def check_fp16_safe(x: Tensor) -> Fp16Safety:
    """Return whether values overflow or underflow in fp16. Synchronises with the device."""
    return Fp16Safety(bool((~is_in_range(x)).any()), bool(would_underflow(x).any()))


def to_fp16(x: Tensor) -> Tensor:
    """Round to fp16. Values beyond ±65504 and ±inf become ±65504; NaN stays."""
    return cast(x, FP16, saturate=True)


def fixed_point_f16(x: Tensor) -> Tensor:
    """Return the numbers of the original's `F16`: multiples of 2⁻¹⁰ up to 65504, not fp16."""
    # Half a step rounds away from zero, as in Rust.
    steps = x * 1024
    rounded = torch.where(steps < 0, (steps - 0.5).ceil(), (steps + 0.5).floor()) / 1024
    return rounded.clamp(-FP16.largest, FP16.largest)
