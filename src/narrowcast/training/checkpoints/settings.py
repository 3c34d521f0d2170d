"""The settings that determine a step; a resumed run must have the same ones."""

from collections.abc import Collection, Mapping
from typing import Any

from narrowcast.config.problems import shortened
from narrowcast.config.sections import DataSection

MAY_CHANGE = (
    "steps",
    "epochs",
    "device",
    "memory.activation_checkpointing",
    "memory.offload",
    "memory.blocks",
    "checkpoint.every",
    "checkpoint.keep",
    "checkpoint.background",
    "parallel.ranks",
    "parallel.strategy",
    "parallel.shard",
    "parallel.timeout",
    "parallel.restarts",
    "profile.first",
    "profile.steps",
    "eval.every",
    "eval.patience",
    "eval.min_delta",
    "eval.keep_best",
    "data.workers",
    "data.prefetch",
    "trackers",
)
"""Settings that do not decide what a step does, and may change when a run is resumed."""

NAMES = ("name", "description")
"""Names of the run, which may change at any time."""

SHOWN = 5
"""Differences that a message lists."""
LONGEST_SHOWN = 60
"""Longest value in a message."""

POLICY = "precision.policy"


def places_in(data: type[DataSection]) -> tuple[str, ...]:
    """Return the settings that say where the data is; its fingerprint is compared instead."""
    return tuple(f"data.{name}" for name in data.places)


def may_change(key: str, before: Mapping[str, Any], *, places: Collection[str] = ()) -> bool:
    """Return whether a setting may change after a checkpoint with the settings `before`."""
    # What auto stood for depends on the machine; another policy raises when it is restored.
    named_auto = key == POLICY and before.get(POLICY) == "auto"
    return key in MAY_CHANGE or key in NAMES or key in places or named_auto


def decisive_differences(
    saved: Mapping[str, Any], here: Mapping[str, Any], *, places: Collection[str] = ()
) -> list[str]:
    """Return the settings that decide steps and differ, or are only in one of the two."""
    keys = [*saved, *(key for key in here if key not in saved)]
    return [
        key
        for key in keys
        if not may_change(key, saved, places=places)
        and (key not in saved or key not in here or not _same(saved[key], here[key]))
    ]


def difference_text(keys: list[str], saved: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Return differences as one line of text."""
    each = [
        f"{key} is {_shown(saved, key)} in the checkpoint and {_shown(here, key)} here"
        for key in keys[:SHOWN]
    ]
    more = [f"{len(keys) - SHOWN} more"] if len(keys) > SHOWN else []
    return "; ".join(each + more)


def _same(a: Any, b: Any) -> bool:
    # As text: to Python True is 1 and 1 is 1.0.
    return repr(a) == repr(b)


def _shown(settings: Mapping[str, Any], key: str) -> str:
    if key not in settings:
        return "missing"
    text = "none" if settings[key] is None else str(settings[key])
    return shortened(text, LONGEST_SHOWN)
