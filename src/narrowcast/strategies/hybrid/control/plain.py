"""Plain data: numbers that can be counted with, and frozen values that a checkpoint kept."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from narrowcast.errors import CheckpointError

T = TypeVar("T")


def usable(value: float) -> bool:
    """Say whether a number is finite, and no larger than what can be squared and summed."""
    return abs(value) < 1e100


def restored(kind: type[T], data: Mapping[str, Any]) -> T:
    """Return the value whose fields `data` holds, with lists as the tuples they were.

    Refuses data of another version: a field too few or too many would go on from another state.
    """
    names = {each.name for each in fields(kind)}  # type: ignore[arg-type]  # a dataclass
    if names != set(data):
        raise CheckpointError(
            f"the saved {kind.__name__} has the fields {sorted(data)}, this version has "
            f"{sorted(names)}; resume with the version that saved it, or begin a new run"
        )
    return kind(**{name: _frozen(value) for name, value in data.items()})


def _frozen(value: Any) -> Any:
    return tuple(_frozen(each) for each in value) if isinstance(value, list | tuple) else value
