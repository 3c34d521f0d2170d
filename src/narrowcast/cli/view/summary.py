"""What a run is, said before it begins, and what came of it, said at its end."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from narrowcast.cli.view.phases import course_text
from narrowcast.cli.view.screen import say, say_command
from narrowcast.config import Recipe
from narrowcast.precision.plan.plan import Plan
from narrowcast.report.layers import bare_reason
from narrowcast.report.phrases import capital, count, duration, large
from narrowcast.runner.progress import measures
from narrowcast.runs.commands import resume_command
from narrowcast.runs.tally import Tally
from narrowcast.runs.task_info import TaskInfo
from narrowcast.strategies.hybrid.phase_formats import phase_policies
from narrowcast.training.checkpoints.export import RunEnd
from narrowcast.training.phase_plans import get_phases


def introduce(
    console: Console, recipe: Recipe, *, plan: Plan, notes: Sequence[str], folder: str
) -> None:
    """Say what is about to be trained, how, on what, and where it is kept."""
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
    say(console, "formats", formats(recipe, plan))
    say(console, "device", f"{plan.hardware.name} ({plan.hardware.device})")
    say_command(console, "folder", folder)


def formats(recipe: Recipe, plan: Plan) -> str:
    """Say which policy a run has, and how much of it is native or emulated, and why."""
    name, text = get_phases(recipe.precision)[0].policy, str(plan.policy)
    if recipe.strategy.has_phase_policies:
        name = phase_policies(recipe.strategy, recipe.precision.policy)["warmup"]
    written = text if name == text else f"{name} ({text})"
    ways = Counter(module.how for module in plan.modules)
    parts = [f"{n} {'module' if n == 1 else 'modules'} {how}" for how, n in ways.items()]
    emulated = next((m for m in plan.modules if m.how == "emulated"), None)
    why = f": {bare_reason(emulated.to_json())}" if emulated else ""
    return f"{written}; {', '.join(parts)}{why}{course_text(recipe)}"


def conclude(
    console: Console,
    folder: Path,
    *,
    page: Path,
    weights: Path,
    task: TaskInfo,
    tally: Tally,
    metrics: dict[str, float],
    end: RunEnd,
    diverged: bool = False,
) -> None:
    """Say what came of a run, where it is, and what to type next.

    Of one that has diverged there are no weights, and more of the same would not help.
    """
    text = f"  {count(tally.step, 'step')} in {duration(tally.seconds)}"
    if tally.seconds:
        text += f", {large(tally.items / tally.seconds)} {task.units}/s"
    text += f", {count(tally.skipped)} skipped"
    word = ("diverged", "bold red") if diverged else ("done", "bold green")
    console.print(Text.assemble(word, text))
    if end.why:
        say(console, "note", capital(end.ending_text))
    if metrics:
        say(console, "evaluated", Text(measures(task, metrics), style="bold"))
    say_command(console, "report", str(page))
    if diverged:
        return
    say_command(console, "weights", str(weights))
    if end.exported:
        best = measures(task, dict(end.measured))
        say(console, "", f"from step {count(end.exported)}, the best evaluation: {best}")
    _suggest_more(console, folder, end=end)


def already_done(console: Console, folder: Path, *, end: RunEnd) -> None:
    """Say that a run has nothing left to do, and how to give it more."""
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
