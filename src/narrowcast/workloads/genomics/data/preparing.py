"""From the data section of a recipe to examples: read or made, split, cut, written as tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import numpy as np

from narrowcast.errors import RecipeError
from narrowcast.workloads.genomics.data import made
from narrowcast.workloads.genomics.data.cutting import (
    both_strands,
    held_out_tails,
    shortened,
    split_rows,
    windows,
    without,
)
from narrowcast.workloads.genomics.data.examples import Examples, Ragged, Targets
from narrowcast.workloads.genomics.data.reading import read_rows
from narrowcast.workloads.genomics.data.rows import (
    Row,
    class_numbers,
    classes_of,
    label_table,
    values_of,
)
from narrowcast.workloads.genomics.sequences.alphabets import ALPHABETS
from narrowcast.workloads.genomics.sequences.labels import token_labels
from narrowcast.workloads.genomics.sequences.tokenizers import Tokenizer
from narrowcast.workloads.genomics.settings import MADE, GenomicData, Objective


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Examined:
    """The rows of a recipe, cut and split, before they are tokens."""

    train: list[Row]
    validation: list[Row]
    test: list[Row] | None
    source: tuple[list[Row], list[Row]] | None
    """Of the domain that is adapted from: to learn, and to judge on."""
    classes: tuple[str, ...]
    notes: tuple[str, ...]


def examine(data: GenomicData, objective: Objective, *, seed: int) -> Examined:
    """Read or make the rows of a recipe, and split and cut them."""
    genomes = objective.task in ("annotation", "generation")
    train, validation = _split(data, objective, seed=seed, genomes=genomes)
    test = read_rows(data.test, data, objective) if data.test else None
    source = _source(data, objective, seed=seed)
    notes = list[str]()
    if not genomes:
        kept = without(train, [*validation, *(test or [])])
        if dropped := len(train) - len(kept):
            notes.append(f"{dropped:,} sequences to learn are also judged on, and left out")
        train = kept
    groups = [train, validation, *([] if test is None else [test]), *(source or ())]
    several = objective.target == "labels"
    every = [row for group in groups for row in group]
    known = objective.known_labels
    classes = tuple(known) if genomes else classes_of(every, known, several=several)
    cut = 0
    for group in groups:
        if genomes:
            group[:] = windows(group, data.max_length, data.stride)
        else:
            group[:], more = shortened(group, data.max_length)
            cut += more
    if cut:
        notes.append(f"{cut:,} sequences had more than {data.max_length:,} letters and were cut")
    if data.reverse_complement:
        train = both_strands(train, ALPHABETS[data.alphabet])
    for name, group in (("to learn", train), ("to judge on", validation)):
        if not group:
            raise RecipeError(f"data.path={data.path}: there are no sequences {name}; give more")
    if data.path == MADE and objective.task == "generation":
        nats = made.markov_entropy()
        notes.append(f"the made genome has {nats:.4f} nats a base: no loss can stay below that")
    tested = "" if test is None else f", {len(test):,} to test on"
    notes.insert(0, f"{len(train):,} sequences to learn, {len(validation):,} to judge on{tested}")
    return Examined(
        train=train,
        validation=validation,
        test=test,
        source=source,
        classes=classes,
        notes=tuple(notes),
    )


def _split(
    data: GenomicData, objective: Objective, *, seed: int, genomes: bool
) -> tuple[list[Row], list[Row]]:
    if data.path == MADE:
        parts = [
            made.made_rows(objective.task, function=objective.function, seed=seed, part=part)
            for part in ("train", "validation")
        ]
        return parts[0], parts[1]
    rows = [row for name in (data.path, *data.more) for row in read_rows(name, data, objective)]
    if data.validation:
        return rows, read_rows(data.validation, data, objective)
    if genomes and all(len(row.sequence) > data.max_length for row in rows):
        return held_out_tails(rows, data.validation_share)
    return split_rows(rows, data.validation_share, seed=seed)


def _source(
    data: GenomicData, objective: Objective, *, seed: int
) -> tuple[list[Row], list[Row]] | None:
    if objective.task != "domain_adaptation":
        return None
    if data.source:
        rows = read_rows(data.source, data, objective)
        return split_rows(rows, data.validation_share, seed=seed)
    if data.path != MADE:
        return None
    parts = [
        made.made_rows(objective.task, function=objective.function, seed=seed, part=part)
        for part in ("source", "source validation")
    ]
    return parts[0], parts[1]


def as_examples(
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    objective: Objective,
    classes: Sequence[str],
    *,
    width: int = 0,
) -> Examples:
    """Write rows as tokens, with their targets, in batches of at least `width` tokens."""
    tokens = [tokenizer.encode(row.sequence) for row in rows]
    others = [tokenizer.encode(row.alternative) for row in rows] if _pairs(rows) else None
    targets: Targets
    match objective.task, objective.target:
        case "generation", _:
            targets = None
        case "annotation", _:
            targets = _letters(rows, tokens, tokenizer)
        case _, "value":
            targets = values_of(rows)
        case _, "labels":
            targets = label_table(rows, classes)
        case _:
            targets = class_numbers(rows, classes)
    small = np.uint16 if tokenizer.vocab_size <= 2**16 else np.int32
    examples = Examples(
        tokens=Ragged.joined(tokens, small),
        alternatives=None if others is None else Ragged.joined(others, small),
        targets=targets,
        names=tuple(row.name for row in rows),
        padding=tokenizer.pad_id,
    )
    return replace(examples, width=max(width, examples.common_width))


def _pairs(rows: Sequence[Row]) -> bool:
    """Say whether rows are pairs; refuse that some are and some are not."""
    alone = [row for row in rows if not row.alternative]
    if alone and len(alone) < len(rows):
        raise RecipeError(f"{alone[0].place} has no sequence with a variant, and others have one")
    return not alone


def _letters(rows: Sequence[Row], tokens: Sequence[np.ndarray], tokenizer: Tokenizer) -> Ragged:
    """Lay the classes of letters on tokens: a token has the class of its middle letter."""
    out = []
    for row, ids in zip(rows, tokens, strict=True):
        if row.letters is None:
            raise RecipeError(f"{row.place}: its letters have no classes")
        out.append(token_labels(row.letters, tokenizer.spans_of(ids)))
    return Ragged.joined(out, np.int64)
