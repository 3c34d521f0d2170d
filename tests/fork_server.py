"""Start Python programs as forks of a process that has imported torch.

A process that imports torch needs two to four seconds of a CPU before its first line, a fork of
one that has needs a few hundredths. How an interpreter begins and what a program imports cannot
be tested this way.
"""

import atexit
import contextlib
import io
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from inspect import signature
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

PRELOADED = (
    "torch", "torch._dynamo", "numpy.ctypeslib", "plotly", "pydoc_data.topics", "pytest",
    "rich.live", "ruamel.yaml", "narrowcast.bench.step", "narrowcast.bench.worker",
    "narrowcast.bench.zoo.subject", "narrowcast.cli.bench", "narrowcast.cli.plan",
    "narrowcast.cli.resume", "narrowcast.cli.train", "narrowcast.cli.watch",
    "narrowcast.report.page", "narrowcast.runner.run", "narrowcast.workloads.lm.task",
)  # fmt: skip
"""Modules that start no thread and use no GPU when they are imported."""
_FORKED = "forked program"


class ForkedPopen(subprocess.Popen[Any]):
    """`subprocess.Popen` that forks Python modules and scripts instead of starting Python.

    Everything else, such as a shell or a program with `preexec_fn`, is started as usual.
    """

    _process: multiprocessing.process.BaseProcess | None = None

    def _execute_child(self, *arguments: Any) -> None:
        settings = signature(super()._execute_child).bind(*arguments).arguments
        if not _can_be_forked(settings):
            super()._execute_child(*arguments)
            return
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        streams = (settings["p2cread"], settings["c2pwrite"], settings["errwrite"])
        reader, writer = multiprocessing.Pipe(duplex=False)
        order = {
            "words": [os.fspath(word) for word in settings["args"][1:]],
            "folder": os.fspath(settings["cwd"] or Path.cwd()),
            "environment": dict(settings["env"] or os.environ),
            "own_session": settings["start_new_session"],
            "streams": [
                Connection(os.dup(number if stream == -1 else stream))
                for number, stream in enumerate(streams)
            ],
            "ready": writer,
        }
        context = multiprocessing.get_context("forkserver")
        self._process = context.Process(
            target=runpy.run_path, args=(__file__, {"order": order}, _FORKED)
        )
        with server_settings():
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self._child_created = True
        for connection in (*order["streams"], writer):
            connection.close()
        self._close_pipe_fds(*(settings[name] for name in pipes))
        with reader, contextlib.suppress(EOFError):
            reader.recv()  # the program has its session and its streams

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._process is None:
            return super()._try_wait(wait_flags)
        self._process.join(0 if wait_flags else None)
        code = self._process.exitcode
        if code is None:
            return 0, 0
        return self.pid, code << 8 if code >= 0 else -code

    def _internal_poll(self, *arguments: Any, **options: Any) -> int | None:
        if self._process is not None:
            options["_waitpid"] = lambda _, flags: self._try_wait(flags)
        return super()._internal_poll(*arguments, **options)


def _can_be_forked(settings: dict[str, Any]) -> bool:
    """Return whether this is a Python module or script without unusual settings."""
    args, unusual = settings["args"], ("preexec_fn", "pass_fds", "shell")
    if sys.platform != "linux" or isinstance(args, str | bytes) or len(args) < 2:
        return False
    first = os.fspath(args[1])
    if args[0] != sys.executable or not (first == "-m" or first.endswith(".py")):
        return False
    return not any(settings[name] for name in unusual) and settings["executable"] is None


@contextlib.contextmanager
def server_settings() -> Iterator[None]:
    """Set what the server inherits if it is about to start: one thread, no interpreted kernels."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(PRELOADED))
    before = dict(os.environ)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.pop("TRITON_INTERPRET", None)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _become_program(
    *,
    words: Sequence[str],
    folder: str,
    environment: dict[str, str],
    own_session: bool,
    streams: Sequence[Connection],
    ready: Connection,
) -> NoReturn:
    """Do what a new Python does, from streams to exit code."""
    code = 1
    try:
        if own_session:
            os.setsid()
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        for number, stream in enumerate(streams):
            os.dup2(stream.fileno(), number)
            stream.close()
        sys.stdin = _open_stream(0, "r")
        sys.stdout = _open_stream(1, "w", line_buffering=os.isatty(1))
        sys.stderr = _open_stream(2, "w", errors="backslashreplace", line_buffering=True)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        ready.close()
        code = _run_program(words)
    except BaseException:  # noqa: BLE001  whatever it is, the server must not go on here
        traceback.print_exc()
    finally:
        os._exit(code)


def _run_program(words: Sequence[str]) -> int:
    """Run `python WORDS` in this process and return its exit code."""
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    code = 0
    try:
        if words[0] == "-m":
            sys.argv = list(words[1:])
            sys.path.insert(0, str(Path.cwd()))
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(words)
            sys.path.insert(0, str(Path(words[0]).parent))
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as error:
        if isinstance(error.code, str):
            sys.stderr.write(f"{error.code}\n")
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # noqa: BLE001  as the interpreter does
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        code = 120
    return code


def _open_stream(
    number: int, mode: str, *, errors: str = "strict", line_buffering: bool = False
) -> io.TextIOWrapper:
    raw = open(number, f"{mode}b", closefd=False)  # noqa: SIM115  open until the process ends
    return io.TextIOWrapper(raw, encoding="utf-8", errors=errors, line_buffering=line_buffering)


if __name__ == _FORKED:
    _become_program(**order)  # noqa: F821  a global that `run_path` was given
