"""Prompts with what a model answered before training and after, kept in the run folder."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from narrowcast.runs import strict_json
from narrowcast.runs.peek import peek_json
from narrowcast.runs.writing import written_atomically

SAMPLES, JUDGED = "samples.json", "judged.json"
MOST_BYTES = 256 * 2**20
"""Of either file, when it is read to be shown."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A prompt, what was answered to it, and what was to be."""

    prompt: str
    before: str
    after: str
    reference: str


def write_samples(folder: Path, samples: Sequence[Sample]) -> None:
    """Write samples to a run folder, whole or not at all."""
    write_json(folder / SAMPLES, {"samples": [asdict(sample) for sample in samples]})


def read_samples(folder: Path) -> list[Sample] | None:
    """Return the samples of a run folder; None where there are none, or they are damaged."""
    match peek_json(folder / SAMPLES, most_bytes=MOST_BYTES):
        case {"samples": [*found]}:
            read = [_sample(each) for each in found]
            return None if None in read else [each for each in read if each is not None]
        case _:
            return None


def write_json(path: Path, value: object) -> None:
    """Write a file of a run folder, whole or not at all."""
    text = strict_json.dumps(value, indent=1) + "\n"
    with written_atomically(path, hint="free what is in the way, and resume the run") as extra:
        extra.write_text(text, encoding="utf-8")


def _sample(value: Any) -> Sample | None:
    match value:
        case {"prompt": str(), "before": str(), "after": str(), "reference": str()}:
            return Sample(**value) if len(value) == 4 else None
        case _:
            return None
