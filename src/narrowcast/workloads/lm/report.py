"""The report section of a language model: text that it wrote at several evaluations."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from narrowcast.runs import Record, ReportSection, SampleRecord

PRE = "white-space: pre-wrap; overflow-wrap: anywhere; margin: 0"


def sections(folder: Path, records: Sequence[Record]) -> list[ReportSection]:
    """Return samples of text by prompt and step; nothing if none were drawn."""
    samples = [record for record in records if isinstance(record, SampleRecord)]
    if not samples:
        return []
    parts = []
    for prompt in dict.fromkeys(each.prompt for each in samples):
        rows = "".join(
            f"<tr><td>{each.step:,}</td><td><pre style='{PRE}'>{_shown(each.text)}</pre></td></tr>"
            for each in samples
            if each.prompt == prompt
        )
        head = "<tr><th>step</th><th>continued by the model</th></tr>"
        parts.append(
            f"<h3>Prompt</h3><pre style='{PRE}'>{_shown(prompt)}</pre>"
            f"<div class='scroll'><table>{head}{rows}</table></div>"
        )
    return [ReportSection(title="Samples of text", html="".join(parts))]


def _shown(text: str) -> str:
    """Return text as HTML; characters that no page can show are replaced."""
    shown = (c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
    return escape("".join(shown)) or "(no text: the model predicted NaN or inf)"
