"""A run from a recipe to records, a folder and a report."""

import contextlib
import logging
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, final

from torch import nn

from narrowcast.config import LoadedRecipe, Recipe
from narrowcast.errors import (
    ConfigError,
    DivergedError,
    Interrupted,
    NarrowcastError,
    UnsupportedError,
)
from narrowcast.hardware import detect_hardware
from narrowcast.hardware.randomness import OwnRandomness
from narrowcast.precision.plan.plan import Plan
from narrowcast.precision.step.prepared import Prepared
from narrowcast.report.trackers import Trackers, open_trackers, require_trackers
from narrowcast.runner.assemble import Assembled, assemble, check_settings, plan_json
from narrowcast.runner.by_task import decided
from narrowcast.runner.changes import (
    PLAN,
    continued,
    notices,
    ranks_notice,
    recorded_task_row,
    require_acceptable,
)
from narrowcast.runner.finished import report_is_due, require_places, write_due_report
from narrowcast.runner.fitting import (
    PREDICTED,
    choose_recomputed,
    describe_exhaustion,
    earlier_prediction,
    fit,
    fit_notices,
    is_exhausted,
    predict,
)
from narrowcast.runner.launch import parallel_settings, remember_folder
from narrowcast.runner.out_dir import require_no_run
from narrowcast.runner.progress import RunProgress, find_display
from narrowcast.runs import (
    EvalRecord,
    FindingRecord,
    Record,
    RunFolder,
    StepRecord,
    StrategyRecord,
    describe_environment,
)
from narrowcast.runs.commands import resume_command
from narrowcast.runs.folder import RECORDS, RESOLVED
from narrowcast.runs.tally import Tally
from narrowcast.training.checkpoints.resume import latest_state, require_records, rewind_to
from narrowcast.training.parallel import ALONE, RunRanks, join, running_ranks
from narrowcast.training.task import Task
from narrowcast.workloads import load_recipe

Tell = Callable[[str], None]
"""Takes a sentence for each tracker that fails; the run continues."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """Result of a finished run."""

    step: int
    """Last step; before `recipe.steps` if training stopped early."""
    skipped: int
    """Skipped steps of the whole run."""
    seconds: float
    """Time of all steps, without evaluations and checkpoints."""
    loss: float
    """Exponential moving average of the training loss."""
    metrics: dict[str, float]
    """Metrics of the last evaluation; empty if there was none."""
    findings: list[FindingRecord] = field(repr=False)
    """Problems that were found during training."""
    folder: Path | None
    """The folder with records, weights and report.html; None if nothing was written."""


@final
class Run:
    """A run that is ready to train: call `finish()`, or iterate over it once.

    Each record is saved before it is yielded. The report is written when the run ends, is
    interrupted or diverges. If you leave the loop early, `resume` continues from the last
    checkpoint.
    """

    def __init__(
        self,
        loaded: LoadedRecipe,
        assembled: Assembled,
        records: Generator[Record],
        *,
        folder: RunFolder | None,
        resumed_from: int | None = None,
        notices: Sequence[str] = (),
        earlier: Sequence[Record] = (),
        task_row: Mapping[str, Any] | None = None,
    ) -> None:
        self.loaded, self.folder = loaded, folder
        self.resumed_from = resumed_from
        """Step that a resumed run continues from; None for a new run."""
        self.notices = list(notices)
        """What `memory.fit=auto` changed, or how the rest of a resumed run will differ."""
        self.task_row = task_row
        """The row that `precision.task` selected, as in plan.json, or None."""
        self._assembled, self._records = assembled, records
        self.earlier = list(earlier)
        """Records before the step it is resumed from."""
        self._state, self._step = "not started", resumed_from or 0
        self._forgotten = weakref.finalize(
            self,
            warnings.warn,
            f"The run of {self.recipe.name!r} was never started, so it trained nothing. Call "
            "run.finish(), or iterate over the run.",
        )
        if self._step >= self.recipe.steps:  # there is nothing to train, but a model to use
            self._forgotten.detach()

    def __repr__(self) -> str:
        name, plan = self.recipe.name or self.recipe.workload, self.plan
        where = f", folder {self.folder.path}" if self.folder is not None else ""
        todo = "; call finish() to train" if self._state == "not started" else ""
        return (
            f"<Run {name}: step {self._step} of {self.recipe.steps}, {plan.policy} on "
            f"{plan.hardware.device}{where}; {self._state}{todo}>"
        )

    @property
    def recipe(self) -> Recipe:
        """All settings of the run."""
        return self.loaded.recipe

    @property
    def task(self) -> Task:
        """The model, its data and its evaluation."""
        return self._assembled.task

    @property
    def prepared(self) -> Prepared:
        """The model in its formats, with its optimizer."""
        return self._assembled.prepared

    @property
    def model(self) -> nn.Module:
        """The trained model; `prepared.fp32_state_dict()` has its weights in full precision."""
        return self.prepared.model

    @property
    def plan(self) -> Plan:
        """The active plan."""
        return self.prepared.plan

    def finish(self, *, progress: bool | None = None) -> RunResult:
        """Train to the end.

        Args:
            progress: Whether to show progress on stderr. By default a terminal shows one line and
                a notebook a bar, and nothing is shown anywhere else.

        Returns:
            Last step, loss, metrics and findings, and where the run's files are.

        Example:
            >>> result = nc.train("quickstart", ["steps=50"], out="runs/mine").finish()
            >>> result.metrics["loss"]
        """
        tally = Tally(steps=self.recipe.steps)
        for record in self.earlier:
            tally = tally.after(record) if isinstance(record, StepRecord) else tally
        shown = RunProgress(
            tally.resumed(),
            task=self.task.info,
            scaled=self.prepared.loss_scale is not None,
            display=find_display(progress),
        )
        try:
            for record in self:
                shown.take(record)
        finally:
            shown.close()
        return RunResult(
            step=shown.tally.step,
            skipped=shown.tally.skipped,
            seconds=shown.tally.seconds,
            loss=shown.tally.loss,
            metrics=shown.metrics,
            findings=shown.findings,
            folder=None if self.folder is None else self.folder.path,
        )

    def __iter__(self) -> Iterator[Record]:
        """Train, and yield records as they happen.

        The run has its own random generators, so what you draw in the loop does not change it.
        """
        randomness = OwnRandomness(next(self.model.parameters()).device)
        with contextlib.closing(self.records()) as records:
            while True:
                randomness.swap()
                try:
                    record = next(records)
                except StopIteration:
                    return
                finally:
                    randomness.swap()
                yield record

    def records(self, tell: Tell = _log.warning) -> Generator[Record]:
        """Train, and yield records; `tell` gets a sentence for each tracker that fails.

        Uses torch's global generators, as `narrowcast train` does.
        """
        if self._state != "not started":
            again = "nc.train() again" if self.folder is None else "nc.resume() with its folder"
            raise ConfigError(f"A run trains once, got one that is {self._state}. Call {again}.")
        self._forgotten.detach()
        self._state = "training"
        try:
            with contextlib.closing(self._in_folder(tell)) as records:
                for record in records:
                    self._step = record.step
                    yield record
            self._state = "finished"
        finally:
            if self._state == "training":
                self._state = "ended early"

    def _in_folder(self, tell: Tell) -> Generator[Record]:
        if self.folder is None:
            with contextlib.closing(self._records) as records:
                yield from records
            return
        self.folder.claim()
        with self.folder as folder:
            yield from self._recorded(folder, tell)

    def _recorded(self, folder: RunFolder, tell: Tell) -> Generator[Record]:
        step = self.resumed_from or 0
        report_is_due(folder.path)
        try:
            with (
                contextlib.closing(self._records) as records,
                contextlib.closing(self._trackers(tell)) as trackers,
            ):
                for record in records:
                    folder.write(record)
                    trackers.take(record)
                    step = record.step
                    yield record
        except Interrupted as stop:
            _, lines = _reported(folder.path)
            raise Interrupted(
                "\n".join([f"Interrupted after step {step} of {self.recipe.steps}.", *lines])
                + f"\nResume with: {resume_command(folder.path)}"
            ) from stop
        except DivergedError as error:
            page, lines = _reported(folder.path)
            led = [f"Report: {page}"] if page else []
            raise DivergedError("\n".join([str(error), *led, *lines])) from error
        except RuntimeError as error:
            if not is_exhausted(error):
                raise
            text = describe_exhaustion(error, self.prepared, folder.path, step=step)
            # Of the error itself nothing is kept: its frames hold the tensors of the step.
            raise UnsupportedError(
                f"{text}\nResume with less, for example: {resume_command(folder.path)} "
                "memory.activation_checkpointing=blocks"
            ) from None
        write_due_report(folder.path)

    def close(self) -> None:
        """Stop the run and release its folder, so that another process may resume it."""
        self._forgotten.detach()
        if self._state == "not started":
            self._state = "closed"
        self._records.close()
        if self.folder is not None:
            self.folder.close()

    def __enter__(self) -> Self:
        """Return the run."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close it."""
        self.close()

    def _trackers(self, tell: Tell) -> Trackers:
        assert self.folder is not None
        return open_trackers(
            self.recipe.trackers,
            folder=self.folder.path,
            earlier=self.earlier,
            recipe_text=self.loaded.text,
            settings={key: entry["value"] for key, entry in self.loaded.resolved().items()},
            tell=tell,
        )


def train(
    recipe: str | Path | LoadedRecipe,
    overrides: Iterable[str] = (),
    *,
    out: str | Path | None = None,
) -> Run:
    """Set up a run of a recipe. Call `finish()` of the result, or iterate over it, to train.

    `recipe` is a shipped name, a YAML file, or the result of `load_recipe`. `overrides` are
    KEY=VALUE as on the command line. `out` is the run folder, new or empty; without one nothing is
    written. Raises for invalid settings before anything is trained.
    """
    loaded = _loaded(recipe, overrides)
    return start(loaded, out=out, ranks=join(loaded.recipe.parallel, device=loaded.recipe.device))


def start(loaded: LoadedRecipe, *, out: str | Path | None, ranks: RunRanks) -> Run:
    """Set up a run of a loaded recipe on the ranks that this process has joined; see `train`."""
    with ranks.ending_together():
        return _started(loaded, out=out, ranks=ranks)


def _started(loaded: LoadedRecipe, *, out: str | Path | None, ranks: RunRanks) -> Run:
    ranks.at("building the model")
    if out is not None and ranks.is_main:
        require_no_run(Path(out))
    require_trackers(loaded.recipe.trackers)
    if out is None and loaded.recipe.trackers:
        raise ConfigError(
            f"trackers need a run folder, got trackers={', '.join(loaded.recipe.trackers)} without "
            "one. Pass out=, or no trackers."
        )
    hardware = check_settings(loaded.recipe)
    by_task = decided(loaded, hardware)
    fitted, prediction = fit(by_task.loaded, hardware)
    changed = fit_notices(fitted, prediction)
    by_task = replace(by_task, loaded=fitted)
    assembled = assemble(fitted.recipe, ranks=ranks)
    loaded = by_task.loaded.for_samples(len(assembled.task.train_data))
    path = None if out is None else Path(out)
    records = assembled.records(loaded.recipe, folder=path)
    if loaded.recipe.strategy.has_baseline:
        records = _with_baseline(loaded.recipe, records, ranks=ranks)
    if path is None or not ranks.is_main:
        return Run(loaded, assembled, records, folder=None, notices=changed, task_row=by_task.row)
    folder = RunFolder.create(
        path,
        recipe_text=loaded.text,
        resolved=loaded.resolved(),
        environment=_environment(ranks),
    )
    remember_folder(ranks, path)
    folder.set_task_info(assembled.task.info)
    info = plan_json(loaded.recipe, assembled.plans, task_row=by_task.row)
    predicted = {} if prediction is None else {PREDICTED: prediction.to_json()}
    folder.write_json(PLAN, {**info, **predicted})
    return Run(loaded, assembled, records, folder=folder, notices=changed, task_row=by_task.row)


def resume(folder: str | Path, overrides: Iterable[str] = (), *, accept: Iterable[str] = ()) -> Run:
    """Set up a run to continue from its last checkpoint, or from the start if it has none.

    `overrides` may change the number of steps and settings that do not decide a step. `accept`
    names differences to accept: "data", "settings", "records". Everything is checked before
    anything in the folder changes. A finished run yields no step, and has its model.
    """
    settings = parallel_settings(folder, list(overrides := list(overrides)))
    ranks = ALONE if running_ranks() == 1 else join(settings, device="auto")
    return start_again(folder, overrides, accept=accept, ranks=ranks)


def start_again(
    folder: str | Path, overrides: Sequence[str], *, accept: Iterable[str] = (), ranks: RunRanks
) -> Run:
    """Set up a run to continue on the ranks that this process has joined; see `resume`."""
    with ranks.ending_together():
        return _started_again(folder, overrides, accept=accept, ranks=ranks)


def _started_again(
    folder: str | Path, overrides: Sequence[str], *, accept: Iterable[str], ranks: RunRanks
) -> Run:
    ranks.at("loading the run")
    accepted = sorted(set(accept))
    require_acceptable(accepted)
    with contextlib.ExitStack() as stack:
        # What the checkpoint has can be put back, so it need not be there.
        missing = {"settings": RESOLVED, "records": RECORDS}
        needs = [name for word, name in missing.items() if word not in accepted]
        run = stack.enter_context(RunFolder.open(folder, needs=needs))
        if ranks.is_main:
            run.claim()
            require_places(run.path)
        state = latest_state(run)
        recipes = continued(run, list(overrides), state=state, accept=accepted)
        loaded = recipes.after
        ranks.require(loaded.recipe.parallel)
        require_trackers(loaded.recipe.trackers)
        if ranks.is_main:
            require_records(run, state, accept=accepted)
        with _where_it_began(run):
            assembled = assemble(loaded.recipe, ranks=ranks)
        loaded = loaded.for_samples(len(assembled.task.train_data))
        records = assembled.records(loaded.recipe, folder=run.path, resume=state, accept=accepted)
        if state is None and loaded.recipe.strategy.has_baseline:
            records = _with_baseline(loaded.recipe, records, ranks=ranks)
        run.require_task_info(assembled.task.info)
        message = notices(
            run,
            recipes.before.recipe,
            loaded.recipe,
            plan=assembled.plans[0],
            dropped=recipes.dropped,
        )
        row = recorded_task_row(run)
        ranks.barrier()
        step = 0 if state is None else int(state["step"])
        if not ranks.is_main:
            return Run(loaded, assembled, records, folder=None, resumed_from=step)
        message += ranks_notice(state, ranks)
        # From here on the folder changes.
        run.set_task_info(assembled.task.info)
        earlier = rewind_to(run, state)
        run.write_json(RESOLVED, loaded.resolved())
        info = plan_json(loaded.recipe, assembled.plans, task_row=row)
        run.write_json(PLAN, {**info, **earlier_prediction(run.path)})
        message += run.add_session(
            {**_environment(ranks), "accepted": accepted, "notices": message}
        )
        stack.pop_all()  # it stays open, for the records to come
    remember_folder(ranks, run.path)
    return Run(
        loaded,
        assembled,
        records,
        folder=run,
        resumed_from=step,
        notices=message,
        earlier=earlier,
        task_row=row,
    )


def _environment(ranks: RunRanks) -> dict[str, Any]:
    return {**describe_environment(), **({"ranks": ranks.size} if ranks.several else {})}


@contextlib.contextmanager
def _where_it_began(run: RunFolder) -> Iterator[None]:
    """Add the original working directory to errors, because relative paths start there."""
    try:
        yield
    except ConfigError as error:
        began = run.began_in()
        if began is None or began == str(Path.cwd()):
            raise
        raise ConfigError(
            f"{error}\nThe run started in {began}, and relative paths start there. Resume it "
            "there, or set the paths of its data."
        ) from error


def plan_recipe(
    recipe: str | Path | LoadedRecipe, overrides: Iterable[str] = (), *, phase: int = 1
) -> Plan:
    """Return the plan of a recipe on this machine, for one phase; allocates nothing.

    `plan.memory.predicted` is the memory of a step, of the phase that needs most.
    """
    loaded = _loaded(recipe, overrides)
    hardware = detect_hardware(loaded.recipe.device)
    settled = choose_recomputed(decided(loaded, hardware).loaded, hardware)
    plans = predict(settled.recipe, hardware).plans
    if not 1 <= phase <= len(plans):
        raise ConfigError(
            f"phase must be from 1 to {len(plans)}, the number of phases of this recipe, got "
            f"{phase}."
        )
    return plans[phase - 1]


def _reported(folder: Path) -> tuple[Path | None, list[str]]:
    """Write the report of a run that ends early; return it or the lines of its error."""
    try:
        return write_due_report(folder), []
    except NarrowcastError as error:
        return None, [str(error)]


def _loaded(recipe: str | Path | LoadedRecipe, overrides: Iterable[str]) -> LoadedRecipe:
    if not isinstance(recipe, LoadedRecipe):
        return load_recipe(recipe, overrides)
    terms = list(overrides)
    if terms:
        raise ConfigError(
            f"overrides cannot be added to a loaded recipe, got {terms[0]}. Pass them to "
            "load_recipe()."
        )
    return recipe


def _with_baseline(
    recipe: Recipe, records: Generator[Record], *, ranks: RunRanks
) -> Generator[Record]:
    """Train without the strategy first; yield its evaluations as records of step 0."""
    without = recipe.strategy.model_copy(update={"enabled": False})
    plain = recipe.model_copy(update={"strategy": without, "trackers": ()})
    assembled, seconds = assemble(plain, ranks=ranks), 0.0
    for record in assembled.records(plain, folder=None):
        match record:
            case StepRecord():
                seconds += record.seconds
            case EvalRecord():
                yield StrategyRecord(
                    step=0,
                    phase="warmup",
                    event="baseline",
                    what="plain training",
                    why="baseline for the comparison",
                    values={"step": float(record.step), **record.metrics},
                    seconds=seconds,
                )
            case _:
                pass
    del assembled  # its memory is the hybrid run's now
    yield from records
