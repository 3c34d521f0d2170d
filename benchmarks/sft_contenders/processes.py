"""Processes that warm up side by side and are then measured one after the other."""

import contextlib
import json
import os
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

TIMEOUT_SECONDS = 240
"""For the warm-up, and again for the measurement."""


class Contender:
    """A process that warms up, waits, and measures when it is told to.

    It prints `ready` when it is warm, begins to measure with the next line of its input, and
    prints its measurements as a last line of JSON.
    """

    def __init__(self, command: list[str], errors: Path) -> None:
        self._errors = errors.open("w+")
        quiet = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            env={**os.environ, **quiet},
        )  # fmt: skip
        self._lines: queue.Queue[str | None] = queue.Queue()
        assert self._process.stdout is not None
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()
        self._deadline = time.monotonic() + TIMEOUT_SECONDS
        self._last = ""

    def ready(self) -> bool:
        """Wait until it is warm; return whether it is."""
        return self._until("ready")

    def go(self) -> None:
        assert self._process.stdin is not None
        self._deadline = time.monotonic() + TIMEOUT_SECONDS
        with contextlib.suppress(BrokenPipeError):  # it ended meanwhile: `result` says why
            self._process.stdin.write("go\n")
            self._process.stdin.flush()

    def result(self) -> dict[str, Any]:
        """Wait for its end; return what it measured, or why there is nothing."""
        self._until(None)
        late = self._process.poll() is None and time.monotonic() > self._deadline
        if late:
            self._process.kill()
        code = self._process.wait()
        self._errors.seek(0)
        errors = [line.strip() for line in self._errors.read().splitlines() if line.strip()]
        self._errors.close()
        if code == 0 and self._last.startswith("{"):
            values: dict[str, Any] = json.loads(self._last)
            return values
        reason = f"no end after {TIMEOUT_SECONDS} s" if late else (errors or ["no message"])[-1]
        return {"failed": reason[:300], "errors": errors[-20:]}

    def _read(self, stream: TextIO) -> None:
        for line in stream:
            self._lines.put(line.strip())
        self._lines.put(None)

    def _until(self, word: str | None) -> bool:
        while True:
            try:
                line = self._lines.get(timeout=max(self._deadline - time.monotonic(), 0.01))
            except queue.Empty:
                return False
            if line is None:
                self._lines.put(None)
                return word is None
            if line == word:
                return True
            self._last = line


def measure_in_turn(
    commands: Mapping[str, Callable[[bool], list[str]]],
    folder: Path,
    *,
    together: int,
    ended: Callable[[str, dict[str, Any]], None],
) -> dict[str, dict[str, Any]]:
    """Let `together` processes at a time warm up side by side, and measure one after the other.

    Args:
        commands: Per name, the command of its process. Called with whether the process must wait
            after its warm-up.
        folder: Holds the processes' errors.
        together: Processes that warm up at once. One that runs out of memory beside others is
            measured again, alone.
        ended: Called with the name and the result of each process as it ends.
    """
    found: dict[str, dict[str, Any]] = {}
    names = list(commands)

    def start(name: str, *, wait: bool) -> Contender:
        kind = "errors" if wait else "errors-alone"
        return Contender(commands[name](wait), folder / f"{kind}-{names.index(name)}")

    for first in range(0, len(names), together):
        group = {name: start(name, wait=True) for name in names[first : first + together]}
        warm = {name: each.ready() for name, each in group.items()}
        for name, each in group.items():
            if warm[name]:
                each.go()
            found[name] = each.result()
            ended(name, found[name])
    crowded = [name for name in names if "out of memory" in str(found[name].get("errors"))]
    for name in crowded if together > 1 else []:
        found[name] = start(name, wait=False).result()
        ended(name, found[name])
    return found
