"""The shapes of a run folder's files, as far as a page counts on them."""

from types import NoneType

from narrowcast.runs.shape import ANY, Shape

_TEXT = (str, NoneType)
_COUNT = (int, NoneType)


def _entry(value: Shape) -> Shape:
    return {"value": value, "origin": str}


SETTINGS: Shape = {
    ANY: _entry(object),
    **dict.fromkeys(("name", "workload", "description", "precision.policy"), _entry(_TEXT)),
    **dict.fromkeys(("steps", "seed"), _entry(int)),
    "precision.loss_scale.patience": _entry(_COUNT),
}
"""Of resolved.json."""

_PLAIN = (str, int, float, bool, NoneType)
_MODULE = {ANY: _PLAIN, "name": _TEXT, "bytes": {ANY: int}, "kept": {ANY: _PLAIN}}

PLAN: Shape = {
    "policy": _TEXT,
    "hardware": _TEXT,
    "modules": [_MODULE],
    "functional": {ANY: _TEXT},
    "bytes": {ANY: int},
    "strategy": {"bytes": {ANY: int}},
    "phases": [{"policy": str, "formats": {ANY: str}}],
}
"""Of plan.json."""

ENVIRONMENT: Shape = {"sessions": [dict]}
"""Of environment.json."""
