"""The process of one contender, with requests and answers as lines of JSON on stdin and stdout.

Its own stdout goes to the log, because a library may print between two answers.
"""

import importlib
import os
import queue
import sys
import threading
import time
from collections.abc import Mapping
from typing import IO, Any, Protocol, cast

from narrowcast.runs.strict_json import dumps, loads

SUBJECTS: Mapping[str, str] = {
    "step": "narrowcast.bench.step",
    "models": "narrowcast.bench.zoo.subject",
}
"""The module of each bench whose `subject(job)` returns what is measured."""


class BenchSubject(Protocol):
    """What a worker measures."""

    def ready(self) -> dict[str, Any]:
        """Build, compile and warm up; return facts about it."""
        ...

    def measure(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Measure once; return plain data."""
        ...


def load_subject(job: Mapping[str, Any]) -> BenchSubject:
    """Return the subject of a job."""
    module = importlib.import_module(SUBJECTS[job["bench"]])
    return cast(BenchSubject, module.subject(job))


def main() -> None:
    """Answer requests until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    job = requests.get()
    subject = load_subject(job)
    started = time.time() - job["started"]
    _send(answers, {"start_seconds": started, **subject.ready()})
    while True:
        _send(answers, subject.measure(requests.get()))


def _send(answers: IO[str], answer: Mapping[str, Any]) -> None:
    answers.write(dumps(answer) + "\n")
    answers.flush()


def _read(requests: "queue.SimpleQueue[Any]") -> None:
    for line in sys.stdin:
        requests.put(loads(line))
    # stdin ends when the bench is over or was killed. Exit at once, even while compiling: nothing
    # this process holds outlives it, and cleaning up may hang.
    os._exit(0)


if __name__ == "__main__":
    main()
