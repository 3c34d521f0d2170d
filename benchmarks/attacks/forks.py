"""Commands in processes of their own, forked from one that has imported everything already.

A process that imports torch takes four seconds to start, a fork of one that has takes twenty
milliseconds. What a fork cannot show is how the interpreter itself begins and ends; a command
started with `fresh=True` is a process like any other.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import os
import pkgutil
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

GIB = 2**30
MEMORY_BYTES = 3 * GIB
"""What a command may allocate beyond what was imported: many times what the tiny runs need."""
MOST_PROCESSES = 40
"""More than any tiny run has; a command that goes beyond is stopped before the machine is full."""
LOOK_SECONDS = 0.002
COUNT_SECONDS = 0.5
"""Between two counts of a command's processes."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)
_LEFT_OUT = ("narrowcast.bench", "narrowcast.integrations", "narrowcast.kernels", "__main__")
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)

Words = Sequence[str]
Prepare = Callable[[], None]


def preload() -> None:
    """Import all that a command imports; start no thread, which a fork would not have."""
    import torch

    import narrowcast

    torch.set_num_threads(1)
    sys.modules["pyarrow"] = None  # type: ignore[assignment]  # its import starts a thread
    for module in pkgutil.walk_packages(narrowcast.__path__, "narrowcast."):
        if not any(name in module.name for name in _LEFT_OUT):
            importlib.import_module(module.name)
    for name in (
        "plotly",
        "pydoc_data.topics",
        "ruamel.yaml",
        "numpy.ctypeslib",
        "rich.live",
        "torch._dynamo",
    ):
        importlib.import_module(name)
    from narrowcast.runner.run import plan_recipe

    plan_recipe("quickstart")  # brings in what torch imports when it is first used
    del sys.modules["pyarrow"]
    threads = len(list(Path("/proc/self/task").iterdir()))
    assert threads == 1, f"{threads} threads: a fork would have one of them"
    gc.collect()
    gc.freeze()  # what is never looked at is never copied by a fork


@dataclass(frozen=True)
class Ended:
    """How a command ended, and all it said."""

    words: tuple[str, ...]
    code: int | None
    """Its exit code; the signal that ended it, less than 0; None: stopped at its time limit."""
    out: str
    err: str
    seconds: float
    why_stopped: str = ""

    @property
    def said(self) -> str:
        return self.out + self.err


@dataclass
class Command:
    """A command that was started, with a session of its own."""

    pid: int
    words: tuple[str, ...]
    out: Path
    err: Path
    began: float
    status: int | None = None

    def running(self) -> bool:
        if self.status is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = status if done else None
        return self.status is None

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the command, not to processes it has started."""
        if self.running():
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it as the system does when memory runs out: at once, and it alone."""
        self.send(signal.SIGKILL)

    def wait(self, seconds: float) -> Ended:
        """Wait until it has ended, and end it after so many seconds or so many processes."""
        deadline, counted, why = self.began + seconds, time.monotonic(), ""
        while self.running():
            now = time.monotonic()
            if now > deadline:
                why = f"no end after {seconds:.0f} s"
            elif now > counted + COUNT_SECONDS:
                counted = now
                if (many := len(_session(self.pid))) > MOST_PROCESSES:
                    why = f"{many} processes and counting"
            if why:
                break
            time.sleep(LOOK_SECONDS)
        code = None if self.status is None else os.waitstatus_to_exitcode(self.status)
        took = time.monotonic() - self.began
        self.end()
        return Ended(self.words, code, _text(self.out), _text(self.err), took, why)

    def end(self) -> None:
        """Kill whatever is left of it."""
        for _ in range(3):  # a process may fork between the look and the kill
            left = _session(self.pid)
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not left:
                break
        if self.status is None:
            self.status = os.waitpid(self.pid, 0)[1]


def start(
    words: Words,
    *,
    cwd: Path,
    name: str,
    fresh: bool = False,
    prepare: Prepare = lambda: None,
) -> Command:
    """Start `narrowcast WORDS` in `cwd`; what it says goes to NAME.out and NAME.err beside it.

    `prepare` is called in the new process when its streams are in place, before the command is.
    """
    out, err = cwd / f"{name}.out", cwd / f"{name}.err"
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _be_the_command(words, cwd=cwd, out=out, err=err, fresh=fresh, prepare=prepare)
    return Command(pid, tuple(words), out, err, began)


def die_with_parent() -> None:
    """Have the system kill this process when the one that started it ends, where it can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)


def _be_the_command(
    words: Words, *, cwd: Path, out: Path, err: Path, fresh: bool, prepare: Prepare
) -> NoReturn:
    code = 70  # a fault of this file, which no command ends with
    try:
        os.setsid()
        die_with_parent()
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        os.chdir(cwd)
        for fd, path in ((0, os.devnull), (1, out), (2, err)):
            flags = os.O_RDONLY if fd == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            os.dup2(os.open(path, flags), fd)
        _limit_memory()
        prepare()
        if fresh:
            os.execv(sys.executable, [sys.executable, "-m", "narrowcast", *words])
        code = _call(words)
    except BaseException:  # noqa: BLE001  whatever it is, this process must not go on
        _print_traceback()
    finally:
        os._exit(code)


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _call(words: Words) -> int:
    """Do what the interpreter does for `python -m narrowcast WORDS`, from streams to exit code."""
    from narrowcast.cli import main

    sys.stdin = _stream(0, "r")
    sys.stdout = _stream(1, "w")
    sys.stderr = _stream(2, "w", errors="backslashreplace", line_buffering=True)
    sys.argv = ["narrowcast", *words]
    code = 1
    try:
        main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException as error:  # noqa: BLE001  as the interpreter does
        _print_traceback()
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()
    atexit._run_exitfuncs()
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except (OSError, ValueError) as error:
        with contextlib.suppress(OSError, ValueError):
            print(f"Exception ignored in: sys.stdout\n{error!r}", file=sys.stderr)
        code = 120
    return code


def _print_traceback() -> None:
    with contextlib.suppress(OSError, ValueError):  # stderr may be what was lost
        traceback.print_exc()


def _stream(
    fd: int, mode: str, *, errors: str = "strict", line_buffering: bool = False
) -> io.TextIOWrapper | None:
    try:
        os.fstat(fd)
    except OSError:
        return None  # as the interpreter does with a stream that is closed
    raw = open(fd, f"{mode}b", closefd=False)  # noqa: SIM115
    return io.TextIOWrapper(raw, encoding="utf-8", errors=errors, line_buffering=line_buffering)


def _session(leader: int) -> list[int]:
    """Return the processes of the session that `leader` began, zombies left out."""
    found = []
    for entry in os.listdir("/proc"):  # noqa: PTH208  every few milliseconds
        if entry.isdigit():
            with contextlib.suppress(OSError, IndexError):
                text = Path(f"/proc/{entry}/stat").read_text()
                state, _, _, session = text.rpartition(")")[2].split()[:4]
                if int(session) == leader and state != "Z":
                    found.append(int(entry))
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
