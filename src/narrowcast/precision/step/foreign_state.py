"""What a run refuses to load: a state that is not whole, or that another run has saved.

A state describes itself: beside its tensors it keeps their shapes and dtypes, so that one which was
cut, cast or put together from two is known before anything is written. What must agree with the run
that takes it (names, classes, shapes) is compared with that run. The first difference is told.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from narrowcast.errors import CheckpointError

OUTLINE = "outline"
"""The key of what a state says of itself."""


def state_outline(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return how a state is built: a word for each tensor and value in it."""
    return {part: _outline(value) for part, value in state.items() if part != OUTLINE}


def check_state(state: Mapping[str, Any], *, mine: Mapping[str, Any]) -> None:
    """Refuse a saved state that is not whole, or not of a run prepared as this one is."""
    if not isinstance(state, Mapping) or not mine.keys() <= state.keys():
        missing = mine.keys() - (state.keys() if isinstance(state, Mapping) else set())
        raise CheckpointError(
            f"The state lacks {', '.join(sorted(missing))}. It is not a prepared model's state, "
            "or an older version of narrowcast wrote it. Pass what state_dict() returned."
        )
    if state["policy"] != mine["policy"]:
        raise CheckpointError(
            f"The checkpoint was written with the policy {state['policy']!r}, but this run uses "
            f"{mine['policy']!r}. Use the policy of the checkpoint."
        )
    parts = {part: state[part] for part in mine}  # what else somebody saved with it is theirs
    if changed := _first_difference(state_outline(parts), state[OUTLINE], "", ("", " as saved")):
        raise CheckpointError(
            f"The state was changed after it was saved: {changed}. Pass what state_dict() returned."
        )
    for part in mine:
        if part in ("policy", "stats", "applied_before", OUTLINE):
            continue
        terms = _terms(part, state[part]), _terms(part, mine[part])
        if differs := _first_difference(*terms, part, (" in the checkpoint", " here")):
            raise CheckpointError(
                f"The {part} in the checkpoint do not match this run: {differs}. Prepare the same "
                "model, with the same frozen weights and the same prepare() settings."
            )


def _terms(part: str, value: Any) -> Any:
    """Return what of a part must agree with the run that takes it."""
    match part:
        case "optimizer":
            return [_optimizer_terms(each) for each in value]
        case "scheduler":  # by value its settings are plain data, which it takes as it finds them
            return [{"class": s["class"], **dict.fromkeys(s["state"], "")} for s in value]
        case "master":
            return {**_outline(value), "kind": value["kind"]}
        case "lookahead" if isinstance(value, Mapping):
            # By value: from leads of other settings other points would follow. A weight that was
            # thawed since has a lead, which is no other run's.
            settings = {key: str(value[key]) for key in ("interpolation", "rate", "storage")}
            return {**settings, "leads": f"{len(value['leads'])} leads"}
        case _:
            return _outline(value)


def _optimizer_terms(saved: Mapping[str, Any]) -> dict[str, Any]:
    # Not their settings: a schedule adds some, which may be built after the state is loaded.
    # One that wraps another may keep them elsewhere; its weights are compared all the same.
    saved_groups = saved.get("param_groups", ())
    groups = [{"size": f"{len(group['params'])} weights"} for group in saved_groups]
    return {"class": saved["class"], "weights": saved["weights"], "groups": groups}


def _outline(value: Any) -> Any:
    match value:
        case Tensor():
            return f"{value.dtype} of {tuple(value.shape)}".removeprefix("torch.")
        case Mapping():
            return {key: _outline(item) for key, item in value.items()}
        case list() | tuple():
            inside = [_outline(item) for item in value]
            alike = bool(inside) and isinstance(inside[0], str) and len(set(map(str, inside))) == 1
            return f"{len(inside)} times {inside[0]}" if alike else inside
        case None:
            return "nothing"
        case bool() | int() | float():
            return "a number"
        case _:
            return f"a {type(value).__name__}"


def _first_difference(one: Any, other: Any, where: str, whose: tuple[str, str]) -> str:
    """Say where two outlines first differ, and how; nothing where they do not."""
    match one, other:
        case Mapping(), Mapping():
            for key in [*other, *one]:
                if key not in one or key not in other:
                    return f"there is no {where}/{key}{whose[key in one]}".replace(" /", " ")
            pairs = [(key, one[key], other[key]) for key in one]
        case list(), list() if len(one) == len(other):
            pairs = [(key, *pair) for key, pair in enumerate(zip(one, other, strict=True))]
        case _:
            if one == other:
                return ""
            return f"{where} is {_describe(one)}{whose[0]} and {_describe(other)}{whose[1]}"
    inside = (_first_difference(a, b, f"{where}/{key}".lstrip("/"), whose) for key, a, b in pairs)
    return next(filter(None, inside), "")


def _describe(outline: Any) -> str:
    match outline:
        case str():
            return outline
        case list() | Mapping():
            return f"{'a list' if isinstance(outline, list) else 'a dict'} of {len(outline)}"
        case _:
            return f"a {type(outline).__name__}"
