"""A worker's side of the talk with its coordinator: lines of JSON in on stdin, out on stdout.

Whatever a library prints must not land between them, so the process's own stdout becomes stderr,
which is a log file. A thread reads stdin all the time: when it ends, the coordinator is gone or
done, and the process ends at once, in the middle of a compilation too.
"""

import os
import queue
import sys
import threading
from collections.abc import Iterator
from typing import IO, Any, final

from narrowcast.runs.strict_json import dumps, loads


@final
class Channel:
    """Requests that come in, answers that go out."""

    def __init__(self, answers: IO[str], requests: "queue.SimpleQueue[Any]") -> None:
        self._answers, self._requests = answers, requests

    @classmethod
    def open(cls) -> "Channel":
        """Take stdin and stdout away from everything else in this process."""
        answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=_read, args=(requests,), daemon=True).start()
        return cls(answers, requests)

    def send(self, event: str, **facts: Any) -> None:
        """Send one answer."""
        self._answers.write(dumps({"event": event, **facts}) + "\n")
        self._answers.flush()

    def next(self) -> dict[str, Any]:
        """Wait for the next request."""
        request: dict[str, Any] = self._requests.get()
        return request

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            yield self.next()


def _read(requests: "queue.SimpleQueue[Any]") -> None:
    for line in sys.stdin:
        requests.put(loads(line))
    # No clean-up: nothing this process holds outlives it, and what would clean up may hang.
    os._exit(0)
