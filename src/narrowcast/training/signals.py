"""SIGINT, SIGTERM and SIGHUP as a request to stop at the next good moment."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

STOPPING = tuple(
    signal.Signals[name]
    for name in ("SIGINT", "SIGTERM", "SIGHUP")
    if name in signal.Signals.__members__  # Windows has no SIGHUP
)
"""Ctrl-C, a scheduler that wants its machine back, a terminal that was closed."""


@dataclass
class Stop:
    """Whether the process has been asked to end."""

    asked_by: signal.Signals | None = None


@contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """Note the signals of `STOPPING` instead of ending; a second one has the meaning it had before.

    Only the main thread can: in any other, signals keep their meaning, and so does a signal that
    the process was started to ignore, as under nohup.
    """
    stop = Stop()

    def note(number: int, frame: FrameType | None) -> None:
        if stop.asked_by is not None:
            signal.signal(number, before[signal.Signals(number)])
            signal.raise_signal(number)
        stop.asked_by = signal.Signals(number)

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
