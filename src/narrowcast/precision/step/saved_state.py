"""All that decides the steps to come, as a checkpoint keeps it: taken from an engine, and put back.

Data order and random state are no part of it.
"""

from typing import Any

from narrowcast.precision.step.checks import refuse_foreign_state
from narrowcast.precision.step.engine import Engine
from narrowcast.precision.step.stats import Stats


def state_of(engine: Engine) -> dict[str, Any]:
    """Return the state of a run. Waits for the device."""
    engine.log.sync()
    # Or a run that goes on would, and one that resumes not.
    engine.take_back_first_scales()
    average = engine.weights.average
    return {
        "policy": str(engine.plan.policy),
        "weights": engine.model.state_dict(),
        "master": engine.weights.masters.state_dict(),
        "optimizer": engine.optimizer.state_dict(),
        "scheduler": engine.schedules.state_dict(),
        "scales": engine.scales.state_dict(),
        "average": None if average is None else average.averages,
        "amax": engine.fp8.state_dict(),
        "applied_before": engine.first_scales.applied_before,
        "stats": engine.log.stats.state_dict(),
    }


def load_state(engine: Engine, state: dict[str, Any]) -> None:
    """Take up where a saved run stood; that of another run is refused and changes nothing."""
    refuse_foreign_state(state, mine=state_of(engine))
    engine.model.load_state_dict(state["weights"])
    engine.weights.masters.load_state_dict(state["master"])
    engine.weights.load_optimizer(state["optimizer"])
    engine.schedules.load_state_dict(state["scheduler"])
    engine.scales.load_state_dict(state["scales"])
    if engine.weights.average is not None:
        for mine, saved in zip(engine.weights.average.averages, state["average"], strict=True):
            mine.copy_(saved)
    engine.fp8.load_state_dict(state["amax"])
    engine.log.stats = Stats.from_state(state["stats"])
    engine.steps_begun = engine.log.stats.steps
    engine.begin_first_scales(step=0, applied_before=int(state["applied_before"]))
    engine.buffers.reset()
