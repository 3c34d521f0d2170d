"""The check run: short training at equal time, which confirms or withdraws the choice.

On the GPU that is tuned for, time is measured. Elsewhere formats are emulated, and the time of a
step is that of the products of the linear layers as predicted.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from narrowcast.errors import ConfigError, DivergedError
from narrowcast.hardware.randomness import preserve_rng, seed_everything
from narrowcast.precision.plan.plan import make_plan
from narrowcast.precision.plan.policy import PRESETS, Policy, short_text
from narrowcast.precision.step.prepared import Prepared, prepare
from narrowcast.tuning.optimizers import fresh_optimizer
from narrowcast.tuning.options import Rates
from narrowcast.tuning.result import Candidate, Check, CheckedRun, TuneResult, Verdict
from narrowcast.tuning.updates import LossFunction, total_loss

HELD_OUT = 4
"""Batches that the loss is taken of."""
WARMUP = 0.1
"""Share of the steps over which the learning rate rises."""
TIMED_AFTER = 6
"""Steps before time is measured, which compile and allocate."""
PREDICTED = "predicted for the products of linear layers; formats are emulated here"
LONGEST = 4
"""A run is at most so many times as long as that of the preset."""


@dataclass(frozen=True, kw_only=True)
class CheckSettings:
    """How the check run trains."""

    steps: int
    seed: int
    clip_norm: float | None
    rates: Rates

    @property
    def native(self) -> bool:
        """Whether the model is on the hardware that is tuned for."""
        return self.rates.is_here


@dataclass(frozen=True, kw_only=True)
class _Losses:
    """Losses on the held-out batches after some numbers of steps, and the time of a step."""

    after: dict[int, list[float]]
    step_seconds: float

    def mean(self, steps: int) -> float:
        losses = self.after[steps]
        return sum(losses) / len(losses)


class CheckRuns:
    """Trains a model from the same start under one policy after the other."""

    def __init__(
        self,
        model: nn.Module,
        batches: Iterable[Any],
        loss_fn: LossFunction,
        *,
        optimizer: torch.optim.Optimizer | None,
        settings: CheckSettings,
        tell: Callable[[str], None],
    ) -> None:
        self._model, self._loss_fn, self._optimizer = model, loss_fn, optimizer
        self.settings, self._tell = settings, tell
        needed = settings.steps * 2 + HELD_OUT
        taken = list(itertools.islice(batches, needed))
        if len(taken) < HELD_OUT + 1:
            raise ConfigError(
                f"The check run needs at least {HELD_OUT + 1} batches after those that measure "
                f"updates, got {len(taken)}. Pass more batches, or check_steps=0."
            )
        self._held_out, self._train = taken[:HELD_OUT], taken[HELD_OUT:]

    def losses(self, policy: Policy, *, at: Sequence[int]) -> _Losses:
        """Train under a policy for the largest of some numbers of steps; return the losses."""
        device = next(self._model.parameters()).device
        with preserve_rng(device), _restored(self._model):
            optimizer = fresh_optimizer(self._model, self._optimizer)
            native, rates = self.settings.native, self.settings.rates
            plan = make_plan(
                self._model,
                policy,
                emulate=None if native else True,
                gemm_rows=rates.rows,
                execution=rates.execution if native else "eager",
            )
            run = prepare(
                self._model,
                optimizer,
                policy=plan,
                clip_norm=self.settings.clip_norm,
                scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, self._warmup),
                lost_updates_every=0,
            )
            try:
                return self._trained(run, sorted(set(at)), policy)
            finally:
                run.zero_grad()
                run.release()

    def _trained(self, run: Prepared, at: Sequence[int], policy: Policy) -> _Losses:
        device, results = next(self._model.parameters()).device, dict[int, list[float]]()
        seed_everything(self.settings.seed)
        began, seconds, counted, untimed = 0.0, 0.0, 0, min(TIMED_AFTER, at[0] // 2)
        take = self._step(run)
        for step, batch in enumerate(itertools.cycle(self._train), start=1):
            self._tell(f"check run: {short_text(policy)[:40]}, step {step} of {at[-1]}")
            if step == untimed + 1:
                _wait(device)
                began = time.perf_counter()
            try:
                take(batch)
            except DivergedError:
                results |= {n: [math.inf] * HELD_OUT for n in at if n >= step}
                break
            if step in at:
                _wait(device)
                if step > untimed:
                    seconds, counted = seconds + time.perf_counter() - began, step - untimed
                results[step] = self._evaluated(run)
                _wait(device)
                began = time.perf_counter()
            if step == at[-1]:
                break
        return _Losses(after=results, step_seconds=seconds / counted if counted else 0.0)

    def _step(self, run: Prepared) -> Callable[[Any], Any]:
        """Return what takes a step: a CUDA graph if the model will run as one."""

        def loss(batch: Any) -> Tensor:
            return total_loss(self._loss_fn(self._model, batch))

        def eager(batch: Any) -> None:
            with run.autocast():
                value = loss(batch)
            run.step(value)

        graphed = self.settings.native and self.settings.rates.execution == "graphed"
        return run.graphed(loss) if graphed else eager

    @torch.no_grad()
    def _evaluated(self, run: Prepared) -> list[float]:
        """Return the loss on each held-out batch. Synchronises with the device."""
        losses = []
        device = next(self._model.parameters()).device
        with preserve_rng(device):
            for number, batch in enumerate(self._held_out):
                seed_everything(number)
                with run.autocast():
                    losses.append(float(total_loss(self._loss_fn(self._model, batch))))
        return losses

    def _warmup(self, updates: int) -> float:
        return min((updates + 1) / max(self.settings.steps * WARMUP, 1.0), 1.0)


def check_choice(result: TuneResult, runs: CheckRuns) -> Check:
    """Train under the choice, the best preset and fp32, and return what that says."""
    steps, native = runs.settings.steps, runs.settings.native
    preset, text = best_preset(result), short_text(result.policy)
    rival = None if preset is None or preset.policy == result.preset else preset
    wide = runs.losses(Policy(), at=[steps])
    rows = [CheckedRun(policy="fp32", steps=steps, loss=wide.mean(steps))]
    more, other = None, None
    if rival is not None:
        other = wide if rival.policy == "fp32" else runs.losses(PRESETS[rival.policy], at=[steps])
        rows.append(CheckedRun(policy=rival.policy, steps=steps, loss=other.mean(steps)))
        own, its = result.predicted.seconds or 1.0, rival.seconds or 1.0
        if native:
            own = runs.losses(result.policy, at=[steps]).step_seconds
            its = other.step_seconds
        more = min(max(round(steps * its / max(own, 1e-9)), 1), steps * LONGEST)
    chosen = wide if text == "fp32" else runs.losses(result.policy, at=[steps, more or steps])
    rows.append(
        CheckedRun(
            policy=text,
            steps=steps,
            loss=chosen.mean(steps),
            equal_time_steps=more,
            equal_time_loss=None if more is None else chosen.mean(more),
        )
    )
    reason, worse = f"after {steps} steps the loss is {chosen.mean(steps):.4f}", False
    above, limit = _difference(chosen.after[steps], wide.after[steps]), result.budget.loss
    relative = above.mean / abs(wide.mean(steps))
    reason += f", {abs(relative):.2%} {'above' if relative > 0 else 'below'} that in fp32"
    if limit is not None and above.mean - 2 * above.error > limit * abs(wide.mean(steps)):
        worse, reason = True, f"{reason}, beyond the budget of {limit:.2%}"
    if rival is not None and other is not None and more is not None:
        behind = _difference(chosen.after[more], other.after[steps])
        worse = worse or behind.mean > 2 * behind.error
        reason += (
            f"; in the time of {steps} steps of {rival.policy} it takes {more} and reaches "
            f"{chosen.mean(more):.4f}, {rival.policy} {other.mean(steps):.4f}"
        )
    verdict: Verdict = "withdrawn" if worse and preset is not None else "confirmed"
    return Check(
        verdict=verdict,
        reason=f"{reason}.",
        runs=tuple(rows),
        time_source="measured here" if native else PREDICTED,
        instead="" if preset is None or verdict == "confirmed" else preset.policy,
    )


def best_preset(result: TuneResult) -> Candidate | None:
    """Return the fastest preset within the budget, else the most accurate one."""
    fitting = [each for each in result.presets if each.fits and each.seconds is not None]
    if fitting:
        return min(fitting, key=lambda each: (each.seconds or 0.0, each.lost))
    return min(result.presets, key=lambda each: each.lost, default=None)


@dataclass(frozen=True)
class _Difference:
    mean: float
    error: float
    """Standard error over held-out batches."""


def _difference(losses: Sequence[float], others: Sequence[float]) -> _Difference:
    pairs = [a - b for a, b in zip(losses, others, strict=True)]
    mean = sum(pairs) / len(pairs)
    if not math.isfinite(mean):
        return _Difference(math.inf, 0.0)
    square = sum((each - mean) ** 2 for each in pairs) / max(len(pairs) - 1, 1)
    return _Difference(mean, (square / len(pairs)) ** 0.5)


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Put weights and buffers back after the block."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        yield
    finally:
        model.load_state_dict(before)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
