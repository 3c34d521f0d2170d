"""This library's step over gradients that are there already."""

import narrowcast
from narrowcast.bench.measure.timing import Trial
from narrowcast.bench.updates.weights import Weights, trial_of
from narrowcast.precision.plan.plan import Plan
from narrowcast.training.optimizers import build_optimizer

MOMENT_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "int8": 1 + 4 / 256}
"""Of one moment of one parameter; 8-bit ones share an fp32 scale among 256."""


def build(weights: Weights, *, policy: str) -> Trial:
    """Return a step in a policy: unscale, norm, clip, AdamW, master, working copy."""
    prepared = narrowcast.prepare(
        weights.model,
        build_optimizer(weights.recipe.optimizer, weights.model, device=weights.device),
        policy=policy,
        clip_norm=weights.recipe.clip_norm,
    )
    moved = pass_bytes(prepared.plan) / weights.count

    def step() -> None:
        # `Prepared.step` would refuse to unscale gradients that no backward pass has scaled.
        engine = prepared.engine
        engine.begin_step()
        present, metered = engine.weights.with_gradients(), engine.is_metered
        packed = engine.queue_update(present, metered=metered)
        engine.end_step(packed, present, metered=metered)

    return trial_of(weights, step, bytes_per_parameter=moved, update_path=prepared.update_path)


def pass_bytes(plan: Plan) -> float:
    """Return what one pass moves: 28 bytes per parameter with a split master and its norm."""
    kept = plan.bytes
    parameters = sum(module.parameters for module in plan.modules)
    moments = 2 * parameters * MOMENT_BYTES[plan.policy.moments_format]
    return 2 * (kept["grads"] + kept["params"] + kept["master"] + moments)
