"""Tables in Markdown: savings, losses at equal steps, stopped runs, what was tuned, the bars."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybrid_studies.plan import BASE, LIBRARY, OURS, ROWS, STANDARD
from hybrid_studies.tasks import CHOSEN_ON, STOPS

Cells = dict[str, Any]


def markdown(found: Cells) -> str:
    """Return the tables as they stand in the docs."""
    if not found:
        return "no task has its baseline yet"
    parts = [
        "Savings: mean ± half a 95 % t-interval over seeds.\n",
        *table(found, of_saving),
        "\nWhich when: over the tasks that all of these rows have.\n",
        *which_when(found),
        "\nLoss at equal steps, and less that of cosine with the same seed.\n",
        *table(found, of_loss),
    ]
    for stop in STOPS:
        parts.append(f"\nStopped at {stop:g} of the plan, against cosine planned for that stop.\n")
        parts += table(found, lambda row, stop=stop: of_stop(row, stop))
    parts += ["\nLearning rates and time.\n", *table(found, of_rate)]
    parts += ["\nThe baseline.\n", *baselines(found), "\nReaching cosine's loss at N.\n"]
    return "\n".join([*parts, *targets(found), "\nBars.\n", *bars(found)])


def table(found: Cells, tell: Callable[[Cells], str]) -> list[str]:
    """Return one line for each method that some task has, and one column for each task."""
    lines = ["| method | " + " | ".join(found) + " |", "|---" * (1 + len(found)) + "|"]
    for row in ROWS:
        cells = [each["rows"].get(row.label) for each in found.values()]
        if any(cells):
            told = (tell(cell) if cell else "–" for cell in cells)
            lines.append(f"| {row.label} | " + " | ".join(told) + " |")
    return lines


def which_when(found: Cells) -> list[str]:
    """Return mean, least and most saving of the methods that one chooses among."""
    names = (BASE.label, *(row.label for row in LIBRARY), "schedule-free")
    common = [each["rows"] for each in found.values() if set(names) <= set(each["rows"])]
    if not common:
        return ["no task has them all yet"]
    lines = [
        f"| method | mean of {len(common)} | least | most | ahead of cosine |",
        "|---" * 5 + "|",
    ]
    for name in names:
        savings = [rows[name]["saving"][0] for rows in common]
        mean, ahead = sum(savings) / len(savings), sum(each > 1 for each in savings)
        lines.append(f"| {name} | {mean:.2f} | {min(savings):.2f} | {max(savings):.2f} | {ahead} |")
    return lines


def of_saving(row: Cells) -> str:
    mean, half = row["saving"]
    jumps = f" ({row['accepted']:.0%} accepted)" if "accepted" in row else ""
    return f"{row['sign']}{mean:.2f} ± {half:.2f}{jumps}"


def of_loss(row: Cells) -> str:
    mean, half = row["apart"]
    return f"{row['loss']:.4f} ({mean:+.4f} ± {half:.4f})"


def of_stop(row: Cells, stop: float) -> str:
    mean, half, sign = row[f"stopped {stop:g}"]
    return f"{sign}{mean:.2f} ± {half:.2f}"


def of_rate(row: Cells) -> str:
    slower = row["second_per_step"] / row["cosine_second_per_step"]
    return f"lr {row['lr']:.2g}, {row['spent']:.3f} N, {slower:.2f} × the time"


def baselines(found: Cells) -> list[str]:
    """Return what the baseline reaches with every budget."""
    lines = ["| task | N | seeds | loss (learning rate) by share of N |", "|---|---|---|---|"]
    for name, each in found.items():
        told = ", ".join(
            f"{share}: {loss:.4f} ({each['rates'][share]:.2g})"
            for share, loss in each["curve"].items()
        )
        lines.append(f"| {name} | {each['steps']} | {each['seeds']} | {told} |")
    return lines


def targets(found: Cells) -> list[str]:
    """Return with how many steps a method that has budgets of its own reaches cosine's loss."""
    lines = [
        "| task | method | losses by share of N | cosine at N | reached at |",
        "|---" * 5 + "|",
    ]
    for name, task in found.items():
        for label, row in task["rows"].items():
            if "losses by share" not in row:
                continue
            losses = row["losses by share"]
            told = ", ".join(f"{share}: {losses[share]:.4f}" for share in sorted(losses))
            at = row["reaches cosine at"]
            below = losses[min(losses, key=float)] < task["rows"][BASE.label]["loss"]
            end = f"< {min(losses, key=float)} N" if below else "not reached"
            said = f"{at:.2f} N, {at * task['steps']:.0f} steps" if at else end
            base = task["rows"][BASE.label]["loss"]
            lines.append(f"| {name} | {label} | {told} | {base:.4f} | {said} |")
    return lines


def bars(found: Cells) -> list[str]:
    """Return what the means say of the bars that were set beforehand."""
    lines = []
    for row, least, worst, told in (
        (OURS[-1], 1.15, 0.97, "balanced"),
        (OURS[0], 1.05, 0.99, "conservative"),
        (LIBRARY[1], 1.15, 0.97, "balanced"),
        (LIBRARY[0], 1.05, 0.99, "conservative"),
    ):
        means = {
            name: task["rows"][row.label]["saving"][0]
            for name, task in found.items()
            if row.label in task["rows"]
        }
        if not means:
            continue
        over = [name for name, mean in means.items() if mean >= least]
        fresh = [name for name in over if name not in CHOSEN_ON]
        lines.append(
            f"- {told} ({row.label}): {least:g} × or more on {len(over)} of {len(means)} tasks"
            f" ({', '.join(over)}), {len(fresh)} of them with constants fixed beforehand; the"
            f" least is {min(means.values()):.2f} (bar: {worst:g})"
        )
        best = {
            name: task["rows"][row.label]["against best standard"]
            for name, task in found.items()
            if row.label in task["rows"]
            and sum(each.label in task["rows"] for each in STANDARD) > 4
        }
        told_best = ", ".join(
            f"{name} {ratio:.2f} ({found[name]['rows'][row.label]['best standard']})"
            for name, ratio in best.items()
        )
        if best:
            lines.append(f"- {told}, against the best standard row: {told_best}")
    return lines
