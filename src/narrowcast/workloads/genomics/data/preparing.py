"""Turn the data section of a recipe into examples: read, split, check, cut, encode."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, final

import numpy as np

from narrowcast.config.problems import shortened as shortened_text
from narrowcast.errors import ConfigError
from narrowcast.workloads.genomics.data import made
from narrowcast.workloads.genomics.data.examples import Examples, Ragged, Targets
from narrowcast.workloads.genomics.data.reading import read_rows
from narrowcast.workloads.genomics.data.rows import (
    UNLABELLED,
    Row,
    both_strands,
    class_numbers,
    collect_classes,
    label_table,
    row_classes,
    row_values,
    shortened,
    split_rows,
    windows,
    without,
)
from narrowcast.workloads.genomics.sequences.alphabets import ALPHABETS
from narrowcast.workloads.genomics.sequences.labels import token_labels
from narrowcast.workloads.genomics.sequences.readers.vcf import Skipped
from narrowcast.workloads.genomics.sequences.tokenizers import Tokenizer
from narrowcast.workloads.genomics.settings import MADE, GenomicData, Objective

Parts: TypeAlias = dict[str, list[Row]]
"""Rows by part: train, validation, and if present test, source and source validation."""

SETTINGS_OF: Mapping[str, tuple[str, ...]] = {
    "stride": ("annotation", "generation"),
    "features": ("annotation",),
    "reference": ("variant_effect",),
    "source": ("domain_adaptation",),
    "test_share": ("classify",),
}
"""Data settings that only some tasks use."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Examined:
    """The rows of a recipe after splitting and cutting, before encoding."""

    parts: Parts
    classes: tuple[str, ...]
    notes: tuple[str, ...]


def examine(data: GenomicData, objective: Objective, *, seed: int) -> Examined:
    """Read or synthesize the rows of a recipe, then split, check and cut them."""
    _check_unused(data, objective)
    skipped = Skipped()
    parts = _split(data, objective, seed=seed, skipped=skipped)
    _check_different(parts, data)
    notes = [skipped.note] if skipped.note else []
    notes += [*_leave_out_judged(parts, objective), *_shared_sites(parts)]
    _check_pairs(parts)
    classes = _classes(parts, objective)
    if data.path != MADE and classes:
        notes += _one_sided(parts, classes, objective)
        notes += _at_odds(parts, objective)
    notes += _cut(parts, data, objective)
    notes += _leave_out_unknown(parts, data)
    if data.reverse_complement is True and objective.task != "classify":
        parts["train"] = both_strands(parts["train"], ALPHABETS[data.alphabet], classes)
    for part in ("train", "validation"):
        if not parts[part]:
            shorter = ", or write a smaller data.max_length" if objective.reads_genomes else ""
            raise ConfigError(
                f"data.path={data.path} leaves no {_shown_part(part)} sequences. Give more "
                f"sequences{shorter}."
            )
    if data.path == MADE and objective.task == "generation":
        nats = made.markov_entropy()
        notes.append(
            f"entropy of the synthetic genome: {nats:.4f} nats per base, a bound on the loss"
        )
    tested = f", {len(parts['test']):,} test" if "test" in parts else ""
    learnt, judged = len(parts["train"]), len(parts["validation"])
    notes.insert(0, f"sequences: {learnt:,} training, {judged:,} validation{tested}")
    return Examined(parts=parts, classes=classes, notes=tuple(notes))


def _check_unused(data: GenomicData, objective: Objective) -> None:
    """Check that no setting is set that the task ignores."""
    for name, tasks in SETTINGS_OF.items():
        if getattr(data, name) and objective.task not in tasks:
            raise ConfigError(
                f"data.{name} is only for {' and '.join(tasks)}, got {getattr(data, name)} with "
                f"objective.task={objective.task}. Leave it out."
            )
    for name in ("reverse_complement", "mutate"):
        if getattr(data, name) == "auto" and objective.task != "classify":
            raise ConfigError(
                f"data.{name}=auto is only for classify, got objective.task={objective.task}. "
                f"Leave it out, or set data.{name} itself."
            )
    if objective.task == "classify" and data.tokenizer != "byte":
        raise ConfigError(
            f"data.tokenizer must be byte for classify, got {data.tokenizer}. Leave it out; the "
            "baseline counts k-mers anyway."
        )
    if data.path == MADE and objective.labels:
        raise ConfigError(
            "objective.labels cannot be set for synthetic sequences, which have their own classes. "
            "Leave it out, or write your own file in data.path."
        )


def _split(data: GenomicData, objective: Objective, *, seed: int, skipped: Skipped) -> Parts:
    """Return all rows by part; validation is a share of the training rows unless it has a file."""

    def read(name: str) -> list[Row]:
        return read_rows(name, data, objective, skipped=skipped)

    if data.path == MADE:
        parts = made.made_parts(objective.task, objective.function, data.alphabet, seed=seed)
    else:
        files = (data.path, *data.more)
        parts = {"train": [row for name in files for row in read(name)]}
    named = {"validation": data.validation, "test": data.test, "source": data.source}
    parts |= {part: read(name) for part, name in named.items() if name}
    if data.test_share and "test" not in parts and data.path != MADE:
        split = split_rows(parts["train"], data.test_share, seed=seed)
        parts["train"], parts["test"] = split
    share, rows = data.validation_share, parts["train"]
    if "validation" not in parts:
        length = data.max_length if objective.reads_genomes else None
        split = split_rows(rows, share, seed=seed, longest=length)
        parts["train"], parts["validation"] = split
    if data.source:
        split = split_rows(parts["source"], share, seed=seed)
        parts["source"], parts["source validation"] = split
    return parts


def _check_different(parts: Parts, data: GenomicData) -> None:
    """Check that not all sequences are the same."""
    rows = [*parts["train"], *parts["validation"]]
    if len(rows) > 1 and len({(row.sequence, row.alternative) for row in rows}) == 1:
        raise ConfigError(
            f"data.path={data.path}: all {len(rows):,} sequences are the same, got "
            f"{shortened_text(rows[0].sequence)}. Give different sequences, or check which column "
            "data.sequence names."
        )


def _leave_out_unknown(parts: Parts, data: GenomicData) -> Iterator[str]:
    """Drop rows without a known letter; yield a note with their number."""
    unknown = ALPHABETS[data.alphabet].unknown
    dropped = 0
    for part, rows in parts.items():
        parts[part] = [row for row in rows if (row.sequence + row.alternative).strip(unknown)]
        dropped += len(rows) - len(parts[part])
        if rows and not parts[part]:
            raise ConfigError(
                f"{rows[0].location}: all {_shown_part(part)} sequences have only the unknown "
                f"letter {unknown}. Give sequences with known letters."
            )
    if dropped:
        yield f"left out {dropped:,} sequences that have only unknown letters ({unknown})"


def _shown_part(part: str) -> str:
    return "training" if part == "train" else part


def _leave_out_judged(parts: Parts, objective: Objective) -> Iterator[str]:
    """Drop training rows that are also held out; yield notes with their number."""
    judged = [row for part in ("validation", "test") for row in parts.get(part, ())]
    for part in ("train", "source"):
        stored = without(parts.get(part, []), judged)
        if dropped := len(parts.get(part, [])) - len(stored):
            parts[part] = stored
            yield f"left out {dropped:,} {_shown_part(part)} sequences that are also held out"
    if objective.task != "classify":
        return
    stored = without(parts["validation"], parts.get("test", []))
    if dropped := len(parts["validation"]) - len(stored):
        parts["validation"] = stored
        yield f"left out {dropped:,} validation sequences that are also in the test data"


def _shared_sites(parts: Parts) -> Iterator[str]:
    """Yield a note if training variants share a position with held-out ones."""
    judged = {row.site for part in ("validation", "test") for row in parts.get(part, ())} - {""}
    if shared := sum(row.site in judged for row in parts["train"]):
        yield (
            f"{shared:,} training variants share a position with a held-out variant, so metrics "
            "may be too good; hold out whole positions or regions"
        )


def _at_odds(parts: Parts, objective: Objective) -> Iterator[str]:
    """Yield a note if sequences occur with several classes."""
    if objective.target != "class" or objective.reads_genomes:
        return
    labels: dict[tuple[str, str], set[str]] = {}
    for row in (row for part in ("train", "validation", "test") for row in parts.get(part, ())):
        labels.setdefault((row.sequence, row.alternative), set()).add(row.label)
    if count := sum(len(each) > 1 for each in labels.values()):
        yield f"{count:,} sequences occur with different classes, so not all can be predicted right"


def _check_pairs(parts: Parts) -> None:
    """Check that all rows are pairs or none is."""
    every = [row for part in parts.values() for row in part]
    alone = [row for row in every if not row.alternative]
    if alone and len(alone) < len(every):
        raise ConfigError(
            f"{alone[0].location} has no alternative sequence, but other rows have one. Give one "
            "per row, or name the column with data.alternative."
        )


def _classes(parts: Parts, objective: Objective) -> tuple[str, ...]:
    """Return the classes: named in the recipe, of the task, or found in the data."""
    if objective.target == "value":
        return ()
    if objective.labels or objective.reads_genomes:
        return objective.known_labels
    every = [row for part in parts.values() for row in part]
    return collect_classes(every, objective.known_labels, several=objective.target == "labels")


def _one_sided(parts: Parts, classes: Sequence[str], objective: Objective) -> Iterator[str]:
    """Yield notes about classes that only training or only evaluation has."""

    def has(part: str) -> set[str]:
        rows = parts.get(part, [])
        if objective.task == "annotation":
            known = {int(each) for row in rows for each in np.unique(_row_letters(row))}
            return {classes[number] for number in known if number != UNLABELLED}
        several = objective.target == "labels"
        return {name for row in rows for name in row_classes(row, several=several)}

    what = "letter" if objective.task == "annotation" else "sequence"
    learnt, judged = has("train"), has("validation")
    # Classes that were named are wanted; those a task has by default need not all be there.
    wanted = judged | has("test") | set(objective.labels)
    if never := [name for name in classes if name in wanted - learnt]:
        yield f"no training {what} has the class {_listed(never)}, so it cannot be learnt"
    if unseen := [name for name in classes if name in learnt - judged]:
        yield (
            f"no validation {what} has the class {_listed(unseen)}, so metrics do not cover it; "
            "write data.validation, or a larger data.validation_share"
        )


def _listed(names: Sequence[str]) -> str:
    return shortened_text(", ".join(names), 200)


def _row_letters(row: Row) -> np.ndarray:
    assert row.letters is not None  # whoever reads or makes genomes labels them
    return row.letters


def _cut(parts: Parts, data: GenomicData, objective: Objective) -> Iterator[str]:
    """Cut rows to max_length; yield a note with how many were shortened."""
    if objective.reads_genomes:
        for part, rows in parts.items():
            parts[part] = windows(rows, data.max_length, data.stride)
        return
    lost = 0
    for part, rows in parts.items():
        parts[part], count = shortened(rows, data.max_length)
        lost += count
    if lost:
        yield f"{lost:,} sequences were longer than {data.max_length:,} letters and were cut"


def as_examples(
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    objective: Objective,
    classes: Sequence[str],
) -> Examples:
    """Encode rows with their targets."""
    small = np.uint16 if tokenizer.vocab_size <= 2**16 else np.int32
    tokens = [tokenizer.encode(row.sequence).astype(small) for row in rows]
    others = [tokenizer.encode(row.alternative).astype(small) for row in rows if row.alternative]
    targets: Targets
    match objective.task, objective.target:
        case "generation", _:
            if not any((ids[1:] != tokenizer.unknown_id).any() for ids in tokens):
                raise ConfigError(
                    f"{rows[0].location}: no sequence has a known token after its first, so there "
                    "is nothing to predict. Write a larger data.max_length, or give longer "
                    "sequences."
                )
            targets = None
        case "annotation", _:
            targets = _letters(rows, tokens, tokenizer)
        case _, "value":
            targets = row_values(rows)
        case _, "labels":
            targets = label_table(rows, classes)
        case _:
            targets = class_numbers(rows, classes)
    examples = Examples(
        tokens=Ragged.joined(tokens, small),
        alternatives=Ragged.joined(others, small) if others else None,
        targets=targets,
        names=tuple(row.title for row in rows),
        padding=tokenizer.pad_id,
    )
    return replace(examples, width=examples.common_width)


def _letters(rows: Sequence[Row], tokens: Sequence[np.ndarray], tokenizer: Tokenizer) -> Ragged:
    """Return token targets: the class of each token's middle letter."""
    out = []
    for row, ids in zip(rows, tokens, strict=True):
        out.append(token_labels(_row_letters(row), tokenizer.token_spans(ids)).astype(np.int16))
    return Ragged.joined(out, np.int16)  # no more than MOST_CLASSES
