"""A plan as a table, for whoever prints it or looks at it in a notebook."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from narrowcast.hardware import Hardware, Support
from narrowcast.precision.plan.folding import folded, groups_alike
from narrowcast.precision.plan.module_plan import ModulePlan
from narrowcast.precision.plan.policy import PRODUCTS, Policy
from narrowcast.precision.plan.presets import short_text
from narrowcast.precision.plan.quantized_frozen_plan import describe_loss

HEAD = ("module", "kind", "products", "weights", "how", "parameters", "reason")
NUMBER = HEAD.index("parameters")
ROLES = {"params": "weights", "grads": "gradients", "fp8": "weights in fp8"}


class Table(NamedTuple):
    """What is shown of a plan: a title, rows under `HEAD`, and what they come to."""

    title: str
    rows: list[tuple[str, ...]]
    notes: list[tuple[str, str]]


def make_table(
    policy: Policy,
    hardware: Hardware,
    modules: Sequence[ModulePlan],
    functional: Support,
    sizes: Mapping[str, int],
) -> Table:
    """Return the table of a plan; modules that differ only in an index share a row."""
    alike = groups_alike(modules, name=lambda m: m.name, treatment=lambda m: (*_row(m), m.kind))
    total = sum(module.parameters for module in modules)
    taken = [f"{ROLES.get(role, role)} {_mib(size)}" for role, size in sizes.items() if size]
    outside = f"{policy.functional}, {functional.how}: {functional.reason}"
    return Table(
        title=f"{short_text(policy)} on {hardware.name} ({hardware.device})",
        rows=[_folded_row(row) for row in alike],
        notes=[
            ("outside", f"products outside modules (attention, matmul): {outside}"),
            ("in all", f"{len(modules)} modules, {total:,} parameters"),
            ("memory", f"{' + '.join(taken)} = {_mib(sum(sizes.values()))}, and activations"),
        ],
    )


def as_text(table: Table) -> str:
    """Write a table in columns."""
    lines = [HEAD, *table.rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEAD) - 1)]
    written = [_aligned(line, widths) for line in lines]
    width = max([9, *(len(name) + 2 for name, _ in table.notes)])
    notes = [f"{name:<{width}}{text}" for name, text in table.notes]
    return "\n".join([table.title, "", *written, "", *notes])


def as_html(table: Table) -> str:
    """Write a table for a notebook, in whatever colours that has."""
    cell = "padding:2px 12px 2px 0;text-align:left;vertical-align:top"
    number = cell.replace("left", "right")
    rule = "border-bottom:1px solid currentColor"
    styles = [number if i == NUMBER else cell for i in range(len(HEAD))]
    head = "".join(
        f'<th style="{style};{rule}">{name}</th>' for name, style in zip(HEAD, styles, strict=True)
    )
    rows = "".join(
        "<tr style='background:none'>"
        + "".join(
            f'<td style="{style}">{escape(text)}</td>'
            for text, style in zip(row, styles, strict=True)
        )
        + "</tr>"
        for row in table.rows
    )
    notes = "".join(f"<div><b>{name}</b> {escape(text)}</div>" for name, text in table.notes)
    return (
        '<div style="color:inherit;overflow-x:auto">'
        f"<div><b>{escape(table.title)}</b></div>"
        '<table style="border-collapse:collapse;color:inherit;background:none">'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{notes}</div>"
    )


def _row(module: ModulePlan) -> tuple[str, ...]:
    """Return what a module has in every column but its name."""
    shown = module.to_json()
    products = [shown[role] for role in PRODUCTS]
    reason = module.reason.removeprefix(f"{module.how}: ")
    return (
        module.kind,
        products[0] if len(set(products)) == 1 else " ".join(products),
        shown["params"],
        module.how,
        f"{module.parameters:,}",
        reason,
    )


def _folded_row(alike: Sequence[ModulePlan]) -> tuple[str, ...]:
    kind, products, weights, how, _, reason = _row(alike[0])
    times = f" ×{len(alike)}" if len(alike) > 1 else ""
    parameters = f"{sum(module.parameters for module in alike):,}"
    name = folded([module.name for module in alike]) + times
    reason = "; ".join(filter(None, [reason, describe_loss([module.frozen for module in alike])]))
    return name, kind, products, weights, how, parameters, reason


def _aligned(line: Sequence[str], widths: Sequence[int]) -> str:
    cells = [
        text.rjust(width) if i == NUMBER else text.ljust(width)
        for i, (text, width) in enumerate(zip(line, widths, strict=False))
    ]
    return "  ".join([*cells, line[-1]]).rstrip()


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
