"""Samples and metrics before and after training: files of the run folder, report sections."""

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from narrowcast.runs import ReportSection, strict_json
from narrowcast.runs.strict_json import NONFINITE, peek_json
from narrowcast.runs.writing import written_atomically

SAMPLES, JUDGED = "samples.json", "judged.json"
MOST_BYTES = 256 * 2**20
LONGEST_SHOWN = 4000
"""Characters per text; the file has all of it."""
_CARD = (
    "border:1px solid var(--line);border-radius:0.5rem;padding:0.75rem 1rem;"
    "background:var(--raised);min-width:0"
)
_TEXT = (
    "white-space:pre-wrap;overflow-wrap:anywhere;margin:0.25rem 0 0;max-height:24rem;overflow:auto"
)
_SHADE = {"prompt": "var(--quiet)", "reference": "var(--good)"}


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A prompt with its responses and reference."""

    prompt: str
    before: str
    after: str
    reference: str


def write_samples(folder: Path, samples: Sequence[Sample]) -> None:
    """Write samples to the run folder atomically."""
    write_json(folder / SAMPLES, {"samples": [asdict(sample) for sample in samples]})


def read_samples(folder: Path) -> list[Sample] | None:
    """Return the samples of a run folder, or None if missing or damaged."""
    value = peek_json(folder / SAMPLES, most_bytes=MOST_BYTES)
    try:
        samples = [Sample(**each) for each in value["samples"]]
    except (TypeError, KeyError):
        return None
    sound = all(isinstance(text, str) for sample in samples for text in asdict(sample).values())
    return samples if sound else None


def write_json(path: Path, value: object) -> None:
    """Write a JSON file atomically."""
    text = strict_json.dumps(value, indent=1) + "\n"
    with written_atomically(path, hint="free what is in the way, and resume the run") as extra:
        extra.write_text(text, encoding="utf-8")


def sections(folder: Path) -> list[ReportSection]:
    """Return metrics before and after training, and samples side by side."""
    return [*_measures(folder), *_samples(folder)]


def _measures(folder: Path) -> Iterable[ReportSection]:
    if not (folder / JUDGED).exists():
        return
    result = peek_json(folder / JUDGED, most_bytes=MOST_BYTES)
    try:
        rows = [
            (name, _written(name, result["before"]), _written(name, result["after"]))
            for name in ("perplexity", "exact_match")
            if name in result["after"]
        ]
    except (TypeError, KeyError, AttributeError, ValueError):
        yield ReportSection(title="Evaluation before and after training", html=_damaged(JUDGED))
        return
    if not rows:
        return
    head = "<tr><th>metric</th><th>before</th><th>after</th></tr>"
    body = "".join(
        f"<tr><th scope='row'>{name.replace('_', ' ')}</th><td>{one}</td><td>{other}</td></tr>"
        for name, one, other in rows
    )
    yield ReportSection(
        title="Evaluation before and after training",
        html=f"<div class='scroll'><table><thead>{head}</thead><tbody>{body}</tbody></table></div>",
    )


def _written(name: str, judgement: Mapping[str, Any] | None) -> str:
    if judgement is None:
        return "<span class='quiet'>not measured</span>"
    of = judgement[name]
    if name == "perplexity":
        value, nats = _number(of["perplexity"]), _number(of["nats"])
        return (
            f"{value:.4g} <span class='quiet'>{nats:.4f} nats, {int(of['tokens']):,} tokens</span>"
        )
    share, low, high = (_number(of[key]) for key in ("share", "low", "high"))
    counts = f"{int(of['right']):,} of {int(of['rows']):,}"
    return f"{share:.1%} <span class='quiet'>{counts}, 95 % interval {low:.1%} to {high:.1%}</span>"


def _number(value: Any) -> float:
    return NONFINITE[value] if isinstance(value, str) else float(value)


def _samples(folder: Path) -> Iterable[ReportSection]:
    if not (folder / SAMPLES).exists():
        return
    samples = read_samples(folder)
    if samples is None:
        yield ReportSection(title="Samples", html=_damaged(SAMPLES))
    elif samples:
        note = "<p class='note'>Generated with the saved generation settings.</p>"
        yield ReportSection(title="Samples", html=note + "".join(map(_sample, samples)))


def _sample(sample: Sample) -> str:
    prompt = f"<div style='{_CARD}'>{_text('prompt', sample.prompt)}</div>"
    answers = "".join(
        f"<div style='{_CARD}'>{_text(name, getattr(sample, name))}</div>"
        for name in ("before", "after", "reference")
    )
    columns = "repeat(auto-fit,minmax(min(100%,16rem),1fr))"
    grid = f"display:grid;grid-template-columns:{columns};gap:0.75rem;margin-top:0.75rem"
    return f"<div style='margin-top:1.5rem'>{prompt}<div style='{grid}'>{answers}</div></div>"


def _text(name: str, text: str) -> str:
    shade = _SHADE.get(name, "var(--series)")
    cut = text if len(text) <= LONGEST_SHOWN else text[:LONGEST_SHOWN] + " …"
    shown = html.escape(cut) if cut.strip() else "<span class='quiet'>(empty)</span>"
    label = f"<strong style='color:{shade};font-size:0.8125rem'>{name}</strong>"
    return f"{label}<pre style='{_TEXT}'>{shown}</pre>"


def _damaged(name: str) -> str:
    return (
        f"<p>{name} is damaged and cannot be shown. Remove it and resume the run to write it "
        "again.</p>"
    )
