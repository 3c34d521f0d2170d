"""A plan as a table: a row for each module or block of modules, then what they come to.

Where there is room every row has its reason; on a narrow terminal reasons, which are few and long,
get a letter each and stand below.
"""

from string import ascii_lowercase
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from narrowcast.cli.view.screen import say
from narrowcast.precision.plan.fusing import piece_lines
from narrowcast.precision.plan.plan import Plan
from narrowcast.report.layers import Layer, bare_reason, layers, width
from narrowcast.report.phrases import count, large, size

COLOURS = {"full": "", "half": "cyan", "eight": "magenta", "four": "red", "other": ""}
HOW_COLOURS = {"native": "green", "emulated": "yellow", "unchanged": "dim"}
ROLES = {
    "params": "weights",
    "grads": "gradients",
    "master": "master",
    "moments": "moments",
    "fp8": "weights in fp8",
}
ROOM_FOR_REASONS = 150
"""Columns from which most reasons fit beside the eight columns before them."""
ROOM_FOR_KINDS = 96


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
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for name in columns:
        table.add_column(name, no_wrap=name != "module", overflow="fold")
    return table


def _letters(rows: list[Layer]) -> dict[str, str]:
    """Give each reason a letter: a to z, then aa, ab and so on."""
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
