"""Results as tables: for a terminal, and for the page that shows them."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from genomics_studies.questions import QUESTIONS, Question

Row = Mapping[str, Any]


def print_table(rows: Sequence[Row]) -> None:
    """Print results, with what was asked for, and what was published beside them."""
    head = f"{'question':<26} {'candidate':<18} {'precision':<12} {'judged on':>9}"
    print(f"\n{head} {'test':>8} {'± sd':>6} seeds {'weights':>9} {'s/run':>6}")
    for question, group in _by_question(rows):
        for row in group:
            judged, tested, spread = _told(question, row)
            print(
                f"{question.name:<26} {row['candidate']:<18} {row['policy']:<12} {judged:>9} "
                f"{tested:>8} {spread:>6} {row['seeds']:>5} {row['parameters']:>9,} "
                f"{row['seconds']:>6.1f} {_verdict(question, row)}"
            )
        for other, value in question.beside.items():
            print(f"{question.name:<26} {other:<41} {value:>18}  published")


def write_page(page: Path, rows: Sequence[Row]) -> None:
    """Put the table of each study between its marks in a page; refuse a page without them."""
    text = page.read_text()
    for study in dict.fromkeys(question.study for question, _ in _by_question(rows)):
        mark = rf"(<!-- {study} -->\n).*?(\n<!-- /{study} -->)"
        table = "\n".join(_markdown(study, rows))
        text, count = re.subn(mark, lambda m, t=table: m[1] + t + m[2], text, flags=re.S)
        if not count:
            raise SystemExit(f"{page} has no marks <!-- {study} --> and <!-- /{study} -->")
    page.write_text(text)


def _markdown(study: str, rows: Sequence[Row]) -> list[str]:
    metric = next(question.metric for question in QUESTIONS if question.study == study)
    out = [
        f"| | model | precision | validation {metric} | test {metric} | seeds | weights |",
        "|---|---|---|---|---|---|---|",
    ]
    for question, group in _by_question(rows):
        if question.study != study:
            continue
        for row in group:
            judged, tested, spread = _told(question, row)
            several = f" ± {spread}" if row["seeds"] > 1 else ""
            weights = "" if row["baseline"] else f"{row['parameters']:,}"
            seeds = "" if row["baseline"] else row["seeds"]
            # In bold what is trained here.
            value = f"{tested}{several}" if row["baseline"] else f"**{tested}**{several}"
            out.append(
                f"| {question.name} | {row['candidate']} | {row['policy']} | "
                f"{'' if judged == '-' else judged} | {value} | {seeds} | {weights} |"
            )
        out += [
            f"| {question.name.removesuffix(' cnn')} | {other} | | | {value} | published | |"
            for other, value in question.beside.items()
        ]
    return out


def _by_question(rows: Sequence[Row]) -> list[tuple[Question, list[Row]]]:
    found = [
        (question, [row for row in rows if row["question"] == question.name])
        for question in QUESTIONS
    ]
    return [(question, group) for question, group in found if group]


def _told(question: Question, row: Row) -> tuple[str, str, str]:
    factor, digits = (100, 2) if question.percent else (1, 4)
    judged, tested, spread = (
        "-" if part not in row else f"{row[part] * factor:.{digits}f}"
        for part in ("validation", "test", "test_sd")
    )
    return judged, tested, spread


def _verdict(question: Question, row: Row) -> str:
    if question.at_least is None or "test" not in row or row["baseline"]:
        return ""
    asked = question.at_least * (100 if question.percent else 1)
    return f"{asked:g}: {'reached' if row['test'] >= question.at_least else 'MISSED'}"
