"""What a reader must know beside the headline, in plain sentences: skips, findings, changes."""

from collections.abc import Sequence

from narrowcast.report.active_formats import WHOLE, active_formats
from narrowcast.report.phrases import capital, count, share
from narrowcast.report.run_data import RunData
from narrowcast.report.summary import Tone
from narrowcast.report.tables import FindingRow, findings
from narrowcast.runs.records import PrecisionRecord

MOST_FINDINGS = 3
"""Told one by one in the headline; the table below has them all."""
INJECTED = "fault injected"
"""What a run calls a fault that its recipe asks for."""


def sentences(data: RunData) -> list[tuple[Tone, str]]:
    """Tell what happened that an owner would want to know, the most serious first."""
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
    """Choose what to tell first: each trouble once, those that something was done about first.

    A rehearsal comes last: whoever asked for it knows of it.
    """
    each: dict[tuple[str, str], FindingRow] = {}
    for one in result:
        # A verdict's "overflow" and a rule's "overflow of fp16" are one trouble.
        each.setdefault((one.module, one.what.partition(" of ")[0]), one)
    ranked = sorted(each.values(), key=lambda f: (f.what == INJECTED, not f.action))
    return ranked[:MOST_FINDINGS]


def _finding(matched: FindingRow) -> str:
    """Write a finding as one or two sentences."""
    where = f" in `{matched.module}`" if matched.module else ""
    role = f" ({matched.role})" if matched.role and matched.module else ""
    when = "at" if matched.steps == count(matched.since) else "since"
    message = f"{capital(matched.what)}{where}{role} {when} step {count(matched.since)}"
    # A verdict names its place once more; in a sentence that has just done so it is noise.
    why = matched.why.removeprefix(f"{matched.module} {matched.role} ")
    message += f": {why}" if why else ""
    advice = f" {capital(matched.advice).rstrip('.')}." if matched.advice else ""
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
        stay = (
            f"{count(ended.changed)} of them at the end"
            if ended.changed
            else ("none of them at the end")
        )
        if one:
            stay = (
                "still changed at the end"
                if ended.changed
                else ("back to the original format at the end")
            )
        changed = "changed its format" if one else "changed their formats"
        notice.append(("fair", f"{_listed(names)} {changed} during the run, {stay}."))
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
