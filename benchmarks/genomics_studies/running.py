"""Many small trainings at once: worker processes that load torch once and take run after run."""

import json
import multiprocessing
import os
import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from genomics_studies.questions import BY_TASK, Question

ONE_JUDGED = "data.validation_share=0.0005"
"""Of fewer than 3,000 sequences one is judged on: the workload always wants some."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training, or one baseline, in words that a process can be given."""

    question: str
    study: str
    candidate: str
    policy: str
    seed: int
    fold: int
    recipe: str
    settings: Sequence[str]
    cost: float
    metric: str
    baseline: bool = False
    refit: bool = False
    """Whether what was judged on is learnt: then nothing is, and it has no measures of it."""

    @property
    def name(self) -> str:
        """Its name among all jobs."""
        return f"{self.question} / {self.candidate} / {self.policy} / {self.seed} / {self.fold}"


def job_of(
    question: Question,
    *,
    candidate: str,
    policy: str,
    seed: int,
    fold: int,
    data: Path,
    device: str,
    tested: bool,
    more: Sequence[str] = (),
) -> Job:
    """Return the training of a candidate; without `tested` it is not told where the test lies."""
    folder = data / question.files.format(fold=fold)
    names = {"path": "train", "validation": "validation", "test": "test"}
    refit = tested and question.refit
    if refit:
        names = {"path": "rest", "test": "test"}
    files = [
        f"data.{key}={folder / name}.{question.suffix}"
        for key, name in names.items()
        if tested or key != "test"
    ]
    files += [ONE_JUDGED] if refit else []
    settings = [*files, f"device={device}", f"seed={seed}"]
    settings += [each.replace("{data}", str(data)) for each in question.settings]
    settings += question.candidates[candidate]
    if policy != BY_TASK:
        settings.append(f"precision.policy={policy}")
    if policy.startswith("fp8"):
        # These layers are too small to gain; what fp8 does to the result is the question.
        settings.append("precision.skip_slow_fp8=false")
    return Job(
        question=question.name,
        study=question.study,
        candidate=candidate,
        policy=policy,
        seed=seed,
        fold=fold,
        recipe=question.recipe,
        settings=[*settings, *more],
        cost=question.cost,
        metric=question.metric,
        refit=refit,
    )


def run_all(
    jobs: Sequence[Job], *, workers: int, data: Path, seconds: float
) -> Iterator[dict[str, Any]]:
    """Yield what comes of jobs as it comes, the longest first; end when time is over."""
    spawn = multiprocessing.get_context("spawn")
    waiting, done = spawn.Queue(), spawn.Queue()
    for job in sorted(jobs, key=lambda each: (-each.cost, each.seed, each.fold)):
        waiting.put(job)
    processes = [
        spawn.Process(target=_work, args=(waiting, done, data), daemon=True)
        for _ in range(min(workers, len(jobs)))
    ]
    for process in processes:
        waiting.put(None)
        process.start()
    until = time.monotonic() + seconds
    left = len(jobs)
    while left and time.monotonic() < until:
        try:
            yield done.get(timeout=0.5)
            left -= 1
        except queue.Empty:
            if not any(process.is_alive() for process in processes):
                break
    for process in processes:
        # A run that is asked to stop ends well, and the process would take the next job.
        process.kill()
        process.join()


def _work(waiting: Any, done: Any, data: Path) -> None:
    import torch

    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    while (job := waiting.get()) is not None:
        began = time.perf_counter()
        try:
            found = _baseline(job, data) if job.baseline else _trained(job)
        except Exception as error:  # noqa: BLE001  one that fails must not end the others
            found = {"error": f"{type(error).__name__}: {error}"}
        told = {**asdict(job), "settings": list(job.settings), **found}
        done.put(told | {"seconds": round(time.perf_counter() - began, 1)})


def _end_with_parent() -> None:
    """Leave nothing behind that trains on where the benchmark itself was ended."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)


def _baseline(job: Job, data: Path) -> dict[str, Any]:
    from genomics_studies.baselines import BASELINES

    return {"test": BASELINES[job.question][job.candidate](data, job.fold), "parameters": 0}


def _trained(job: Job) -> dict[str, Any]:
    """Train as `narrowcast train` does, and return what the run folder says in the end."""
    import narrowcast as nc

    folder = Path(tempfile.mkdtemp(prefix="genomics-"))
    try:
        run = nc.train(job.recipe, job.settings, out=folder / "run")
        parameters = sum(each.numel() for each in run.model.parameters())
        step = 0
        for record in run:
            step = record.step
        judged = json.loads((folder / "run" / "judged.json").read_text())
        finished = json.loads((folder / "run" / "finished.json").read_text())
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    measured = {part: found["measured"] for part, found in judged.items()}
    if job.refit:
        del measured["validation"]
    best = finished.get("exported", {}).get("step", step)
    return {**measured, "parameters": parameters, "steps": step, "best_step": best}


def summary(results: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield a row for each candidate of each question: means over folds, then over seeds."""
    import numpy as np

    groups: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for result in results:
        if "error" not in result:
            key = (result["question"], result["candidate"], result["policy"])
            groups.setdefault(key, []).append(result)
    for (question, candidate, policy), group in groups.items():
        row: dict[str, Any] = {"question": question, "candidate": candidate, "policy": policy}
        metric = group[0]["metric"]
        seeds = sorted({each["seed"] for each in group})
        row |= {"metric": metric, "seeds": len(seeds), "runs": len(group)}
        row["baseline"] = group[0]["baseline"]
        for part in ("validation", "test"):
            if all(metric in each.get(part, {}) for each in group):
                means = [
                    np.mean([each[part][metric] for each in group if each["seed"] == seed])
                    for seed in seeds
                ]
                row[part] = float(np.mean(means))
                row[f"{part}_sd"] = float(np.std(means, ddof=1)) if len(means) > 1 else 0.0
        row["parameters"] = group[0].get("parameters", 0)
        row["seconds"] = float(np.mean([each["seconds"] for each in group]))
        yield row
