"""The steps of a run: queued on the device, then read as records and findings."""

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from signal import Signals
from typing import final

from torch import Tensor

from narrowcast.config.sections import Recipe
from narrowcast.hardware.profile import peak_bytes
from narrowcast.hardware.transfers import AsyncCopy
from narrowcast.health.diagnose.investigator import Investigator, StepDiagnosis
from narrowcast.health.diagnose.passes import ReplayInputs
from narrowcast.precision.plan.policy import Policy
from narrowcast.precision.step.outcome import Outcome
from narrowcast.precision.step.prepared import Prepared
from narrowcast.runs import FindingRecord, StepRecord
from narrowcast.training.observing import Observer
from narrowcast.training.parallel import ALONE, RunRanks
from narrowcast.training.setup import make_faults, make_profile
from narrowcast.training.step.shares import agreed, read_numbers, summed
from narrowcast.training.step.stepping import Stepper
from narrowcast.training.task import Batch, Task

ForwardStep = Callable[[Sequence[Batch]], tuple[Outcome, Tensor]]
"""Takes a step without a backward pass; see `Strategy.forward_step`."""


@dataclass(frozen=True, kw_only=True)
class _QueuedStep:
    """A step whose numbers may still be on their way to the host."""

    step: int
    outcome: Outcome
    losses: AsyncCopy
    """The loss, then each of its parts."""
    items: int
    replay_inputs: ReplayInputs | None
    """The inputs of the step, stored in case it has to be replayed."""


@final
class StepQueue:
    """Takes steps, and returns their records in order once their numbers are on the host."""

    def __init__(
        self,
        prepared: Prepared,
        task: Task,
        recipe: Recipe,
        *,
        folder: Path | None,
        own: Callable[[], Mapping[str, Policy]],
        ranks: RunRanks = ALONE,
    ) -> None:
        """`own()` returns the policies that widened modules came from."""
        self._prepared, self._loss_parts = prepared, task.info.loss_parts
        self._ranks = ranks
        self.stop: Signals | None = None
        """A signal that a rank received, once all ranks know of it."""
        self._device = next(prepared.model.parameters()).device
        self.observer = Observer(
            prepared,
            every=recipe.health.every,
            seed=recipe.seed,
            own=own,
            profile=make_profile(recipe, prepared, folder=folder) if ranks.is_main else None,
        )
        """Reads the tensors of some steps."""
        self._stepper = Stepper(prepared, task, recipe, ranks=ranks)
        self.investigator = Investigator(
            prepared,
            self._stepper.compute_loss,
            diagnose=recipe.health.diagnose,
            faults=make_faults(prepared, recipe),
            backward=self._stepper.backward,
        )
        """Replays bad steps to find their cause."""
        self._unread: deque[_QueuedStep] = deque()
        self._findings: list[FindingRecord] = []
        self.restart_clock()

    def __len__(self) -> int:
        return len(self._unread)

    def restart_clock(self) -> None:
        self._since = time.perf_counter()

    def drop_graphs(self) -> None:
        """Drop captured graphs, because the model has other formats now."""
        self._stepper.drop_graphs()

    def take(
        self,
        step: int,
        batches: Sequence[Batch],
        *,
        items: int,
        after_update: Callable[[Outcome], None],
        forward_step: ForwardStep | None = None,
        stop: Signals | None = None,
    ) -> None:
        """Queue one step; `after_update` is called before its tensors are read.

        `forward_step` takes the step instead if there is one. `stop` is a signal that this rank
        received, for the other ranks.
        """
        replay_inputs = self.investigator.before(batches)
        faults = self.investigator.faults_at(step)
        between = self.observer.before_step(step)
        if forward_step is None:
            outcome, losses = self._stepper(batches, faults=faults, between=between)
        else:
            with contextlib.nullcontext() if faults is None else faults.during(1):
                outcome, losses = forward_step(batches)
        losses = summed(losses, items=items, stop=stop, ranks=self._ranks)
        after_update(outcome)
        self.observer.after_step(step, forward_only=outcome.forward_only)
        self._unread.append(
            _QueuedStep(
                step=step,
                outcome=outcome,
                losses=AsyncCopy(losses),
                items=items,
                replay_inputs=replay_inputs,
            )
        )

    def landed(self) -> tuple[StepRecord, StepDiagnosis]:
        """Wait for the oldest step; return its record and its diagnosis."""
        queued = self._unread.popleft()
        outcome = queued.outcome
        applied = outcome.applied  # waits, so the clock is read after it
        now, row = time.perf_counter(), queued.losses.wait().tolist()
        numbers = read_numbers(row, items=queued.items, ranks=self._ranks)
        self.stop, losses = self.stop or numbers.stop, numbers.losses
        diagnosis = self.investigator.account(
            queued.step,
            outcome,
            loss=losses[0],
            replay_inputs=queued.replay_inputs,
            moved=partial(self._has_moved_since, queued),
            known=self._findings_upto(queued.step),
        )
        if not applied or diagnosis.injected or not math.isfinite(losses[0]):
            diagnosis = agreed(diagnosis, self._ranks)
        record = StepRecord(
            step=queued.step,
            loss=losses[0],
            loss_scale=outcome.loss_scale,
            applied=applied,
            skip_reason=diagnosis.why,
            grad_norm=outcome.grad_norm,
            lr=outcome.lr,
            lost_updates=outcome.lost_updates,
            items=numbers.items,
            seconds=now - self._since,
            peak_bytes=peak_bytes(self._device),
            loss_parts=dict(zip(self._loss_parts, losses[1:], strict=True)),
            forward_only=outcome.forward_only,
        )
        # The replay of a bad step does not count as time of the next one.
        self._since = time.perf_counter() if diagnosis.findings else now
        return record, diagnosis

    def _has_moved_since(self, queued: _QueuedStep) -> bool:
        """Return whether the weights have changed since a step. Synchronises."""
        return any(each.outcome.applied for each in (queued, *self._unread))

    def _findings_upto(self, step: int) -> list[FindingRecord]:
        """Return the findings of the step log up to a step; it may have later ones already."""
        self._findings += self._prepared.findings()
        now = [each for each in self._findings if each.step <= step]
        self._findings = self._findings[len(now) :]
        return now
