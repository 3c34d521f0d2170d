"""The bench's side of a worker: its process in a session of its own, its log, its answers."""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, final

from narrowcast.runs.strict_json import dumps, loads

EXIT_SECONDS = 10
"""How long a process may take to exit after its last answer."""
TAIL_LINES = 60
REASON_LETTERS = 300


@final
class Worker:
    """The process of one contender. It ends when this process does."""

    def __init__(
        self, job: Mapping[str, Any], *, folder: Path, timeout_seconds: float, cold: bool
    ) -> None:
        """Start it; `cold` gives it empty compiler caches of its own."""
        self.failure = ""
        """Reason why the process stopped responding."""
        self._timeout_seconds = timeout_seconds
        self._killed = False
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / "log.txt"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "narrowcast.bench.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                encoding="utf-8",
                env=os.environ | (_caches(folder) if cold else {}),
                # A session of its own, so that processes of the compiler can be killed with it.
                start_new_session=True,
            )
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        self.request({**job, "started": time.time()})

    def request(self, message: Mapping[str, Any]) -> None:
        """Send a request. If the process has ended, `answer` reports it."""
        self._requested = time.monotonic()
        if self._killed:
            return
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(dumps(message) + "\n")
            self._process.stdin.flush()

    def answer(self) -> dict[str, Any] | None:
        """Wait for the answer to the last request; None if there is none, see `failure`."""
        if self.failure:
            return None
        remaining = self._requested + self._timeout_seconds - time.monotonic()
        try:
            answer = self._answers.get(timeout=max(0.0, remaining))
        except queue.Empty:
            answer = None
            self.failure = f"no response for {self._timeout_seconds:g} s, so it was stopped"
        else:
            self.failure = "" if answer else self._exit_reason()
        if self.failure:
            self.kill()
        return answer

    def kill(self) -> None:
        """Kill the process and everything it started, and wait for it."""
        if self._killed:  # its process number may belong to another by now
            return
        self._killed = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._listener.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # a request that was never read
                pipe.close()

    def tail(self) -> list[str]:
        text = self._log.read_text(encoding="utf-8", errors="replace")
        return text.splitlines()[-TAIL_LINES:]

    def _exit_reason(self) -> str:
        """Return in one line why the process ended: the end of its log, or its signal."""
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(timeout=EXIT_SECONDS)
        if code is not None and code < 0:
            known = -code in set(signal.Signals)
            return f"killed by {signal.Signals(-code).name if known else f'signal {-code}'}"
        lines = [line.strip() for line in self.tail() if line.strip()]
        if code == 0 or not lines:
            return "does not respond" if code is None else f"exited with code {code}"
        return lines[-1].removeprefix("narrowcast.errors.")[:REASON_LETTERS]

    def _listen(self) -> None:
        assert self._process.stdout is not None
        try:
            for line in self._process.stdout:
                self._answers.put(loads(line))
        except ValueError:
            pass  # killed in the middle of a line
        finally:
            self._answers.put(None)


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Make SIGTERM raise KeyboardInterrupt inside the block, as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _caches(folder: Path) -> dict[str, str]:
    return {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }
