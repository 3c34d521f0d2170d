"""The process of one trial, from its start to its figures or the reason why there are none."""

import queue
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from narrowcast.bench.contenders import Contender
from narrowcast.bench.process import Inbox, Worker
from narrowcast.bench.zoo.ways import WAYS, Trial


@final
class Turn:
    """One trial's process. Once there is a reason why it says no more, it is over."""

    def __init__(
        self,
        trial: Trial,
        job: Mapping[str, Any],
        *,
        folder: Path,
        timeout_seconds: float,
        cold: bool,
    ) -> None:
        """Start it; it imports what it needs."""
        self._inbox: Inbox = queue.SimpleQueue()
        self._timeout_seconds = timeout_seconds
        self._imported = self._over = False
        self.why = ""
        """Why there is no more to hear of it."""
        contender = Contender(name=str(trial), kind=WAYS[trial.way].kind)
        self._worker = Worker(contender, job, folder=folder, inbox=self._inbox, cold=cold)

    def await_import(self) -> None:
        """Wait until it has imported what it needs, or is over."""
        if not self._imported:
            self._imported = all(self._heard() is not None for _ in ("alive", "ready"))

    def ask(self, stage: str) -> None:
        """Ask it to set up, or to time its steps."""
        if not self.why:
            self._worker.ask({"stage": stage})

    def answer(self) -> dict[str, Any] | None:
        """Wait for what it found; None where there will be nothing."""
        found = self._heard()
        return found and {name: value for name, value in found.items() if name != "event"}

    def end(self) -> None:
        """End the process and all that it started."""
        if not self._over:  # afterwards its number may be another's
            self._worker.kill()
            self._over = True

    def log(self) -> list[str]:
        """Return the last lines of its log."""
        return self._worker.tail()

    def _heard(self) -> dict[str, Any] | None:
        if self.why:
            return None
        # From when it was asked: of a group, others were waited for meanwhile.
        until = self._worker.asked + self._timeout_seconds
        try:
            _, answer = self._inbox.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            answer, self.why = None, f"no answer for {self._timeout_seconds:g} s, so it was ended"
        else:
            self.why = "" if answer else self._worker.reason()
        if self.why:
            self.end()  # before others of its group are timed
        return answer
