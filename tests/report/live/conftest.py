"""A page that is told what a server tells, as the script in a browser takes it."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from narrowcast.report.live import watched
from narrowcast.report.live.watched import Cursor, WatchedRun


class Page:
    """What one open page knows."""

    def __init__(self, folder: Path) -> None:
        self.watched, self.cursor = WatchedRun(folder), Cursor()
        self.lists: dict[str, list[Any]] = {}
        self.events: dict[int, dict[str, Any]] = {}
        self.evals: list[Any] = []
        self.head: dict[str, Any] = {}
        self.told: dict[str, Any] = {}

    def look(self) -> "Page":
        time.sleep(watched.LOOK_SECONDS)
        self.cursor, self.told = self.watched.since(self.cursor)
        return self.take(self.told)

    def take(self, told: dict[str, Any]) -> "Page":
        if told.get("reset"):
            self.lists, self.events, self.evals = {}, {}, []
        self.head = told.get("head", self.head)
        for name, (at, rows) in told.get("lists", {}).items():
            self.lists[name] = self.lists.get(name, [])[:at] + rows
        for event in told.get("events", []):
            self.events[event["key"]] = event
        self.evals += told.get("evals", [])
        return self

    @property
    def steps(self) -> list[int]:
        return [row[1] for row in self.lists.get("loss", [])]


@pytest.fixture
def open_page() -> Callable[[Path], Page]:
    """Open a page of the run in a folder."""
    return Page
