"""What `bench` prints at the end: a table of those who ran, and why the others did not."""

from collections.abc import Callable, Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from narrowcast.bench.contenders import COPY
from narrowcast.bench.measure.figures import Row
from narrowcast.bench.measure.results import rows_of
from narrowcast.bench.running import Figures
from narrowcast.report.phrases import duration, large, measured, said, share, size
from narrowcast.runs import Metric

RATES: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "flops": ("TFLOP/s", lambda rate: f"{rate / 1e12:.3g}"),
    "bytes": ("GB/s", lambda rate: f"{rate / 1e9:,.0f}"),
}
"""Amounts, as a column says them and as they are written there; any other is of items."""


def print_figures(console: Console, title: str, figures: Figures) -> None:
    """Print the table of a bench whose steps were timed."""
    rows = rows_of(figures.results, baseline=figures.baseline)
    rates = list(dict.fromkeys(what for row in rows for what in row.rates))
    several = len({row.case for row in rows}) > 1
    ceiling = next((row.rates["bytes"] for row in rows if row.name == COPY), None)
    apart = any(row.host_seconds is not None for row in rows)
    columns = ["contender", *(["case"] if several else []), "ms", "quartiles", "speed"]
    columns += ["host ms"] if apart else []
    columns += [_rate(what)[0] for what in rates] + (["of copy", "B/param"] if ceiling else [])
    table = new_table([*columns, "peak", "first step"])
    # Shape by shape where there are several, so that rivals stand side by side.
    order = {case: place for place, case in enumerate(dict.fromkeys(row.case for row in rows))}
    for row in sorted(rows, key=lambda row: order[row.case]):
        cells = [row.name, *([row.case] if several else []), *_times(row)]
        if apart:
            cells.append("" if row.host_seconds is None else f"{1000 * row.host_seconds:.2f}")
        cells += [_rate(what)[1](row.rates[what]) if what in row.rates else "" for what in rates]
        if ceiling:
            each = row.facts.get("bytes_per_parameter", 0.0)
            cells += [share(row.rates["bytes"], ceiling), f"{each:.3g}"]
        first = row.facts.get("first_step_seconds")
        table.add_row(*cells, size(row.peak_bytes), "" if first is None else f"{first:.1f} s")
    _print(console, title, figures, table=table)
    print_notes(console, {row.name: str(row.facts.get("note") or "") for row in rows})
    print_failures(console, figures)


def print_quality(console: Console, title: str, figures: Figures) -> None:
    """Print the table of runs that were trained to the end."""
    rows = figures.data["rows"]
    metric = Metric(**rows[0]["metric"]) if rows else Metric(name="loss")
    table = new_table(
        ["contender", "seeds", f"eval {said(metric.name)}", "against", "train loss", "ms",
         "steps to loss", "time to loss", "skipped", "peak"]
    )  # fmt: skip
    for row in rows:
        relative, steps = row["evaluated_relative"], row["steps_to_loss"]
        table.add_row(
            row["name"],
            str(len(row["seeds"])),
            measured(metric, row["evaluated"]),
            "" if relative is None else f"{100 * relative:+.2f} %",
            f"{row['train_loss']:.4f}",
            f"{row['step_ms']:.2f}",
            "not reached" if steps is None else f"{steps:.0f}",
            "" if steps is None else duration(row["seconds_to_loss"]),
            str(row["skipped"]),
            size(row["peak_bytes"]),
        )
    _print(console, title, figures, table=table)
    if figures.data["measured_at_once"] > 1:
        note = "runs shared the device: times and peaks cannot be compared"
        console.print(Text(note, style="yellow"))
    print_failures(console, figures)


def new_table(columns: Sequence[str]) -> Table:
    """Return an empty table: names to the left, numbers to the right."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for name in columns:
        left = name in ("contender", "case", "policy", "model", "way", "mode")
        table.add_column(name, justify="left" if left else "right", overflow="fold")
    return table


def print_notes(console: Console, notes: Mapping[str, str]) -> None:
    """Print what a reader must know to compare."""
    for name, note in notes.items():
        if note:
            console.print(Text(f"{name}: {note}", style="yellow"))


def print_failures(console: Console, figures: Figures) -> None:
    """Print who has no figures, and why."""
    for result in figures.results:
        if result.failure:
            console.print(Text.assemble((result.contender.name, "bold"), f"  {result.failure}"))


def _rate(what: str) -> tuple[str, Callable[[float], str]]:
    return RATES.get(what, (f"{what}/s", large))


def _times(row: Row) -> list[str]:
    spread = row.seconds
    quartiles = f"{1000 * spread.low:.2f}–{1000 * spread.high:.2f}"
    ratio = "" if row.speed is None else f"{row.speed:.3f} ×"
    return [f"{1000 * spread.median:.2f}", quartiles, ratio]


def _print(console: Console, title: str, figures: Figures, *, table: Table) -> None:
    console.print()
    console.print(Text(_headline(title, figures), style="bold"))
    console.print(table)


def _headline(title: str, figures: Figures) -> str:
    data = figures.data
    about = f"bench {title} · {' '.join([data['recipe'], *data['overrides']])} · {data['device']}"
    return f"{about} · torch {data['environment']['torch']} · against {figures.baseline.name}"
