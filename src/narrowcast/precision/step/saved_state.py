"""All that decides the steps to come, as a checkpoint keeps it: taken from an engine, and put back.

Data order and random state are no part of it. A state is taken up as a whole, or not at all.
"""

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from narrowcast.errors import CheckpointError, ConfigError
from narrowcast.precision.nested import copy_tensors, map_tensors
from narrowcast.precision.step.engine import Engine
from narrowcast.precision.step.foreign_state import OUTLINE, check_state, state_outline
from narrowcast.precision.step.stats import Stats
from narrowcast.precision.weights.multi_optimizer import member_optimizers
from narrowcast.precision.weights.optimizer_state import load_optimizer_states, optimizer_states


def collect_state(engine: Engine) -> dict[str, Any]:
    """Return the state of a run, in tensors of the run itself. Waits for the device."""
    engine.log.sync()
    # Or a run that goes on would, and one that resumes not.
    engine.take_back_first_scales()
    average, lookahead = engine.weights.average, engine.weights.lookahead
    state = {
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
        "stats": engine.log.stats.state_dict(),
    }
    return {**state, OUTLINE: state_outline(state)}


def load_state(engine: Engine, state: dict[str, Any]) -> None:
    """Take up where a saved run stood; what cannot be is refused and changes nothing.

    For a moment there is a second copy of the weights that it has others of.
    """
    if engine.scales.value is not None and engine.weights.with_gradients():
        raise ConfigError(
            "load_state_dict() was called between backward() and step(), while gradients still "
            "have the old loss scale. Call it after step(), or call zero_grad() first."
        )
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


def collect_weights(engine: Engine) -> dict[str, Any]:
    """Return the weights alone, with every digit that is kept of them, averages and leads."""
    average, inside = engine.weights.average, set(engine.model.parameters())
    lookahead = engine.weights.lookahead
    return {
        "weights": engine.weights.full_by_name(),
        "beside_model": [engine.weights.full(p) for p in engine.weights.all if p not in inside],
        "average": None if average is None else average.averages,
        "lookahead": None if lookahead is None else lookahead.state_dict(),
    }


@torch.no_grad()
def put_weights(engine: Engine, state: dict[str, Any]) -> None:
    """Let the model have other weights, in the formats it has now; what is not there stays.

    Moments, scales and counts stay too: no step is to follow.
    """
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
    """Return what is trained and no part of the model: a learnable temperature."""
    inside = set(engine.model.parameters())
    return [p.detach() for p in engine.weights.all if p not in inside]


def _is_same(own: Any, saved: Any) -> bool:
    """Say whether a weight is given itself: whoever saves no frozen weights does so."""
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
