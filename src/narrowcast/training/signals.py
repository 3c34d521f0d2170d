"""Signals that stop a run after the step in progress: SIGINT, SIGTERM and SIGHUP."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from narrowcast.errors import Interrupted
from narrowcast.runs.commands import resume_command

STOPPING = tuple(
    signal.Signals[name]
    for name in ("SIGINT", "SIGTERM", "SIGHUP")
    if name in signal.Signals.__members__  # Windows has no SIGHUP
)
"""Ctrl-C, a scheduler that ends the job, a terminal that was closed."""


@dataclass
class Stop:
    """Whether the run received a signal to stop."""

    folder: Path | None = None
    received: signal.Signals | None = None

    @property
    def why(self) -> str:
        """Why the run should stop; empty while it may continue."""
        return "" if self.received is None else self.received.name

    def ended_after(self, step: int) -> Interrupted:
        """Return the exception to raise once `step` is saved."""
        how = "It had no folder to save to, so it cannot be resumed."
        if self.folder is not None:
            how = f"Resume it with `{resume_command(self.folder)}`."
        return Interrupted(f"{self.why} stopped the run after step {step}. {how}")


@contextmanager
def stop_on_signals(folder: Path | None = None) -> Iterator[Stop]:
    """Record stop signals inside the block; the same signal a second time acts as usual.

    A different signal is the same request: systemd sends SIGTERM and SIGHUP together. Signals that
    the process ignores, as under nohup, stay ignored.
    """
    stop = Stop(folder)
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
