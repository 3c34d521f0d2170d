"""How the run went, in sentences: its ending, a headline, the figures beside it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from narrowcast.report.layers import WHOLE, active_formats, format_shares
from narrowcast.report.phrases import (
    at_scale,
    capital,
    count,
    duration,
    in_policy,
    large,
    measured,
    said,
    scale,
    share,
    size,
    value,
)
from narrowcast.report.run_data import RunData
from narrowcast.report.tables import FindingRow, findings
from narrowcast.runs.records import PrecisionRecord, StepRecord
from narrowcast.runs.task_info import Metric

Tone = Literal["good", "fair", "bad"]


@dataclass(frozen=True)
class RunEnding:
    """Where the run stands, and what its owner may want to do about it."""

    label: str
    tone: Tone
    advice: str = ""
    """A sentence or two; empty if nothing needs doing."""


@dataclass(frozen=True)
class Fact:
    """One number of the headline row."""

    label: str
    value: str
    note: str = ""


def ending(data: RunData) -> RunEnding:
    """Return where the run stands, from its records alone."""
    done, requested = len(data.steps), data.requested_steps
    if not done:
        return RunEnding(
            "No step yet",
            "fair",
            advice=(
                "The folder has no record of a step. The run is still starting, or ended before "
                "its first step."
            ),
        )
    if data.gave_up:
        return RunEnding("Diverged", "bad", advice=_gave_up(data))
    if data.diverged:
        return RunEnding("Diverged", "bad", advice=_came_to_nothing(data))
    lost = _lost_at(data.steps)
    if lost is not None:
        return RunEnding(
            "Loss not finite",
            "bad",
            advice=(
                f"The training loss has not been finite since step {count(lost)}. Steps with "
                "non-finite gradients are skipped, so the weights are those of the last applied "
                "step."
            ),
        )
    if done >= requested or data.is_done:
        return RunEnding("Finished", "good", advice=_how_it_ended(data))
    progress = f"{count(done)} of {count(requested, 'step')}"
    last_saved = data.checkpoints[-1].step if data.checkpoints else None
    if last_saved == data.steps[-1].step:
        return RunEnding(
            "Stopped",
            "fair",
            advice=(
                f"The run stopped after {progress}, with a checkpoint at the last step. "
                "`narrowcast resume` continues it from there."
            ),
        )
    where = (
        "There is no checkpoint to resume from."
        if last_saved is None
        else f"`narrowcast resume` continues it from the checkpoint at step {count(last_saved)}."
    )
    return RunEnding(
        "Unfinished",
        "fair",
        advice=(
            f"The records end after {progress}. The run was still in progress when this page was "
            f"written, or it was killed. {where}"
        ),
    )


def _how_it_ended(data: RunData) -> str:
    """Return where a run ended early and which weights it ended with, unless that is obvious."""
    lines, metric = list[str](), data.task.headline
    done, request = count(len(data.steps)), count(data.requested_steps)
    if data.ended_early:
        lines.append(f"The run ended early at step {done} of {request}: {data.ended_early}.")
    if data.exported is not None:
        step, best = data.exported
        result = f"{said(metric.name)} {measured(metric, best)}"
        lines.append(
            f"The exported weights are those of step {count(step)}, the best evaluation: {result}."
        )
    return " ".join(lines)


def headline(data: RunData) -> str:
    """Return a sentence on what trained, in which policy, and how well."""
    if not data.steps:
        return f"{data.name} is set up to train {_in_policy(data)} and has not run a step."
    done, requested = len(data.steps), data.requested_steps
    steps = (
        count(done, "step") if done >= requested else f"{count(done)} of {count(requested, 'step')}"
    )
    if data.diverged:
        return f"{data.name} diverged {_in_policy(data)} in {steps}: {data.diverged}."
    return f"{data.name} trained {_in_policy(data)} for {steps}: {_quality(data)}."


def facts(data: RunData) -> list[Fact]:
    """Collect the numbers beside the headline; those that were not measured are left out."""
    if not data.steps:
        return []
    return [
        *_loss_fact(data),
        _steps_fact(data.steps),
        _scale_fact(data.steps),
        *_speed_facts(data),
        *_memory_fact(data),
    ]


def _in_policy(data: RunData) -> str:
    """Return `in fp16 (emulated)`, or `with the default policy, mostly bf16`."""
    most = next((part.name for part in format_shares(data.modules)), "")
    ways = {m.get("how") for m in data.modules if m.get("forward") == most}
    emulated = " (emulated)" if ways == {"emulated"} else ""
    policy = in_policy(data.policy)
    if policy.startswith("in "):
        return policy + emulated
    return f"{policy}, mostly {most}{emulated}" if most else policy


def _came_to_nothing(data: RunData) -> str:
    """Return what is left of a run that finished its steps but diverged."""
    left = "the weights are in the last checkpoint"
    if data.vitals.weights:
        left = "only a checkpoint from before the weights became non-finite is useful"
    why = next((r.skip_reason for r in reversed(data.steps) if r.skip_reason), "")
    reason = f" Last reason for a skipped step: {why}." if why else ""
    return f"The run finished its steps but diverged; {left}.{reason}"


def _gave_up(data: RunData) -> str:
    """Return how a run gave up."""
    last = data.steps[-1]
    reason = f" Last reason: {last.skip_reason}." if last.skip_reason else ""
    module = next((r.module for r in reversed(data.findings) if r.module), "")
    where = f" Look at {module} first." if module else ""
    return (
        f"The last {count(data.gave_up, 'step')} were all skipped{at_scale(last.loss_scale)}, so "
        f"the run stopped at step {count(last.step)}.{reason}{where}"
    )


def _lost_at(steps: tuple[StepRecord, ...]) -> int | None:
    """Return the step from which on every loss was not finite."""
    since = None
    for record in reversed(steps):
        if math.isfinite(record.loss):
            break
        since = record.step
    return since


def _quality(data: RunData) -> str:
    metric = data.headline
    if metric is None:
        return f"{_training_loss(data.steps)}, never evaluated"
    name = said(metric.name)
    matches = [(r.step, r.metrics[metric.name]) for r in data.evals if metric.name in r.metrics]
    (first_step, first), (last_step, last) = matches[0], matches[-1]
    began, ended = measured(metric, first), measured(metric, last)
    if len(matches) == 1:
        return f"evaluated {name} {ended} at step {count(last_step)}"
    if not (math.isfinite(first) and math.isfinite(last)):
        return f"evaluated {name} {began} at step {count(first_step)}, {ended} at the end"
    if first == last:
        course = f"evaluated {name} {ended} at step {count(first_step)} and at the end"
    else:
        verb = "fell" if last < first else "rose"
        course = f"evaluated {name} {verb} from {began} at step {count(first_step)} to {ended}"
    start = data.steps[0]
    if start.step != 1 or not math.isfinite(start.loss):
        return course
    return f"{course}; the training loss was {value(start.loss)} at the first step"


def _training_loss(steps: tuple[StepRecord, ...]) -> str:
    finite = [record.loss for record in steps if math.isfinite(record.loss)]
    if not finite:
        return "training loss never finite"
    course = " → ".join(value(loss) for loss in (finite[0], finite[-1])[: len(finite)])
    lost = _lost_at(steps)
    return f"training loss {course}" + (f", not finite from step {count(lost)} on" if lost else "")


def _loss_fact(data: RunData) -> list[Fact]:
    metric = data.headline
    if metric is None:
        return [Fact("Training loss", value(data.steps[-1].loss), note="last step")]
    matched = [(r.step, r.metrics) for r in data.evals if metric.name in r.metrics]
    step, metrics = matched[-1]
    last = metrics[metric.name]
    others = [
        f"{said(name)} {measured(data.task.metric(name), y)}"
        for name, y in metrics.items()
        if name != metric.name
    ]
    note = others[0] if others else f"at step {count(step)}"
    best_step, best = _best(metric, [(s, m[metric.name]) for s, m in matched])
    if metric.is_better(best, last) or math.isnan(last):
        note = f"best {measured(metric, best)} at step {count(best_step)}"
    return [Fact(f"Evaluated {said(metric.name)}", measured(metric, last), note=note)]


def _best(metric: Metric, matches: Sequence[tuple[int, float]]) -> tuple[int, float]:
    """Return the first of the best values, and its step."""
    best = matches[0]
    for each in matches[1:]:
        if metric.is_better(each[1], best[1]) or math.isnan(best[1]):
            best = each
    return best


def _steps_fact(steps: tuple[StepRecord, ...]) -> Fact:
    applied = sum(record.applied for record in steps)
    skipped = len(steps) - applied
    note = f"{count(skipped)} skipped ({share(skipped, len(steps))})" if skipped else "none skipped"
    return Fact("Steps applied", count(applied), note=note)


def _scale_fact(steps: tuple[StepRecord, ...]) -> Fact:
    scales = [record.loss_scale for record in steps]
    low, high = min(scales), max(scales)
    note = "throughout" if low == high else f"{scale(low)} – {scale(high)}"
    return Fact("Loss scale", scale(scales[-1]), note=note)


def _speed_facts(data: RunData) -> list[Fact]:
    steps, units = data.steps, data.task.units
    seconds = math.fsum(record.seconds for record in steps)
    items = sum(record.items for record in steps)
    typical = sorted(record.seconds for record in steps)[len(steps) // 2]
    if seconds <= 0:
        return []
    return [
        Fact(
            f"{capital(units)} per second",
            large(items / seconds),
            note=f"{large(items)} {units} in total",
        ),
        Fact("Time in steps", duration(seconds), note=f"{duration(typical)} per step"),
    ]


def _memory_fact(data: RunData) -> list[Fact]:
    peak = max(record.peak_bytes for record in data.steps)
    if peak <= 0:
        return []
    plan = data.plan or {}
    # Without a GPU the peak is that of the whole process, with Python and torch.
    note = "measured" if "(cuda" in str(plan.get("hardware")) else "measured, of the process"
    predicted = plan.get("predicted", {}).get("memory") or {}
    if "allocated" in predicted:
        note += f"; tensors predicted: {size(predicted['allocated'])}"
    return [Fact("Peak memory", size(peak), note=note)]


MOST_FINDINGS = 3
"""Listed one by one in the headline; the table below has them all."""
INJECTED = "fault injected"
"""Name of a fault that the recipe requests."""


def sentences(data: RunData) -> list[tuple[Tone, str]]:
    """Return sentences on skips, findings and changes, the most serious first."""
    if not data.steps:
        return []
    matches = findings(data)
    first = _foremost(matches)
    lines: list[tuple[Tone, str]] = [("bad", _finding(f)) for f in first]
    if len(matches) > len(first):
        more = count(len(matches) - len(first), "more finding")
        lines.append(("bad", f"There {'is' if more.startswith('1 ') else 'are'} {more} below."))
    lines += _changes(data)
    lines += _skips(data)
    if not lines:
        lines.append(("good", "No steps were skipped and there are no findings."))
    return lines


def _foremost(result: Sequence[FindingRow]) -> list[FindingRow]:
    """Return the findings to list first: each once, with an action first, injected faults last."""
    each: dict[tuple[str, str], FindingRow] = {}
    for one in result:
        # A verdict's "overflow" and a rule's "overflow of fp16" are one trouble.
        each.setdefault((one.first.module, one.first.what.partition(" of ")[0]), one)
    ranked = sorted(each.values(), key=lambda f: (f.first.what == INJECTED, not f.first.action))
    return ranked[:MOST_FINDINGS]


def _finding(row: FindingRow) -> str:
    """Write a finding as one or two sentences."""
    first = row.first
    where = f" in `{first.module}`" if first.module else ""
    role = f" ({first.role})" if first.role and first.module else ""
    when = "at" if row.steps == count(row.since) else "since"
    message = f"{capital(first.what)}{where}{role} {when} step {count(row.since)}"
    # A diagnosis names its place once more; in a sentence that has just done so it is noise.
    why = first.why.removeprefix(f"{first.module} {first.role} ")
    message += f": {why}" if why else ""
    advice = f" {capital(first.advice).rstrip('.')}." if first.advice else ""
    return f"{message.rstrip('.')}.{advice}"


def _skips(data: RunData) -> list[tuple[Tone, str]]:
    skipped = [record for record in data.steps if not record.applied]
    if not skipped:
        return []
    tried = len(data.steps)
    last = skipped[-1]
    ago = "the last step" if last is data.steps[-1] else f"the last at step {count(last.step)}"
    if len(skipped) == tried:
        return [("bad", "Every step was skipped, so the weights never changed.")]
    if len(skipped) == 1:
        return [("fair", f"One step of {count(tried)} was skipped, step {count(last.step)}.")]
    part = share(len(skipped), tried)
    return [
        ("fair", f"{count(len(skipped))} of {count(tried)} steps were skipped ({part}), {ago}.")
    ]


def _changes(data: RunData) -> list[tuple[Tone, str]]:
    if not data.changes:
        return []
    notice: list[tuple[Tone, str]] = []
    phases = [r for r in data.changes if r.module in WHOLE]
    if phases:
        course = " → ".join([phases[0].before, *(r.after for r in phases)])
        at = ", ".join(count(r.step) for r in phases[:6])
        noun = "step" if len(phases) == 1 else "steps"
        notice.append(("fair", f"The policy changed during the run, at {noun} {at}: {course}."))
    ended = active_formats(data.modules, data.changes, phases=data.phases)
    single = [r for r in data.changes if r.module not in WHOLE]
    if len(single) == 1:
        notice.append(("fair", _one_change(single[0], stayed=bool(ended.changed))))
    elif single:
        names = sorted({r.module for r in single})
        one = len(names) == 1
        changed = "changed its format" if one else "changed their formats"
        if one:
            stay = "still changed" if ended.changed else "back to the original format"
        else:
            stay = f"{count(ended.changed) if ended.changed else 'none'} of them"
        notice.append(("fair", f"{_listed(names)} {changed} during the run, {stay} at the end."))
    return notice


def _one_change(change: PrecisionRecord, *, stayed: bool) -> str:
    why = f": {change.reason.rstrip('.')}" if change.reason else ""
    end = "and stayed so" if stayed else "but not until the end"
    return (
        f"`{change.module}` went from {change.before} to {change.after} at step "
        f"{count(change.step)}, {end}{why}."
    )


def _listed(names: Sequence[str]) -> str:
    if len(names) <= 3:
        return ", ".join(f"`{name}`" for name in names)
    return f"`{names[0]}`, `{names[1]}` and {count(len(names) - 2, 'other module')}"
