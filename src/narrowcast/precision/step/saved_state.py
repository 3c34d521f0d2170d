"""The state that decides the steps to come: taken from an engine, checked, and restored.

A state is loaded as a whole, or not at all. It stores the shapes and dtypes of its tensors, so that
one which was cut, cast or put together from two raises before anything is written.
"""

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from narrowcast.errors import CheckpointError, ConfigError
from narrowcast.precision.dtensor import reshard
from narrowcast.precision.nested import copy_tensors, map_tensors
from narrowcast.precision.plan.gains import GemmRows
from narrowcast.precision.step.engine import Engine
from narrowcast.precision.step.step_log import Stats
from narrowcast.precision.weights.multi_optimizer import member_optimizers
from narrowcast.precision.weights.trained import TrainedWeights

OUTLINE = "outline"
"""The key of what a state says of itself."""


def state_outline(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return how a state is built: a word for each tensor and value in it."""
    return {part: _outline(value) for part, value in state.items() if part != OUTLINE}


def check_state(state: Mapping[str, Any], *, mine: Mapping[str, Any]) -> None:
    """Raise if a saved state is incomplete or of a run that was prepared differently."""
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
    parts = {part: state[part] for part in mine}  # other saved entries belong to the user
    if changed := _first_difference(state_outline(parts), state[OUTLINE], "", ("", " as saved")):
        raise CheckpointError(
            f"The state was changed after it was saved: {changed}. Pass what state_dict() returned."
        )
    for part in mine:
        if part in ("policy", "stats", "applied_before", "rows", OUTLINE):
            continue
        terms = _terms(part, state[part]), _terms(part, mine[part])
        if differs := _first_difference(*terms, part, (" in the checkpoint", " here")):
            raise CheckpointError(
                f"The checkpoint does not match this run ({part}): {differs}. Prepare the same "
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
    """Return the first difference of two outlines; empty if they are equal."""
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


def optimizer_states(weights: TrainedWeights) -> list[dict[str, Any]]:
    """Return the state of each optimizer, its class, and its weights in its own order."""
    names = dict(zip(weights.all, weights.names, strict=True))
    return [
        {
            **each.state_dict(),
            "class": type(each).__name__,
            "weights": [f"{names[p]} of {tuple(p.shape)}" for p in weights.held[each]],
        }
        for each in member_optimizers(weights.optimizer)
    ]


def load_optimizer_states(weights: TrainedWeights, states: Sequence[Mapping[str, Any]]) -> None:
    """Load saved states into the optimizers, bit for bit."""
    for each, state in zip(member_optimizers(weights.optimizer), states, strict=True):
        theirs = {key: state[key] for key in state if key not in ("class", "weights")}
        if weights.fused is not None:
            # It takes the tensors itself: torch would cast them, and put them on the device.
            each.load_state_dict({**theirs, "state": _without_tensors(theirs["state"])})
            weights.fused.restore(theirs)
        else:
            # torch keeps the tensors it is given, and another run may be using them.
            each.load_state_dict(copy.deepcopy(theirs))


def _without_tensors(state: Mapping[Any, Mapping[str, Any]]) -> dict[Any, dict[str, Any]]:
    return {
        key: {name: copy.deepcopy(v) for name, v in values.items() if not isinstance(v, Tensor)}
        for key, values in state.items()
    }


def collect_state(engine: Engine) -> dict[str, Any]:
    """Return the state of a run, in tensors of the run itself. Waits for the device."""
    state = collect_parts(engine)
    return {**state, OUTLINE: state_outline(state)}


def collect_parts(engine: Engine) -> dict[str, Any]:
    """Return the state without the outline that says which shapes belong to it."""
    engine.log.sync()
    # Otherwise a continued run and a resumed one would differ.
    engine.take_back_first_scales()
    average, lookahead = engine.weights.average, engine.weights.lookahead
    return {
        "policy": str(engine.plan.policy),
        "weights": engine.model.state_dict(),
        "beside_model": _extra_parameters(engine),
        "master": engine.weights.masters.state_dict(),
        "scheduler": engine.schedules.state_dict(),
        "optimizer": optimizer_states(engine.weights),
        "scales": engine.scales.state_dict(),
        "average": None if average is None else average.averages,
        "lookahead": None if lookahead is None else lookahead.state_dict(),
        "amax": engine.fp8.state_dict(),
        "applied_before": engine.first_scales.applied_before,
        "rows": engine.plan.rows.to_json(),
        "stats": engine.log.stats.state_dict(),
    }


def load_state(engine: Engine, state: dict[str, Any]) -> None:
    """Restore a saved state, or raise and change nothing; holds the weights twice meanwhile."""
    if engine.scales.value is not None and engine.weights.with_gradients():
        raise ConfigError(
            "load_state_dict() was called between backward() and step(), while gradients still "
            "have the old loss scale. Call it after step(), or call zero_grad() first."
        )
    with rows_of_saved(engine, state):
        _load(engine, state)


def _load(engine: Engine, state: dict[str, Any]) -> None:
    mine = collect_state(engine)
    check_state(state, mine=mine)
    stats, applied_before = _counts(state)
    with _all_or_nothing(engine, mine, state):
        # First whatever may still refuse: code of others, and states of random generators.
        engine.schedules.load_state_dict(copy.deepcopy(state["scheduler"]))
        load_optimizer_states(engine.weights, state["optimizer"])
        engine.model.load_state_dict(state["weights"])
        copy_tensors(_extra_parameters(engine), state["beside_model"])
        engine.weights.masters.load_state_dict(state["master"])
    engine.scales.load_state_dict(state["scales"])
    if engine.weights.average is not None:
        copy_tensors(engine.weights.average.averages, state["average"])
    if engine.weights.lookahead is not None:
        engine.weights.lookahead.load_state_dict(state["lookahead"])
    engine.fp8.load_state_dict(state["amax"])
    engine.log.stats = stats
    engine.steps_begun = engine.log.stats.steps
    engine.begin_first_scales(step=0, applied_before=applied_before)
    engine.buffers.reset()
    torch.clear_autocast_cache()


@contextlib.contextmanager
def rows_of_saved(engine: Engine, state: Any) -> Iterator[None]:
    """Plan for the rows of the saved run, whose formats follow from them; undone by an error."""
    before = engine.plan.rows
    rows = before if before.source == "given" else _rows(state) or before
    if rows == before:
        yield
        return
    scales = copy.deepcopy(engine.fp8.state_dict())
    engine.set_rows(rows)
    try:
        yield
    except BaseException:
        engine.set_rows(before)
        engine.fp8.load_state_dict(scales)
        raise


def _rows(state: Any) -> GemmRows | None:
    """Return the rows of a saved run; None where it has none, which `check_state` reports."""
    try:
        return GemmRows(**state["rows"])
    except (TypeError, KeyError, IndexError):
        return None


def collect_weights(engine: Engine) -> dict[str, Any]:
    """Return the weights alone, with every digit that is kept of them, averages and leads."""
    average, lookahead = engine.weights.average, engine.weights.lookahead
    reshard(engine.model)  # or what FSDP gathered for an evaluation were the model's parameters
    inside = set(engine.model.parameters())
    return {
        "weights": engine.weights.full_by_name(),
        "beside_model": [engine.weights.full(p) for p in engine.weights.all if p not in inside],
        "average": None if average is None else average.averages,
        "lookahead": None if lookahead is None else lookahead.state_dict(),
    }


@torch.no_grad()
def put_weights(engine: Engine, state: dict[str, Any]) -> None:
    """Load other weights in the current formats; moments, scales and counts stay."""
    engine.log.sync()
    engine.model.load_state_dict({**engine.model.state_dict(), **state["weights"]})
    copy_tensors(_extra_parameters(engine), state["beside_model"])
    if engine.weights.average is not None:
        copy_tensors(engine.weights.average.averages, state["average"])
    if engine.weights.lookahead is not None:
        engine.weights.lookahead.load_state_dict(state["lookahead"])
    engine.buffers.reset()
    torch.clear_autocast_cache()


def _extra_parameters(engine: Engine) -> list[Tensor]:
    """Return trained tensors outside the model, such as a learnable temperature."""
    inside = set(engine.model.parameters())
    return [p.detach() for p in engine.weights.all if p not in inside]


def _is_same(own: Any, saved: Any) -> bool:
    """Return whether a weight is loaded directly, as in states without frozen weights."""
    return (
        isinstance(own, Tensor)
        and isinstance(saved, Tensor)
        and (own.device, own.data_ptr()) == (saved.device, saved.data_ptr())
    )


def _counts(state: dict[str, Any]) -> tuple[Stats, int]:
    try:
        return Stats.from_state(state["stats"]), int(state["applied_before"])
    except (TypeError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"The counts in the checkpoint cannot be read ({error}). Pass what state_dict() "
            "returned, or load an older checkpoint."
        ) from error


@contextlib.contextmanager
def _all_or_nothing(engine: Engine, mine: dict[str, Any], state: dict[str, Any]) -> Iterator[None]:
    """Put schedules, optimizers and weights back as they were if loading a state fails."""
    schedules, saved = copy.deepcopy(mine["scheduler"]), state["weights"]
    moved = {name: own for name, own in mine["weights"].items() if not _is_same(own, saved[name])}
    weights = (moved, mine["beside_model"])
    stored = map_tensors(weights, lambda tensor: tensor.detach().clone())
    optimizers = [(each, dict(vars(each))) for each in member_optimizers(engine.optimizer)]
    try:
        yield
    except Exception as error:
        for optimizer, attributes in optimizers:  # torch's loading makes new states and groups
            vars(optimizer).clear()
            vars(optimizer).update(attributes)
        if engine.weights.fused is not None:
            engine.weights.fused.forget_bindings()
        copy_tensors(weights, stored)
        engine.schedules.load_state_dict(schedules)
        raise CheckpointError(
            f"The checkpoint could not be loaded ({type(error).__name__}: {error}), and the run "
            "is unchanged. Load a checkpoint of a run with the same prepare() settings."
        ) from error
