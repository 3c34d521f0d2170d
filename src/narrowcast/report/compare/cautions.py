"""What a reader must know before believing a comparison, in sentences."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from narrowcast.report.compare.runs import Run
from narrowcast.report.phrases import count

_LOADING = ("data.workers", "data.prefetch")
"""Settings under `data` that do not change what is read."""
_MACHINE = ("cpu", "gpus", "cores", "torch")


def different_data(differing: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Return the settings by which the runs read different data; their losses do not compare."""
    return [key for key in differing if key.startswith("data.") and key not in _LOADING]


def cautions(
    grouped: Sequence[Sequence[Run]], differing: Mapping[str, tuple[str, ...]], *, step: int
) -> Iterator[str]:
    """Say where the runs do not compare as the table suggests."""
    runs = [run for members in grouped for run in members]
    data = different_data(differing)
    if data:
        yield (
            f"The runs read different data ({', '.join(data)}): their losses measure different "
            "things, and only speed and skips compare."
        )
    differing_machine = [key for key in _MACHINE if len({_machine(run, key) for run in runs}) > 1]
    if differing_machine:
        told = ", ".join(differing_machine)
        yield f"The runs took place on different machines ({told}), so seconds compare those too."
    yield from _seeds(grouped)
    for run in runs:
        asked, done = run.data.asked, run.data.steps[-1].step
        if early := run.data.ended_early:
            yield f"{run.label} ended early at step {count(done)} of {count(asked)}: {early}."
        elif done < asked:
            yield f"{run.label} has done {count(done)} of its {count(asked, 'step')}."
        if run.data.diverged:
            yield f"{run.label} has diverged and is not called best: {run.data.diverged}."
    apart = [run.label for run in runs if (p := run.at_step(step)) and p.step != step]
    if apart:
        yield (
            f"The runs were not evaluated at the same steps; of {', '.join(apart)} the last value "
            f"before step {count(step)} is taken."
        )


def _machine(run: Run, key: str) -> str:
    # A run that was continued on the same machine has it twice.
    return str(sorted({str(session.get(key)) for session in run.data.sessions}))


def _seeds(grouped: Sequence[Sequence[Run]]) -> Iterator[str]:
    if all(len({str(run.seed) for run in members}) < 2 for members in grouped):
        yield (
            "There is one seed of each, so nothing says whether a difference is more than chance; "
            "train again with seed=1, seed=2 and compare all."
        )
    for members in grouped:
        for seed, times in Counter(str(run.seed) for run in members).items():
            if times > 1:
                yield (
                    f"{count(times)} runs share recipe and seed {seed}: they are one repetition, "
                    "averaged, not so many seeds."
                )
