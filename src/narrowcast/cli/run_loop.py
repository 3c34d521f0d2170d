"""Shows a run on the terminal: its settings, each record, and the result."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from narrowcast.cli.view.profile_view import print_profile
from narrowcast.cli.view.progress import RunDisplay
from narrowcast.cli.view.screen import say, say_command
from narrowcast.config import Recipe
from narrowcast.errors import DivergedError
from narrowcast.precision.plan.plan import Plan
from narrowcast.precision.plan.policy import policy_from
from narrowcast.report.layers import bare_reason
from narrowcast.report.phrases import capital, count, duration, large
from narrowcast.runner.progress import measures
from narrowcast.runner.run import Run
from narrowcast.runs import StepRecord
from narrowcast.runs.commands import resume_command
from narrowcast.runs.tally import Tally
from narrowcast.strategies.hybrid.phase_formats import phase_policies
from narrowcast.training.checkpoints.export import WEIGHTS, RunEnd
from narrowcast.training.ending import EarlyStopping, run_end
from narrowcast.training.phase_plans import end_text, get_phases


def introduce(
    console: Console,
    recipe: Recipe,
    *,
    plan: Plan,
    notes: Sequence[str],
    folder: str,
    ranks: int = 1,
) -> None:
    """Print what is about to be trained, how, on what, and where it is saved."""
    parameters = sum(module.parameters for module in plan.modules)
    title = Text(recipe.name or recipe.workload, style="bold")
    console.print(title.append(f"  {recipe.description}", style="not bold"))
    batch = (
        f"{recipe.gradient_accumulation_steps} × " if recipe.gradient_accumulation_steps > 1 else ""
    )
    epochs = f" ({count(recipe.epochs, 'epoch')})" if recipe.epochs else ""
    course = f"{count(recipe.steps, 'step')}{epochs} of {batch}{count(recipe.batch_size, 'sample')}"
    say(console, "model", f"{large(parameters)} parameters, {course}")
    for number, note in enumerate(notes):
        say(console, "" if number else "task", note)
    say(console, "formats", _formats(recipe, plan))
    shared = f", {ranks} ranks" if ranks > 1 else ""
    say(console, "device", f"{plan.hardware.name} ({plan.hardware.device}){shared}")
    say_command(console, "folder", folder)


def _formats(recipe: Recipe, plan: Plan) -> str:
    """Return the policy of a run, how much of it is native or emulated, and its later phases."""
    phases = get_phases(recipe.precision)
    name, text = phases[0].policy, str(plan.policy)
    if recipe.strategy.has_phase_policies:
        name = phase_policies(recipe.strategy, recipe.precision.policy)["warmup"]
    written = text if name == text else f"{name} ({text})"
    ways = Counter(module.how for module in plan.modules)
    parts = [f"{n} {'module' if n == 1 else 'modules'} {how}" for how, n in ways.items()]
    emulated = next((m for m in plan.modules if m.how == "emulated"), None)
    why = f": {bare_reason(emulated.to_json())}" if emulated else ""
    ends = [end_text(phase.until, steps=recipe.steps) for phase in phases]
    later = [f"; after {end} {p.policy}" for end, p in zip(ends, phases[1:], strict=False)]
    return f"{written}; {', '.join(parts)}{why}{''.join(later)}"


def run_loop(run: Run, *, console: Console) -> None:
    """Show each record as it comes, then print what came of the run and where it is."""
    if run.folder is None:  # of a rank that writes and prints nothing
        for _ in run.records():
            pass
        return
    task = run.task.info
    tally, stopping = Tally(steps=run.recipe.steps), EarlyStopping(run.recipe.eval, task)
    for record in run.earlier:
        tally = tally.after(record) if isinstance(record, StepRecord) else tally
        stopping.note(record)
    later = get_phases(run.recipe.precision)[1:]
    policies = [policy_from(phase.policy or "default", run.plan.hardware) for phase in later]
    scaled = any(policy.needs_loss_scale for policy in [run.plan.policy, *policies])
    display, rates = RunDisplay(console, tally.resumed(), task=task, scaled=scaled), list[float]()
    try:
        with display:
            for number, record in enumerate(run.records(tell=display.warn)):
                for line in () if number else run.task.notices():
                    display.note(line)
                stopping.note(record)
                display.show(record)
                if isinstance(record, StepRecord) and record.seconds > 0:
                    rates.append(record.items / record.seconds)
    except DivergedError:
        _conclude(console, run, display, stopping, diverged=True)
        raise
    _conclude(console, run, display, stopping, diverged=False)
    profiled = bool(run.recipe.profile.steps)
    if profiled:
        print_profile(console, run.folder.path)
    if profiled or run.plan.hardware.device.startswith("cuda"):
        from narrowcast.runner.achieved import achieved_line

        if text := achieved_line(run.recipe, run.task, run.plan, rates):
            say(console, "achieved", text)


def _conclude(
    console: Console, run: Run, display: RunDisplay, stopping: EarlyStopping, *, diverged: bool
) -> None:
    """Print what came of a run, where it is, and what to type next."""
    assert run.folder is not None
    folder, task, tally = run.folder.path, display.task, display.tally
    end = run_end(stopping, run.recipe, step=tally.step)
    text = f"  {count(tally.step, 'step')} in {duration(tally.seconds)}"
    if tally.seconds:
        text += f", {large(tally.items / tally.seconds)} {task.units}/s"
    text += f", {count(tally.skipped)} skipped"
    word = ("diverged", "bold red") if diverged else ("done", "bold green")
    console.print(Text.assemble(word, text))
    if end.why:
        say(console, "note", capital(end.ending_text))
    if display.metrics:
        say(console, "evaluated", Text(measures(task, display.metrics), style="bold"))
    say_command(console, "report", str(folder / "report.html"))
    if diverged:
        return  # there are no weights, and more steps would not help
    say_command(console, "weights", str(folder / (run.task.weights_path or WEIGHTS)))
    if end.exported:
        best = measures(task, dict(end.measured))
        say(console, "", f"from step {count(end.exported)}, the best evaluation: {best}")
    for number, line in enumerate(run.task.summary() if run.task.summary else ()):
        say(console, "" if number else "result", line)
    _suggest_more(console, folder, end=end)


def already_done(console: Console, folder: Path, *, end: RunEnd) -> None:
    """Print that a run has nothing left to do, and how to give it more."""
    done = (
        f"finished: it {end.ending_text}" if end.why else f"finished its {count(end.step, 'step')}"
    )
    console.print(f"the run in {folder} has {done}", soft_wrap=True)
    say_command(console, "report", str(folder / "report.html"))
    _suggest_more(console, folder, end=end)


def _suggest_more(console: Console, folder: Path, *, end: RunEnd) -> None:
    if end.why or end.extendable:
        more = "eval.patience=0" if end.why else f"steps={2 * end.requested_steps}"
        say_command(console, "go on", f"{resume_command(folder)} {more}")
