"""What a reader must know before believing a comparison, in sentences."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from narrowcast.report.compare.runs import ComparedRun
from narrowcast.report.phrases import count, value

_LOADING = ("data.workers", "data.prefetch")
"""Settings under `data` that do not change what is read."""
_WITHOUT_EFFECT = (
    *_LOADING, "checkpoint.", "profile.", "trackers",
    "eval.every", "eval.patience", "eval.min_delta", "eval.keep_best",
)  # fmt: skip
"""Settings, or their beginnings, that change neither a step nor what is measured after it."""
_LR = ("steps", "epochs", "lr_schedule.", "optimizer.lr")
_MACHINE = ("cpu", "gpus", "cores", "torch")


def different_data(differing: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Return the settings by which the runs read different data; their losses do not compare."""
    return [key for key in differing if key.startswith("data.") and key not in _LOADING]


def causes(differing: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Return the settings that may explain a difference; those of precision count as one."""
    matches = [key for key in differing if not key.startswith(_WITHOUT_EFFECT)]
    if "steps" in matches:  # which epochs stand for
        matches = [key for key in matches if key != "epochs"]
    formats = [key for key in matches if key.startswith("precision.")]
    others = [key for key in matches if key not in formats]
    return [", ".join(formats), *others] if formats else others


def cautions(
    grouped: Sequence[Sequence[ComparedRun]], differing: Mapping[str, tuple[str, ...]], *, step: int
) -> Iterator[str]:
    """Say where the runs do not compare as the table suggests."""
    runs = [run for members in grouped for run in members]
    data = different_data(differing)
    if data:
        yield (
            f"The runs use different data ({', '.join(data)}), so their losses cannot be "
            "compared. Only speed and skipped steps can."
        )
    several = causes(differing)
    if len(several) > 1:
        yield (
            f"The runs differ in {count(len(several))} settings ({', '.join(several)}), so a "
            "difference may come from any of them. Compare runs that differ in one setting."
        )
    yield from _learning_rates(grouped, differing, step=step)
    differing_machine = [key for key in _MACHINE if len({_machine(run, key) for run in runs}) > 1]
    if differing_machine:
        differences = ", ".join(differing_machine)
        yield (
            f"The runs used different machines ({differences}), so times cannot be compared "
            "directly."
        )
    yield from _seeds(grouped)
    for run in runs:
        requested, done = run.data.requested_steps, run.data.steps[-1].step
        if early := run.data.ended_early:
            yield f"{run.label} ended early at step {count(done)} of {count(requested)}: {early}."
        elif done < requested:
            yield f"{run.label} has done {count(done)} of its {count(requested, 'step')}."
        if run.data.diverged:
            yield f"{run.label} has diverged and is not ranked: {run.data.diverged}."
    separate = [run.label for run in runs if (p := run.at_step(step)) and p.step != step]
    if separate:
        yield (
            f"The runs were not evaluated at the same steps. For {', '.join(separate)}, the last "
            f"value before step {count(step)} is used."
        )


def _learning_rates(
    grouped: Sequence[Sequence[ComparedRun]], differing: Mapping[str, tuple[str, ...]], *, step: int
) -> Iterator[str]:
    """Report learning rates that differ because of settings, not because of skipped steps."""
    if not any(key.startswith(_LR) for key in differing):
        return
    firsts = [members[0] for members in grouped]
    rates = {run.label: r.lr for run in firsts for r in run.data.steps if r.step == step}
    if len({value(rate) for rate in rates.values()}) > 1:
        listed = ", ".join(f"{value(rate)} in {label}" for label, rate in rates.items())
        yield f"The runs have different learning rates: at step {count(step)}, {listed}."


def _machine(run: ComparedRun, key: str) -> str:
    # A run that was continued on the same machine has it twice.
    return str(sorted({str(session.get(key)) for session in run.data.sessions}))


def _seeds(grouped: Sequence[Sequence[ComparedRun]]) -> Iterator[str]:
    if all(len({str(run.seed) for run in members}) < 2 for members in grouped):
        yield (
            "Each group has a single seed, so differences may be due to chance. Train again "
            "with seed=1, seed=2 and compare all runs."
        )
    for members in grouped:
        for seed, times in Counter(str(run.seed) for run in members).items():
            if times > 1:
                yield (
                    f"{count(times)} runs share the recipe and seed {seed}. They are averaged "
                    "and count as one."
                )
