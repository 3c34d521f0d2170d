"""Every kind of attack, and its share of the time."""

from collections.abc import Callable
from dataclasses import dataclass

from attacks import (
    damage,
    disk,
    kills,
    others,
    places,
    recipes,
    stops,
    streams,
    texts,
    writers,
)
from attacks.case import Case
from attacks.oracle import Verdict


@dataclass(frozen=True)
class Kind:
    """A kind of attack."""

    attack: Callable[[Case], Verdict]
    share: float = 1.0
    """Of the time, relative to the others."""


KINDS: dict[str, Kind] = {
    "words": Kind(recipes.words, 1.5),
    "policies": Kind(recipes.policies, 1),
    "recipe files": Kind(recipes.files, 1),
    "recipes that are none": Kind(recipes.monsters, 0.7),
    "command lines": Kind(recipes.command_lines, 0.5),
    "texts that are none": Kind(texts.bad_file, 0.7),
    "unusual texts": Kind(texts.good_file, 0.4),
    "names of texts": Kind(texts.odd_name, 0.4),
    "killed in a step": Kind(kills.in_a_step, 2.5),
    "killed in a checkpoint": Kind(kills.in_a_checkpoint, 2.5),
    "killed in the export": Kind(kills.in_the_export, 1.5),
    "killed in the report": Kind(kills.in_the_report, 1.5),
    "killed at any time": Kind(kills.at_any_time, 2.5),
    "killed while it begins": Kind(kills.while_it_begins, 0.7),
    "any recipe, killed": Kind(kills.of_any_recipe, 2),
    "asked to stop": Kind(stops.once_or_twice, 2),
    "asked to stop early": Kind(stops.while_it_starts, 0.5),
    "damaged, resumed": Kind(damage.then_resumed, 2.5),
    "records damaged, resumed": Kind(damage.records_then_resumed, 0.7),
    "stray checkpoints": Kind(damage.folder_then_resumed, 0.7),
    "damaged, reported": Kind(damage.then_reported, 1),
    "damaged, compared": Kind(damage.then_compared, 0.7),
    "no file may grow": Kind(disk.size_limit, 1),
    "disk full": Kind(disk.full_disk, 1),
    "streams lost in a run": Kind(streams.lost_in_a_run, 1.5),
    "streams lost by an answer": Kind(streams.lost_by_a_question, 0.5),
    "folder taken away": Kind(places.while_it_runs, 1.5),
    "folder moved between": Kind(places.between, 0.5),
    "several at once": Kind(writers.at_once, 1.5),
    "other data": Kind(texts.changed_text, 1.5),
    "settings edited": Kind(others.edited_settings, 1),
    "settings given": Kind(others.given_settings, 0.5),
    "checkpoint of another run": Kind(others.another_checkpoint, 1),
    "words that may change": Kind(others.more_steps, 0.7),
}
