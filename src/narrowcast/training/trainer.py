"""The training loop: a run as a generator of records.

Between two records, everything is a function of the recipe and of the state in the last checkpoint,
so a run that is killed and resumed gives the same records and weights. On a GPU the record of a
step comes one step late, so that the device never waits for the host.
"""

import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, final

from narrowcast.config.sections import Recipe
from narrowcast.errors import DivergedError
from narrowcast.hardware.async_copy import AsyncCopy
from narrowcast.hardware.randomness import preserve_rng, seed_everything
from narrowcast.health.diagnose.investigator import Investigator
from narrowcast.precision.step.prepared import Prepared
from narrowcast.runs import PrecisionRecord, Record
from narrowcast.training.adapting import Adapter
from narrowcast.training.checkpoints.export import write_results
from narrowcast.training.checkpoints.frozen import FrozenWeights
from narrowcast.training.checkpoints.parts import blamed_on_part
from narrowcast.training.checkpoints.saving import Saving
from narrowcast.training.data import BatchStream, make_batches
from narrowcast.training.determinism import deterministic_kernels
from narrowcast.training.ending.best_weights import BestWeights
from narrowcast.training.ending.early_stopping import EarlyStopping, run_end
from narrowcast.training.evaluation import evaluate, not_finite
from narrowcast.training.observing import Observer
from narrowcast.training.precision_schedule import PrecisionSchedule
from narrowcast.training.run_state import Progress, RunState
from narrowcast.training.setup import make_faults, make_profile
from narrowcast.training.signals import Stop, stop_on_signals
from narrowcast.training.step.in_flight import Attempt, InFlight
from narrowcast.training.step.stepping import Stepper
from narrowcast.training.strategy import PLAIN, Strategy
from narrowcast.training.task import Batch, Task
from narrowcast.training.vital_signs import VitalSigns, bad_weights


def train(
    prepared: Prepared,
    task: Task,
    recipe: Recipe,
    *,
    folder: Path | None = None,
    resume: dict[str, Any] | None = None,
    accept: Collection[str] = (),
    strategy: Strategy = PLAIN,
) -> Generator[Record]:
    """Train for `recipe.steps` attempts and yield what happens, as it happens.

    Fewer where `recipe.eval.patience` is at an end. An attempt that overflows counts as a step and
    is recorded as skipped. Checkpoints go to `folder/checkpoints`, the final weights to
    `folder/model.safetensors`; without a folder nothing is saved. `resume` is the state of a
    checkpoint to go on from; one of another model, of other settings, or of other data unless
    `accept` has "data", is refused here; any other is taken up. What follows is bit for bit what an
    uninterrupted run would do; on a GPU only if `recipe.deterministic`, which makes it slower.
    A `strategy` acts between steps, and says which weights the run returns.

    SIGINT, SIGTERM, SIGHUP or a `Home` that was lost end the run after the step in progress, with
    a checkpoint and `Interrupted`.
    """
    course = _TrainLoop(prepared, task, recipe, folder=folder, strategy=strategy)
    try:
        course.begin_at(resume, accept=accept)
    except BaseException:  # Ctrl-C too: the model must not keep the probes of a run that never was
        course.close()
        raise
    return course.run(resume)


@final
class _TrainLoop:
    """One run: the parts that take its steps, and its progress."""

    def __init__(
        self,
        prepared: Prepared,
        task: Task,
        recipe: Recipe,
        *,
        folder: Path | None,
        strategy: Strategy,
    ) -> None:
        self._prepared, self._task, self._recipe = prepared, task, recipe
        self._folder, self._strategy = folder, strategy
        self._device = next(prepared.model.parameters()).device
        self._schedule = PrecisionSchedule(prepared, recipe, task=task)
        self._schedule.apply_phase()
        self._adapter = Adapter(prepared, recipe, gemm_rows=task.gemm_rows)
        profile = make_profile(recipe, device=self._device, folder=folder)
        every, own = recipe.health.every, self._adapter.own
        self._observer = Observer(prepared, every=every, seed=recipe.seed, own=own, profile=profile)
        self._stepper = Stepper(prepared, task, recipe)
        self._investigator = Investigator(
            prepared,
            self._stepper.compute_loss,
            diagnose=recipe.health.diagnose,
            faults=make_faults(prepared, recipe),
            backward=self._stepper.backward,
        )
        self._vital_signs = VitalSigns(prepared, task, folder=folder)
        self._early_stopping = EarlyStopping(recipe.eval, task.info)
        frozen = FrozenWeights(prepared)
        self._best_weights = BestWeights(
            prepared, frozen, folder=folder, wanted=recipe.eval.keep_best
        )
        self._state = RunState(
            prepared,
            task,
            recipe,
            parts={
                "schedule": self._schedule,
                "investigator": self._investigator,
                "observer": self._observer,
                "adapter": self._adapter,
                "vital_signs": self._vital_signs,
                "improvement": self._early_stopping,
                "best_weights": self._best_weights,
                **({} if strategy is PLAIN else {"strategy": strategy}),
            },
            frozen=frozen,
        )
        self._saving = Saving(
            self._state, self._vital_signs, folder=folder, settings=recipe.checkpoint
        )
        self._progress = Progress()
        parts = task.info.loss_parts
        self._in_flight = InFlight(prepared, self._investigator, parts=parts)
        self._since = time.perf_counter()

    def begin_at(self, state: dict[str, Any] | None, *, accept: Collection[str]) -> None:
        """Restore a checkpoint's state, or raise if this run is not its continuation.

        Fingerprints the data here, before it can change.
        """
        if state is None:
            if self._folder is not None or self._recipe.eval.keep_best:
                self._state.identify()
            return
        self._state.require_own(state, accept=accept)
        with preserve_rng(self._device), self._observer.probes_removed():
            with blamed_on_part(state["step"], "schedule"):
                self._schedule.restore(state["schedule"])
            with blamed_on_part(state["step"], "strategy"):
                self._strategy.restore_formats(state.get("strategy", {}))
            with blamed_on_part(state["step"], "adapter"):
                self._adapter.restore(state["adapter"])
            self._progress = self._state.restore(state)
            self._state.restore_randomness(state)  # to see that it can be, when the run goes on
        self._stepper.drop_graphs()
        self._saving.last = self._progress.step

    def close(self) -> None:
        """Remove the probes from the model, and finish background work."""
        self._observer.close()
        self._saving.close()

    def run(self, state: dict[str, Any] | None) -> Generator[Record]:
        """Yield the records from `state`, or from the start, to the end."""
        try:
            yield from self._run(state)
        finally:
            self.close()

    def _run(self, state: dict[str, Any] | None) -> Iterator[Record]:
        recipe, task = self._recipe, self._task
        seed_everything(recipe.seed)
        if state is not None:
            yield from self._state.restore_randomness(state)
        data = make_batches(task, recipe, start=self._progress.batches, device=self._device)
        with (
            stop_on_signals(self._folder) as stop,
            data,
            deterministic_kernels(recipe.deterministic),
        ):
            if state is None:
                task.before_first_step(self._prepared)
                yield from self._strategy.before_first_step()
            self._since = time.perf_counter()
            while True:
                yield from self._between_steps(stop)
                if self._progress.step == recipe.steps or self._early_stopping.why:
                    break
                yield from self._change_formats()
                yield from self._follow_strategy()
                try:
                    self._in_flight.add(self._attempt(data))
                except DivergedError as error:
                    # What led to it is told; the last checkpoint, of a better time, stays.
                    yield from self._read(leaving=0)
                    raise self._investigator.named(error) from error
                yield from self._read(leaving=1 if self._device.type == "cuda" else 0)
        yield from self._save_if_lacking()
        self._vital_signs.require_alive(self._progress.step, self._investigator.named)
        yield from self._strategy.summary(self._progress.step)
        best = self._best_weights.load_into_model() or self._strategy.put_answer()
        if self._folder is not None:
            end = run_end(self._early_stopping, recipe, step=self._progress.step)
            write_results(self._prepared, task, self._folder, end=end, best=best)

    def _between_steps(self, stop: Stop) -> Iterator[Record]:
        """Evaluate and save when due, and stop if a signal came."""
        evaluation_is_due = self._is_due(self._recipe.eval.every, last=self._progress.evaluated)
        if evaluation_is_due and not stop.why:  # a scheduler grants little time to end
            yield from self._read(leaving=0)
            yield from self._evaluate()
        yield from self._saving.arrived()
        if self._is_due(self._recipe.checkpoint.every, last=self._saving.last):
            yield from self._read(leaving=0)
            yield from self._save()
        if stop.why:
            yield from self._read(leaving=0)
            yield from self._save_if_lacking()
            raise stop.ended_after(self._progress.step)

    def _evaluate(self) -> Iterator[Record]:
        step = self._progress.step
        measure = partial(evaluate, self._prepared, self._task)
        try:
            judged, message = self._strategy.evaluate(step, measure)
        except Exception:  # the task's: whatever it is, it goes on
            yield from self._save_if_lacking()  # the steps so far are worth keeping
            raise
        self._progress = replace(self._progress, evaluated=step)
        terms = self._prepared.engine.log.wording
        result = not_finite(judged.metrics, bad_weights(self._prepared), step=step, lr=terms.lr)
        records: list[Record] = [judged, *result]
        for record in records:
            self._vital_signs.note(record)
            self._early_stopping.note(record)
            yield record
        yield from message
        if self._early_stopping.improvement.best_step == step:
            self._best_weights.keep(step, answer=self._strategy.answer)
        self._since = time.perf_counter()

    def _change_formats(self) -> Iterator[Record]:
        """Change to the next phase of the schedule when due, then apply adaptive precision."""
        step = self._progress.step
        if self._schedule.is_due(step):
            yield from self._change(partial(self._schedule.advance, step), self._adapter.begin)
        if wanted := self._adapter.decide(step):
            yield from self._change(lambda: wanted, self._adapter.apply)

    def _change(
        self, change: Callable[[], Sequence[Record]], follow: Callable[[], None]
    ) -> Iterator[Record]:
        """Change the formats of the model between two steps, without probes."""
        yield from self._read(leaving=0)
        with self._observer.probes_removed():
            records = change()
            follow()
        self._investigator.begin_row()
        self._stepper.drop_graphs()
        yield from records
        self._since = time.perf_counter()

    def _follow_strategy(self) -> Iterator[Record]:
        """Let the strategy act between two steps, without probes."""
        strategy, step = self._strategy, self._progress.step
        if not strategy.is_due(step):
            return
        yield from self._read(leaving=0)
        with self._observer.probes_removed():
            records = list(strategy.act(step, batches=self._progress.batches))
            # Also when the formats were changed back: what was captured or counted is of before.
            changed = any(isinstance(record, PrecisionRecord) for record in records)
            if changed:
                self._adapter.begin()
        if changed:
            self._investigator.begin_row()
            self._stepper.drop_graphs()
        yield from records
        self._since = time.perf_counter()

    def _is_due(self, every: int, *, last: int) -> bool:
        step = self._progress.step
        return step != last and (step == self._recipe.steps or (every > 0 and step % every == 0))

    def _attempt(self, data: BatchStream) -> Attempt:
        """Queue one step: forward and backward of each micro-batch, then the update."""
        batches, items = list[Batch](), 0
        for batch in islice(data, self._recipe.gradient_accumulation_steps):
            batches.append(batch)
            items += data.items
        batches = self._task.as_one_step(batches)
        step = self._progress.step + 1
        replay_inputs = self._investigator.before(batches)
        faults = self._investigator.faults_at(step)
        between = self._observer.before_step(step)
        outcome, losses = self._stepper(batches, faults=faults, between=between)
        self._task.after_step(self._prepared, outcome)
        self._strategy.after_step(outcome)
        self._progress = self._progress.after(len(batches))
        self._observer.after_step(step)
        return Attempt(
            step=step,
            outcome=outcome,
            losses=AsyncCopy(losses),
            items=items,
            replay_inputs=replay_inputs,
        )

    def _read(self, *, leaving: int) -> Iterator[Record]:
        """Yield the records of queued steps except the last `leaving`. Synchronises with them."""
        while len(self._in_flight) > leaving:
            record, notice, now = self._in_flight.landed(since=self._since)
            # A look into a bad step is not the next one's time; all else is, as a GPU works on.
            self._since = time.perf_counter() if notice.findings else now
            self._schedule.note(record)
            self._vital_signs.note(record)
            self._strategy.note(record)
            yield record
            yield from notice.findings
            yield from self._adapter.observed(self._observer, record, notice)

    def _save(self) -> Iterator[Record]:
        yield from self._saving.save(self._progress)
        self._since = time.perf_counter()

    def _save_if_lacking(self) -> Iterator[Record]:
        yield from self._saving.save_if_lacking(self._progress)
        self._since = time.perf_counter()
