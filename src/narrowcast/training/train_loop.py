"""The training loop: a run as a generator of records.

On a GPU the record of a step comes one step late, so that the device never waits for the host.
"""

import os
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, final

import torch

from narrowcast.config.sections import Recipe
from narrowcast.errors import DivergedError
from narrowcast.hardware.randomness import preserve_rng, seed_everything
from narrowcast.precision.step.outcome import Outcome
from narrowcast.precision.step.prepared import Prepared
from narrowcast.runs import PrecisionRecord, Record
from narrowcast.runs.commands import resume_command
from narrowcast.training.adapting import Adapter
from narrowcast.training.checkpoints.export import take_part_in_results, write_results
from narrowcast.training.checkpoints.frozen import FrozenWeights
from narrowcast.training.checkpoints.resume import blamed_on_part
from narrowcast.training.checkpoints.saving import Saving
from narrowcast.training.data import BatchStream, batch_order, make_batches
from narrowcast.training.ending import run_end
from narrowcast.training.evaluation import Evaluations
from narrowcast.training.parallel import ALONE, RunRanks, is_sharded
from narrowcast.training.precision_schedule import PrecisionSchedule
from narrowcast.training.run_state import Progress, RunState
from narrowcast.training.signals import Stop, stop_on_signals
from narrowcast.training.step.queue import StepQueue
from narrowcast.training.step.shares import as_shares, merged
from narrowcast.training.strategy import PLAIN, Strategy
from narrowcast.training.task import Batch, Task


def train_loop(
    prepared: Prepared,
    task: Task,
    recipe: Recipe,
    *,
    folder: Path | None = None,
    resume: dict[str, Any] | None = None,
    accept: Collection[str] = (),
    strategy: Strategy = PLAIN,
    ranks: RunRanks = ALONE,
) -> Generator[Record]:
    """Train for `recipe.steps` steps, and yield records as they happen.

    Args:
        folder: Run folder for checkpoints and weights; without one nothing is saved.
        resume: State of a checkpoint to continue from.
        accept: May have "data", to continue on other data than that of the checkpoint.
        strategy: Acts between steps, and decides which weights the run returns.
        ranks: The processes that train together. Each yields the records; rank 0 writes to
            `folder`.
    """
    loop = _TrainLoop(prepared, task, recipe, folder=folder, strategy=strategy, ranks=ranks)
    try:
        loop.restore(resume, accept=accept)
    except BaseException:  # Ctrl-C too: the model must not keep the probes of a run that never was
        loop.close()
        raise
    return loop.records(resume)


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
        ranks: RunRanks,
    ) -> None:
        self._prepared, self._task, self._recipe = prepared, task, recipe
        self._folder, self._strategy, self._ranks = folder, strategy, ranks
        self._order = batch_order(len(task.train_data), recipe, rank=ranks.rank, ranks=ranks.size)
        self._device = next(prepared.model.parameters()).device
        self._schedule = PrecisionSchedule(prepared, recipe, task=task)
        self._schedule.apply_phase()
        self._adapter = Adapter(prepared, recipe, gemm_rows=task.gemm_rows)
        self._steps = StepQueue(
            prepared,
            task,
            recipe,
            folder=folder,
            own=self._adapter.own,
            ranks=ranks,
        )
        frozen = FrozenWeights(prepared)
        self._evaluations = Evaluations(
            prepared, task, recipe, frozen=frozen, folder=folder, strategy=strategy, ranks=ranks
        )
        self._state = RunState(
            prepared,
            task,
            recipe,
            parts={
                "schedule": self._schedule,
                "investigator": self._steps.investigator,
                "observer": self._steps.observer,
                "adapter": self._adapter,
                "vital_signs": self._evaluations.vital_signs,
                "improvement": self._evaluations.early_stopping,
                "best_weights": self._evaluations.best_weights,
                **({} if strategy is PLAIN else {"strategy": strategy}),
            },
            frozen=frozen,
            ranks=ranks,
        )
        self._saving = Saving(
            self._state,
            self._evaluations.vital_signs,
            folder=folder,
            settings=recipe.checkpoint,
            ranks=ranks,
            sharded=is_sharded(prepared.model),
        )
        self._progress = Progress()

    def restore(self, state: dict[str, Any] | None, *, accept: Collection[str]) -> None:
        """Restore a checkpoint's state, or raise; fingerprint the data before it can change."""
        if state is None:
            if self._folder is not None or self._recipe.eval.keep_best:
                self._ranks.at("reading the data")
                self._state.identify()
            return
        self._state.require_own(state, accept=accept)
        with preserve_rng(self._device), self._steps.observer.probes_removed():
            with blamed_on_part(state["step"], "schedule"):
                self._schedule.restore(state["schedule"])
            with blamed_on_part(state["step"], "strategy"):
                self._strategy.restore_formats(state.get("strategy", {}))
            with blamed_on_part(state["step"], "adapter"):
                self._adapter.restore(state["adapter"])
            self._progress = self._state.restore(state)
            self._state.restore_randomness(state)  # raises now, not when the run continues
        self._steps.drop_graphs()
        self._saving.last = self._progress.step

    def close(self) -> None:
        """Remove the probes from the model, and finish background work."""
        self._steps.observer.close()
        self._saving.close()

    def records(self, state: dict[str, Any] | None) -> Generator[Record]:
        """Train from `state`, or from the start, to the end."""
        try:
            with self._ranks.ending_together(self._how_to_resume):
                yield from self._train(state)
        finally:
            self.close()

    def _how_to_resume(self) -> str:
        if self._folder is None:
            return ""
        saved = self._saving.last
        where = f"its checkpoint of step {saved}" if saved else "the start, as it has no checkpoint"
        return f"Resume the run from {where} with `{resume_command(self._folder)}`."

    def _train(self, state: dict[str, Any] | None) -> Iterator[Record]:
        recipe, task = self._recipe, self._task
        seed_everything(self._order.run_seed)
        if state is not None:
            yield from self._state.restore_randomness(state)
        data = make_batches(
            task, recipe, self._order, start=self._progress.batches, device=self._device
        )
        with (
            stop_on_signals(self._folder) as stop,
            # Inside: a launcher sends SIGTERM while it is found out which rank was lost.
            self._ranks.ending_together(self._how_to_resume),
            data,
            deterministic_kernels(recipe.deterministic),
        ):
            if state is None:
                task.before_first_step(self._prepared)
                yield from self._strategy.before_first_step()
            self._steps.restart_clock()
            while True:
                yield from self._evaluate_and_save(stop)
                if self._progress.step == recipe.steps or self._evaluations.early_stopping.why:
                    break
                yield from self._change_formats()
                try:
                    self._take_step(data, stop)
                except DivergedError as error:
                    # Records of what led to it are yielded; the last good checkpoint stays.
                    yield from self._read(leaving=0)
                    raise self._steps.investigator.named(error) from error
                yield from self._read(leaving=1 if self._device.type == "cuda" else 0)
        yield from self._save_if_lacking()
        step, evaluations = self._progress.step, self._evaluations
        evaluations.vital_signs.require_alive(step, self._steps.investigator.named)
        yield from self._strategy.summary(step)
        best = evaluations.best_weights.load_into_model() or self._strategy.put_answer()
        if self._folder is not None:
            end = run_end(evaluations.early_stopping, recipe, step=step)
            self._ranks.at("writing the results")
            if self._ranks.is_main:
                write_results(self._prepared, task, self._folder, end=end, best=best)
            elif is_sharded(self._prepared.model):  # rank 0 collects what each of them has
                take_part_in_results(self._prepared, self._task, best=best)
            self._ranks.barrier()

    def _evaluate_and_save(self, stop: Stop) -> Iterator[Record]:
        """Evaluate and save when due, and stop if a signal came."""
        evaluation_is_due = self._is_due(self._recipe.eval.every, last=self._progress.evaluated)
        if self._ranks.several:  # a signal counts once all of them know of it
            stop = replace(stop, received=self._steps.stop)
        if evaluation_is_due and not stop.why:  # a scheduler grants little time to end
            yield from self._read(leaving=0)
            yield from self._evaluate()
        yield from self._saving.arrived()
        if self._is_due(self._recipe.checkpoint.every, last=self._saving.last):
            yield from self._read(leaving=0)
            yield from self._saving.save(self._progress)
            self._steps.restart_clock()
        if stop.why:
            yield from self._read(leaving=0)
            yield from self._save_if_lacking()
            raise stop.ended_after(self._progress.step)

    def _evaluate(self) -> Iterator[Record]:
        step = self._progress.step
        self._ranks.at(f"evaluating step {step}")
        try:
            measured = self._evaluations.measure(step)
        except Exception:  # of the task's own code
            yield from self._save_if_lacking()  # the steps so far are worth keeping
            raise
        self._progress = replace(self._progress, evaluated=step)
        yield from self._evaluations.account(*measured)
        self._steps.restart_clock()

    def _change_formats(self) -> Iterator[Record]:
        """Change to the next phase, apply adaptive precision, and let the strategy act."""
        step, adapter = self._progress.step, self._adapter
        if self._schedule.is_due(step):
            yield from self._change(partial(self._schedule.advance, step), adapter.begin)
        if wanted := adapter.decide(step):
            yield from self._change(lambda: wanted, adapter.apply)
        if self._strategy.is_due(step):
            act = partial(self._strategy.act, step, batches=self._progress.batches)
            yield from self._change(act, adapter.begin)

    def _change(
        self, change: Callable[[], Iterable[Record]], follow: Callable[[], None]
    ) -> Iterator[Record]:
        """Call `change` between two steps, without probes; then `follow` if formats changed."""
        yield from self._read(leaving=0)
        with self._steps.observer.probes_removed():
            records = list(change())
            # Also if they were changed back: captured graphs and counts are from before.
            changed = any(isinstance(record, PrecisionRecord) for record in records)
            if changed:
                follow()
        if changed:
            self._steps.investigator.begin_row()
            self._steps.drop_graphs()
        yield from records
        self._steps.restart_clock()

    def _is_due(self, every: int, *, last: int) -> bool:
        step = self._progress.step
        return step != last and (step == self._recipe.steps or (every > 0 and step % every == 0))

    def _take_step(self, data: BatchStream, stop: Stop) -> None:
        """Queue one step: forward and backward of each micro-batch, then the update."""
        step = self._progress.step + 1
        self._ranks.at(f"loading the batches of step {step}")
        batches, items = list[Batch](), 0
        for batch in islice(data, self._recipe.gradient_accumulation_steps):
            batches.append(batch)
            items += data.items
        self._ranks.at(f"training in step {step}")
        if self._ranks.several:
            batches = as_shares(batches, self._task, ranks=self._ranks, order=self._order)
        else:
            batches = self._task.as_one_step(batches)

        def after_update(outcome: Outcome) -> None:
            self._task.after_step(self._prepared, outcome)
            self._strategy.after_step(outcome)
            self._progress = self._progress.after(len(batches))

        self._steps.take(
            step,
            batches,
            items=items,
            after_update=after_update,
            forward_step=self._strategy.forward_step if self._strategy.is_forward_only else None,
            stop=stop.received,
        )

    def _read(self, *, leaving: int) -> Iterator[Record]:
        """Yield the records of queued steps except the last `leaving`. Synchronises with them."""
        while len(self._steps) > leaving:
            record, diagnosis = self._steps.landed()
            self._schedule.note(record)
            self._evaluations.vital_signs.note(record)
            self._strategy.note(record)
            yield record
            yield from diagnosis.findings
            observed = self._adapter.observed(self._steps.observer, record, diagnosis)
            every = self._recipe.health.every
            if self._ranks.several and every and record.step % every == 0:
                yield from merged(list(observed), self._ranks)
            else:
                yield from observed

    def _save_if_lacking(self) -> Iterator[Record]:
        yield from self._saving.save_if_lacking(self._progress)
        self._steps.restart_clock()


CUBLAS_WORKSPACE = ":4096:8"
"""What torch requires of cuBLAS before it calls its products deterministic."""


@contextmanager
def deterministic_kernels(requested: bool) -> Iterator[None]:
    """Use only deterministic kernels inside the block, if requested.

    On a GPU the backward pass of attention sums in any order. Deterministic steps take up to twice
    as long.
    """
    if not requested:
        yield
        return
    # Read by cuBLAS when it starts, and by torch at every product.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACE)
    before = torch.are_deterministic_algorithms_enabled()
    settings: Any = torch.utils.deterministic  # torch has no types for what is in it
    filled = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False  # costs time, and changes no result
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        settings.fill_uninitialized_memory = filled
