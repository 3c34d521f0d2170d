"""Reasons to stop at the next good moment: SIGINT, SIGTERM and SIGHUP, or a folder that is lost."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol

from narrowcast.errors import Interrupted
from narrowcast.runs.commands import resume_command

STOPPING = tuple(
    signal.Signals[name]
    for name in ("SIGINT", "SIGTERM", "SIGHUP")
    if name in signal.Signals.__members__  # Windows has no SIGHUP
)
"""Ctrl-C, a scheduler that ends the job, a terminal that was closed."""


class Home(Protocol):
    """Where a run keeps its files, which somebody may take from it while it goes on."""

    @property
    def lost(self) -> str:
        """What became of the folder, where that is a reason to end; else empty."""

    def path(self) -> Path:
        """Return where the folder is, once it is sure to be there."""


@dataclass(frozen=True)
class FixedHome:
    """A folder that nobody looks after."""

    folder: Path
    lost: str = ""

    def path(self) -> Path:
        """Return the folder."""
        return self.folder


@dataclass
class Stop:
    """Whether the run was told to stop."""

    home: Home | None = None
    received: signal.Signals | None = None

    @property
    def why(self) -> str:
        """Why the run should stop; empty while it may continue."""
        if self.received is not None:
            return self.received.name
        return "the loss of its folder" if self.home is not None and self.home.lost else ""

    def ended_after(self, step: int) -> Interrupted:
        """Return the exception to raise once `step` is saved."""
        how = "It had no folder to save to, so it cannot be resumed."
        if self.home is not None:
            how = f"Resume it with `{resume_command(self.home.path())}`."
        return Interrupted(f"{self.why} stopped the run after step {step}. {how}")


@contextmanager
def stop_on_signals(home: Home | None = None) -> Iterator[Stop]:
    """Record stop signals inside the block; the same signal a second time acts as usual.

    A different signal is the same request: systemd sends SIGTERM and SIGHUP together. Only the main
    thread can set handlers. Signals that the process ignores, as under nohup, stay ignored.
    """
    stop = Stop(home)
    noted: set[signal.Signals] = set()

    def note(number: int, frame: FrameType | None) -> None:
        asking = signal.Signals(number)
        if asking in noted:
            signal.signal(number, before[asking])
            signal.raise_signal(number)
        noted.add(asking)
        stop.received = stop.received or asking

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in STOPPING}
    # None is a handler that C code has set: it could not be put back.
    taken = {n: handler for n, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    for number in taken:
        signal.signal(number, note)
    try:
        yield stop
    finally:
        for number, handler in taken.items():
            signal.signal(number, handler)
