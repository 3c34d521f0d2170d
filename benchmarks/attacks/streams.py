"""Standard streams that are closed, full, or lose their reader; the run does not end with them."""

import fcntl
import os
import signal
import termios
import time

from attacks import tiny
from attacks.case import (
    FRESH_SECONDS,
    SECONDS,
    Case,
    require_equal,
    resumed_equal,
    steps_of,
    watch_until,
)
from attacks.forks import Command, die_with_parent
from attacks.oracle import DONE, INTERRUPTED, Found, Verdict, well_ended

HOW = ("closed", "full", "no reader", "reader leaves", "terminal leaves")
STREAMS = ((1,), (2,), (1, 2), (0, 1, 2))


def lost_in_a_run(case: Case) -> Verdict:
    """Lose the output of a run: it goes on to its end, or stops so that it can be resumed."""
    recipe = case.rng.choice(("bf16", "fp16", "tutorial"))
    straight, run = case.straight(recipe), case.folder / "run"
    how, which = case.turn([(how, which) for how in HOW for which in STREAMS])
    case.tell(f"{recipe}: {how}: {which}")
    fresh = case.rng.random() < 0.15
    command = _start(case, how, which, fresh, "train", *tiny.RECIPES[recipe], "--out", str(run))
    # Whoever cannot be heard need not speak: the message of an exit code is lost with the stream.
    ended = command.wait(FRESH_SECONDS if fresh else SECONDS)
    codes = {DONE, INTERRUPTED}
    if how == "terminal leaves" and steps_of(run) in (0, tiny.STEPS):
        codes.add(-signal.SIGHUP)  # before the first step and after the last it may end a run
    if 2 not in which:
        well_ended(ended, codes=codes)
    elif ended.code is None:
        raise Found(Verdict.HANG, ended.why_stopped)
    elif ended.code not in codes:
        raise Found(Verdict.LOST, f"ended with {ended.code}: {ended.said[-300:]}")
    if ended.code == DONE:
        require_equal(run, straight, asked_to_stop=True)
        return Verdict.FINE
    if not (run / "records.jsonl").exists():
        return Verdict.FINE
    resumed_equal(case, run, straight, asked_to_stop=True)
    return Verdict.EQUAL


def lost_by_a_question(case: Case) -> Verdict:
    """Lose the output of a command that only answers: no traceback, and it ends."""
    how, which = case.turn([(how, which) for how in HOW for which in STREAMS])
    straight = str(case.straight("bf16"))
    verbs = (
        ("recipes",),
        ("schema",),
        ("--help",),
        ("plan", *tiny.RECIPES["bf16"]),
        ("compare", straight, straight),
        ("compare", straight, straight, "--json"),
        ("train", "no-such-recipe"),
        ("resume", straight),
        ("doctor",),
    )
    words = case.rng.choice(verbs)
    fresh = case.rng.random() < 0.3
    case.tell(f"{words[0]}{', fresh' if fresh else ''}: {how}: {which}")
    ended = _start(case, how, which, fresh, *words).wait(FRESH_SECONDS if fresh else SECONDS)
    if ended.code is None:
        raise Found(Verdict.HANG, ended.why_stopped)
    if "Traceback" in ended.said or "Exception ignored" in ended.said:
        raise Found(Verdict.TRACEBACK, f"exit {ended.code}: {ended.said[-300:]}")
    if ended.code < 0 and ended.code not in (-signal.SIGPIPE, -signal.SIGHUP):
        raise Found(Verdict.TRACEBACK, f"ended by signal {-ended.code}")
    if ended.code == DONE and how == "full" and 1 in which:
        raise Found(Verdict.SILENT, "the answer was lost, and the exit code says that all is well")
    return Verdict.FINE


def _start(case: Case, how: str, which: tuple[int, ...], fresh: bool, *words: str) -> Command:
    outputs = [fd for fd in which if fd > 0]
    match how:
        case "closed":
            return case.start(*words, fresh=fresh, prepare=lambda: _close(which))
        case "full":
            return case.start(
                *words,
                fresh=fresh,
                prepare=lambda: _point(outputs, os.open("/dev/full", os.O_RDWR)),
            )
        case "no reader" | "reader leaves":
            return _piped(case, how, outputs, fresh, *words)
        case _:
            return _on_a_terminal(case, which, fresh, *words)


def _piped(case: Case, how: str, outputs: list[int], fresh: bool, *words: str) -> Command:
    reading, writing = os.pipe()
    command = case.start(*words, fresh=fresh, prepare=lambda: _point(outputs, writing, reading))
    os.close(writing)
    if how == "no reader":
        os.close(reading)
    else:
        _read_and_leave(reading, case.rng.choice((1, 10, 200, 1000)))
    return command


def _on_a_terminal(case: Case, which: tuple[int, ...], fresh: bool, *words: str) -> Command:
    """Give the command a terminal, and close the window while it works."""
    master, slave = os.openpty()

    def prepare() -> None:
        os.close(master)
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)  # SIGHUP comes to whom it belongs
        _point(list(which), slave)

    command = case.start(*words, fresh=fresh, prepare=prepare)
    os.close(slave)
    step = case.rng.randint(0, tiny.STEPS - 1)
    run = case.folder / "run"
    if words[0] == "train" and not fresh:
        watch_until(command, lambda: steps_of(run) >= step > 0 or (not step and run.exists()))
    else:
        time.sleep(case.rng.uniform(0, 0.3))
    os.close(master)
    return command


def _close(which: tuple[int, ...]) -> None:
    for fd in which:
        os.close(fd)


def _point(outputs: list[int], to: int, *unused: int) -> None:
    for fd in outputs:
        os.dup2(to, fd)
    for fd in (to, *unused):
        if fd > 2:
            os.close(fd)


def _read_and_leave(reading: int, count: int) -> None:
    """Read so many bytes in a process of its own, as `head` does."""
    if os.fork() == 0:
        die_with_parent()
        os.read(reading, count)
        os._exit(0)
    os.close(reading)
