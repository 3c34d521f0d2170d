"""A section of a run's report that its workload draws: a title, and HTML that stands alone."""

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
"""Elements that load or run something, or that reach beyond their section."""
EMPTY = frozenset({"area", "br", "col", "hr", "img", "input", "source", "track", "wbr"})
"""Elements without an end."""
ADDRESSES = frozenset(
    {"href", "src", "srcset", "action", "formaction", "data", "poster", "background", "xlink:href",
     "ping", "cite"}
)  # fmt: skip
"""Attributes that hold an address: of this page (`#id`) or of a picture in it (`data:image/`)."""

_OUTSIDE_STYLE = re.compile(r"url\s*\(|@import|expression\s*\(", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class ReportSection:
    """What a workload adds to the report of its runs; drawn below a heading, as it is.

    `html` is markup that is already safe: whatever in it comes from data has been escaped. It may
    name no address outside the page and run nothing: such a section is refused.
    """

    title: str
    html: str

    def __post_init__(self) -> None:
        reader = _Reader()
        reader.feed(self.html)
        if "<" in reader.rawdata:  # what follows the section would become part of it
            reader.note("a tag that does not end")
        if reader.open:
            reader.note(f"<{reader.open[-1]}> without its end")
        if reader.problems:
            raise ConfigError(
                f"report section {self.title!r} holds {reader.problems}: a report loads and runs "
                "nothing; draw with plain HTML or SVG, and put pictures in as data:image/…"
            )


class _Reader(HTMLParser):
    """Looks for the first thing that a section may not hold."""

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
            self.note(f"</{tag}> without its beginning")

    def note(self, what: str) -> None:
        """Keep the first."""
        self.problems = self.problems or what


ReportSections: TypeAlias = Callable[[Path, Sequence[Record]], Sequence[ReportSection]]
"""From the run folder and its records to sections; pure: the same folder, the same text."""
