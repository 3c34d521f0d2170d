"""The coordinator's side of one worker: a process of its own session, a log file, an inbox."""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias, final

from narrowcast.bench.contenders import Contender
from narrowcast.runs.strict_json import dumps, loads

Inbox: TypeAlias = "queue.SimpleQueue[tuple[Worker, dict[str, Any] | None]]"
"""Answers of all workers as they come; None says that a worker's process is over."""

LAST_SECONDS = 10
"""What a process that has said its last may take to be over."""
TAIL_LINES = 60
REASON_LETTERS = 300


@final
class Worker:
    """One contender's process. Ends when this process does, whatever happens to it."""

    def __init__(
        self,
        contender: Contender,
        job: Mapping[str, Any],
        *,
        folder: Path,
        inbox: Inbox,
        cold: bool,
    ) -> None:
        """Start it; `cold` gives it compiler caches of its own, which are empty."""
        self.contender = contender
        self.began = self.asked = time.monotonic()
        self.setup: dict[str, Any] = {}
        """What it told of its start."""
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
                # A session of its own, so that the compiler's processes can be ended with it.
                start_new_session=True,
            )
        self._listener = threading.Thread(target=self._listen, args=(inbox,), daemon=True)
        self._listener.start()
        self.ask(job)

    def ask(self, request: Mapping[str, Any]) -> None:
        """Send a request; to a process that is over this does nothing, the inbox tells."""
        self.asked = time.monotonic()
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return

    def kill(self) -> None:
        """End the process and all that it started, and wait for it."""
        with contextlib.suppress(ProcessLookupError):  # over already, and so is all it started
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._listener.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # a request that nobody will read
                pipe.close()

    def reason(self) -> str:
        """Say in one line why the process is over: the end of its log, or how it died."""
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):  # something does not let it go
            code = self._process.wait(timeout=LAST_SECONDS)
        if code is not None and code < 0:
            known = -code in set(signal.Signals)
            return f"died of {signal.Signals(-code).name if known else f'signal {-code}'}"
        lines = [line.strip() for line in self.tail() if line.strip()]
        if code == 0 or not lines:
            return (
                "says no more and does not end" if code is None else f"ended with exit code {code}"
            )
        return lines[-1].removeprefix("narrowcast.errors.")[:REASON_LETTERS]

    def tail(self) -> list[str]:
        """Return the last lines of its log."""
        text = self._log.read_text(encoding="utf-8", errors="replace")
        return text.splitlines()[-TAIL_LINES:]

    def _listen(self, inbox: Inbox) -> None:
        assert self._process.stdout is not None
        try:
            for line in self._process.stdout:
                inbox.put((self, loads(line)))
        except ValueError:
            pass  # it was ended in the middle of a line
        finally:
            inbox.put((self, None))


def _caches(folder: Path) -> dict[str, str]:
    return {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }
