"""Processes that train runs side by side on one GPU, and the order in which runs are asked for.

A small model leaves most of a GPU idle while the host launches its kernels; several processes share
it. They are spawned, as CUDA does not survive a fork, and once, as starting it takes seconds.
"""

from __future__ import annotations

import functools
import multiprocessing
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from hybrid_studies.gpu_tasks import GPU_TASKS
from hybrid_studies.running import Run, Runs, train
from hybrid_studies.tasks import Task


class UnfinishedError(Exception):
    """Something depends on runs that are not trained yet."""


class Asked(Runs):
    """Finished runs, which notes those that are missing and trains none."""

    def __init__(self, runs: Runs) -> None:
        self.done = runs.done
        self.missing: dict[str, Run] = {}

    def all(self, task: Task, wanted: Sequence[Run], **more: Any) -> list[dict[str, Any]]:
        """Return the results of runs; if some are missing, note them."""
        missing = {run.key: run for run in wanted if run.key not in self.done}
        self.missing |= missing
        if missing:
            raise UnfinishedError
        return [self.done[run.key] for run in wanted]


class Workers:
    """So many processes, each with the tasks that it was asked for."""

    def __init__(self, jobs: int, *, data: Path, quick: bool) -> None:
        self.pool = multiprocessing.get_context("spawn").Pool(
            jobs, initializer=began, initargs=(data, quick)
        )

    def train(self, runs: Runs, wanted: Sequence[Run]) -> None:
        """Train runs and keep each as it ends; those under way when time is over are lost."""
        results = self.pool.imap_unordered(worked, wanted)
        for _ in wanted:
            try:
                key, found = results.next(timeout=max(0.0, runs.until - time.monotonic()))
            except multiprocessing.TimeoutError as error:
                raise TimeoutError from error
            runs.keep(key, found)

    def answer(self, runs: Runs, questions: Sequence[Callable[[Runs], object]]) -> None:
        """Train all that the questions need, at once as far as one does not wait for another.

        What others wait for comes first, then one seed after the other: whenever it is stopped,
        some seeds are whole.
        """
        while True:
            asked = Asked(runs)
            for question in questions:
                try:
                    question(asked)
                except UnfinishedError:
                    continue
            if not asked.missing:
                return
            order = sorted(asked.missing.values(), key=lambda run: (run.reported, run.seed))
            self.train(runs, order)

    def close(self) -> None:
        """End the processes, whatever they do."""
        self.pool.terminate()
        self.pool.join()


def began(data: Path, quick: bool) -> None:
    torch.set_num_threads(1)
    device = "cpu" if quick else "cuda"
    TASK_OF["make"] = functools.cache(
        lambda name: GPU_TASKS[name](data, quick=quick, device=device)
    )


def worked(run: Run) -> tuple[str, dict[str, Any]]:
    return run.key, train(TASK_OF["make"](run.task), run)


TASK_OF: dict[str, Callable[[str], Task]] = {}
"""Of a worker process: what makes a task by its name, each once."""
