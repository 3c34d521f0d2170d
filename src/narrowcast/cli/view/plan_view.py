"""A plan as text. On a narrow terminal each reason gets a letter and is written below the table."""

from collections.abc import Mapping, Sequence
from string import ascii_lowercase
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from narrowcast.cli.view.screen import new_table, say
from narrowcast.config import Recipe
from narrowcast.precision.plan.fusing import piece_lines
from narrowcast.precision.plan.plan import Plan
from narrowcast.report.layers import Layer, bare_reason, layers, width
from narrowcast.report.phrases import count, duration, large, size, written
from narrowcast.runner.fitting import LargestModel, Prediction
from narrowcast.training.phase_plans import get_phases, phases_json

COLOURS = {"full": "", "half": "cyan", "eight": "magenta", "four": "red", "other": ""}
HOW_COLOURS = {"native": "green", "emulated": "yellow", "unchanged": "dim"}
ROLES = {
    "buckets": "DDP buckets",
    "gathered": "gathered blocks",
    "accumulated": "whole gradients between micro-batches",
    "params": "weights",
    "grads": "gradients",
    "master": "master",
    "moments": "moments",
    "fp8": "fp8 weights and tables",
}
ROOM_FOR_REASONS = 150
"""Columns from which most reasons fit beside the eight columns before them."""
ROOM_FOR_KINDS = 96


def print_task_row(console: Console, row: Mapping[str, Any]) -> None:
    """Print the row of the task table, what it sets, and what is set elsewhere."""
    size = f"{row['size']} ({large(row['parameters'])} parameters)"
    say(console, "task", f"{row['task']}, {size}, {row['hardware']}: {row['why']}")
    say(console, "why", row["reason"])
    by_task, by_others = list[str](), list[str]()
    for key, entry in row["settings"].items():
        text = f"{key}={written(entry['value'])}"
        if entry["origin"] == f"task {row['task']}":
            by_task.append(text)
        else:
            by_others.append(f"{text} ({entry['origin']})")
    say(console, "sets", ", ".join(by_task) or "nothing, because every setting is set already")
    if by_others and by_task:
        say(console, "not set", ", ".join(by_others))
    for text in row["left_out"]:
        say(console, "left out", text)


def print_strategy(console: Console, row: Mapping[str, Any] | None) -> None:
    """Print what a strategy does and stores; nothing for plain training."""
    if row is None:
        return
    stored = {name: size(n) for name, n in row["bytes"].items() if n}
    more = "; ".join(f"{name} {n}" for name, n in stored.items())
    say(
        console, "strategy", f"{row['name']}, {row['preset']}" + (f"; keeps {more}" if more else "")
    )
    for sentence in row["lines"]:
        say(console, "", sentence)
    phases = row["phases"]
    if len({str(phase) for phase in phases.values()}) > 1:
        for name, phase in phases.items():
            memory = size(sum(phase["bytes"].values()))
            # Averages and the lookahead point are the same in all, and above.
            say(console, name, f"{phase['policy']}; {memory} and activations (predicted)")


def print_phases(console: Console, recipe: Recipe, plans: Sequence[Plan]) -> None:
    """Print the policy and end of each phase; nothing for a run with one policy."""
    for number, phase in enumerate(phases_json(recipe, plans).get("phases", []), start=1):
        memory = size(sum(phase["bytes"].values()))
        text = f"{phase['policy']}, until {phase['until']}; {memory} and activations"
        say(console, f"phase {number}", text)
    if len(plans) > 1:
        console.print()


def print_ranks(console: Console, row: Mapping[str, Any] | None) -> None:
    """Print what one of several ranks stores and sends; nothing for one rank."""
    if row is None:
        return
    among = f", {row['shard']} share a copy" if row["strategy"] == "hsdp" else ""
    say(console, "ranks", f"{row['ranks']}, {row['strategy']}{among}; predicted:")
    say(console, "per rank", _memory(row["bytes"]))
    sent = " + ".join(f"{name} {size(n)}" for name, n in row["traffic"].items())
    say(console, "sent", f"{sent} per rank and step")
    if "seconds" in row:
        rates = f"{row['link_rate']:g} GB/s in a machine, {row['network_rate']:g} between"
        text = f"{row['seconds']:.3g} s if nothing overlaps it ({rates}: data sheet)"
        say(console, "takes", text)


def print_prediction(
    console: Console,
    prediction: Prediction,
    *,
    steps: int,
    limit: int | None,
    batch: int | None,
    model: LargestModel | None,
) -> None:
    """Print the predicted memory and time of a step, and what limits them."""
    memory, seconds = prediction.memory, prediction.seconds
    if memory is None:
        say(console, "a step", f"not predicted: {prediction.missing}")
        return
    parts = [f"{ROLES.get(role, role)} {size(n)}" for role, n in memory.roles.items() if n]
    say(console, "a step", f"{size(memory.allocated)} at its peak: {' + '.join(parts)}")
    context = f", the CUDA context {size(memory.context)}" if memory.context else ""
    say(console, "", f"the allocator takes {size(memory.reserved)}{context}")
    for note in memory.notes:
        say(console, "", note)
    if limit is not None:
        verdict = "fits" if memory.needed <= limit else "does not fit"
        most = {None: "", 0: "; no batch fits"}.get(batch, f"; largest batch_size: about {batch}")
        say(console, "budget", f"{verdict}: {size(memory.needed)} of {size(limit)}{most}")
        if model is not None and model.most_blocks:
            wide = (
                f"{model.most_blocks} blocks (this has {model.blocks}), or {model.width:.2g} times"
            )
            say(console, "", f"largest model with this batch: about {wide} the width")
    if seconds is not None:
        each = f"{duration(seconds.seconds)} per step, bound by {seconds.bound}"
        say(console, "takes", f"{each}; {steps} steps: {duration(steps * seconds.seconds)}")
        say(console, "", f"rates: {seconds.rates}")


def titles(recipe: Recipe) -> list[str]:
    """Return what stands above the table of each phase."""
    phases = get_phases(recipe.precision)
    if len(phases) == 1:
        return [recipe.name]
    return [f"{recipe.name}, phase {n} of {len(phases)}" for n in range(1, len(phases) + 1)]


def print_plan(console: Console, plan: Plan, *, title: str, every: bool) -> None:
    """Print the table of `plan`; blocks that are alike share a row unless `every` is set."""
    described = plan.to_json()
    modules = described["modules"]
    rows = [layers([module])[0] for module in modules] if every else layers(modules)
    console.print(Text.assemble((title, "bold"), f"  {described['policy']}"))
    console.print(Text(f"on {described['hardware']}", style="dim"))
    if console.width >= ROOM_FOR_REASONS:
        console.print(_wide_table(rows))
        console.print()
    else:
        letters = _letters(rows)
        console.print(_narrow_table(rows, letters, kinds=console.width >= ROOM_FOR_KINDS))
        console.print()
        say(
            console,
            "products",
            "forward, grad-input, grad-weight; one format if all three are the same",
        )
        for reason, letter in letters.items():
            say(console, f"why {letter}", reason)
    say(console, "outside", _functional(described["functional"]))
    parameters = sum(module.parameters for module in plan.modules)
    say(console, "in all", f"{count(len(modules), 'module')}, {large(parameters)} parameters")
    say(console, "memory", _memory(described["bytes"]))
    for name, text in [*plan.memory.lines, *piece_lines(plan.fused)]:
        say(console, name, text)


def _wide_table(rows: list[Layer]) -> Table:
    table = _table("module", "kind", "forward", "grad-input", "grad-weight", "weights", "how")
    table.add_column("parameters", justify="right")
    table.add_column("reason", style="dim")
    for row in rows:
        formats = (row.forward, row.grad_input, row.grad_weight, row.params)
        table.add_row(
            _label(row),
            row.kind,
            *(_format(name) for name in formats),
            _how(row),
            large(row.parameters),
            row.reason,
        )
    return table


def _narrow_table(rows: list[Layer], letters: dict[str, str], *, kinds: bool) -> Table:
    table = _table("module", *(["kind"] if kinds else []), "products", "weights", "how")
    table.add_column("params", justify="right")
    table.add_column("why")
    for row in rows:
        products = (row.forward, row.grad_input, row.grad_weight)
        shown = products[:1] if len(set(products)) == 1 else products
        table.add_row(
            _label(row),
            *([row.kind] if kinds else []),
            Text(" ").join(_format(name) for name in shown),
            _format(row.params),
            _how(row),
            large(row.parameters),
            letters[row.reason],
        )
    return table


def _table(*columns: str) -> Table:
    table = new_table()
    for name in columns:
        table.add_column(name, no_wrap=name != "module", overflow="fold")
    return table


def _letters(rows: list[Layer]) -> dict[str, str]:
    """Return a letter for each reason: a to z, then aa, ab and so on."""
    reasons = list(dict.fromkeys(row.reason for row in rows))
    names = [*ascii_lowercase, *(a + b for a in ascii_lowercase for b in ascii_lowercase)]
    return dict(zip(reasons, names, strict=False))


def _label(row: Layer) -> Text:
    times = f" ×{len(row.names)}" if len(row.names) > 1 else ""
    return Text.assemble(row.label, (times, "bold"))


def _format(name: str) -> Text:
    return Text(name, style=COLOURS[width(name)])


def _how(row: Layer) -> Text:
    return Text(row.how, style=HOW_COLOURS.get(row.how, ""))


def _functional(functional: dict[str, Any]) -> str:
    return (
        f"products outside modules (attention, matmul): {functional['format']}, "
        f"{functional['how']}: {bare_reason(functional)}"
    )


def _memory(by_role: dict[str, int]) -> str:
    parts = [f"{ROLES.get(role, role)} {size(n)}" for role, n in by_role.items() if n]
    return f"{' + '.join(parts)} = {size(sum(by_role.values()))}, and activations"
