"""One contender's process: build it, take the first steps, then time steps whenever asked.

An exception ends the process; the coordinator reads the reason from the end of its log.
"""

import importlib
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

from narrowcast.bench.channel import Channel

SUBJECTS: Mapping[str, str] = {
    "step": "narrowcast.bench.step",
    "optimizer": "narrowcast.bench.optimizer",
    "products": "narrowcast.bench.products",
    "health": "narrowcast.bench.health",
    "quality": "narrowcast.bench.quality",
    "models": "narrowcast.bench.zoo.subject",
}
"""Each bench, and the module whose `subject(job)` makes what is measured in it."""


class Subject(Protocol):
    """What a worker does between two requests."""

    def ready(self) -> dict[str, Any]:
        """Build, compile, warm up; return what that took."""
        ...

    def measure(self, request: Mapping[str, Any], tell: Callable[[str], None]) -> dict[str, Any]:
        """Measure once, tell how it goes if that takes minutes; return plain data."""
        ...


def subject_of(job: Mapping[str, Any]) -> Subject:
    """Return what the job asks to be measured."""
    module = importlib.import_module(SUBJECTS[job["bench"]])
    return cast(Subject, module.subject(job))


def main() -> None:
    """Answer requests until stdin ends."""
    channel = Channel.open()
    job = channel.next()
    begin = time.perf_counter()
    subject = subject_of(job)
    channel.send("alive", import_seconds=time.perf_counter() - begin)
    channel.send("ready", **subject.ready())

    def tell(text: str) -> None:
        channel.send("progress", text=text)

    for request in channel:
        channel.send("measured", **subject.measure(request, tell))


if __name__ == "__main__":
    main()
