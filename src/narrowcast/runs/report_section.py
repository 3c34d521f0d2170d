"""A report section of a workload: a title and self-contained HTML."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import TypeAlias

from narrowcast.errors import ConfigError
from narrowcast.runs.records import Record

FORBIDDEN = frozenset(
    {"script", "iframe", "object", "embed", "link", "meta", "base", "form", "style", "frame",
     "plaintext", "textarea", "title", "template", "noscript", "xmp", "html", "head", "body"}
)  # fmt: skip
"""Elements that load or run something, or reach beyond their section."""
EMPTY = frozenset({"area", "br", "col", "hr", "img", "input", "source", "track", "wbr"})
"""Elements without an end tag."""
ADDRESSES = frozenset(
    {"href", "src", "srcset", "action", "formaction", "data", "poster", "background", "xlink:href",
     "ping", "cite"}
)  # fmt: skip
"""Attributes with an address: `#id` on this page or an inline `data:image/` are allowed."""

_OUTSIDE_STYLE = re.compile(r"url\s*\(|@import|expression\s*\(", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class ReportSection:
    """A section that a workload adds to the report of its runs.

    `html` is inserted as is, so data in it must be escaped. It may neither load nor run anything.
    """

    title: str
    html: str

    def __post_init__(self) -> None:
        reader = _Reader()
        reader.feed(self.html)
        if "<" in reader.rawdata:  # what follows the section would become part of it
            reader.note("an unfinished tag")
        if reader.open:
            reader.note(f"<{reader.open[-1]}> without an end tag")
        if reader.problems:
            raise ConfigError(
                "A report section must be static HTML or SVG that loads nothing, got "
                f"{reader.problems} in {self.title!r}. Inline images as data:image/…."
            )


class _Reader(HTMLParser):
    """Finds the first thing that a section may not have."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.problems = ""
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in FORBIDDEN:
            self.note(f"<{tag}>")
        for name, value in attrs:
            text = (value or "").strip()
            if name.startswith("on"):
                self.note(f"the attribute {name}")
            elif name in ADDRESSES and not text.startswith(("#", "data:image/")):
                self.note(f"the address {name}={text!r}")
            elif _OUTSIDE_STYLE.search(text):  # style, fill, filter and many more take url()
                self.note(f"an address in {name}")

        if tag not in EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in EMPTY:
            return
        if not self.open or self.open.pop() != tag:
            self.note(f"</{tag}> without a start tag")

    def note(self, what: str) -> None:
        """Keep the first problem."""
        self.problems = self.problems or what


ReportSections: TypeAlias = Callable[[Path, Sequence[Record]], Sequence[ReportSection]]
"""Returns sections for the run folder and its records; the same text for the same folder."""
