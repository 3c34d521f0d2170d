"""Other weights, or another plan, in a model for as long as a block lasts.

Swapped weights have their own memory: tensors taken inside keep their values, writes inside reach
nothing, and the weights are back where captured steps look for them.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from narrowcast.precision.dtensor import gather_anew, replace_values
from narrowcast.precision.fp8.state import Fp8Model
from narrowcast.precision.modules.rewrite import compact_recurrent, rewrite_modules
from narrowcast.precision.modules.wrappers import OwnLossScale
from narrowcast.precision.plan.plan import Plan
from narrowcast.precision.products.regions import get_entry
from narrowcast.precision.step.engine import Engine
from narrowcast.precision.swap import restore, set_class, swap
from narrowcast.precision.weights.ownership import StandIn, ValueOf
from narrowcast.precision.weights.trained import TrainedWeights


@contextlib.contextmanager
def swapped_in(engine: Engine, what: StandIn, get_value: ValueOf) -> Iterator[None]:
    """Use these values as weights inside the block, cast to the weight formats."""
    weights = engine.weights
    with (
        engine.fp8.amax_frozen(),
        weights.ownership.swapped_in(what, get_value),
        _swapped_values(engine.model, weights, get_value),
    ):
        # Weights that are not swapped must keep their addresses for captured steps.
        compact_recurrent(engine.model, only=set(weights.all))
        yield


@contextlib.contextmanager
def _swapped_values(
    model: nn.Module, weights: TrainedWeights, get_value: ValueOf
) -> Iterator[None]:
    stored, outer = [p.detach() for p in weights.all], dict(weights.aside)
    try:
        for parameter, own in zip(weights.all, stored, strict=True):
            value = get_value(parameter).to(parameter.dtype, copy=True)
            weights.aside.setdefault(parameter, own)  # the outermost block has the weight's own
            replace_values(parameter, value)
        _let_know(model, weights)
        yield
    finally:
        for parameter, own in zip(weights.all, stored, strict=True):
            replace_values(parameter, own)
        weights.aside = outer
        _let_know(model, weights)


def _let_know(model: nn.Module, weights: TrainedWeights) -> None:
    """Invalidate copies of the weights in fp8 layers, autocast and FSDP."""
    gather_anew(model)
    torch.autograd.graph.increment_version(weights.all)
    torch.clear_autocast_cache()


@contextlib.contextmanager
def plan_tried(engine: Engine, plan: Plan) -> Iterator[None]:
    """Run modules by another plan inside the block, with new delayed fp8 scales."""
    modules = list(engine.model.modules())
    before = [(type(module), _ours(module.__dict__)) for module in modules]
    active = engine.plan, engine.entry, engine.fp8
    restore(engine.model)
    try:
        rewrite_modules(engine.model, plan)
        for module, (_, attributes) in zip(modules, before, strict=True):
            if "nc_scale" in attributes:
                swap(module, OwnLossScale, nc_scale=attributes["nc_scale"])
        engine.plan, engine.entry = plan, get_entry(engine.model)
        engine.fp8 = Fp8Model(engine.model)
        yield
    finally:
        restore(engine.model)
        for module, (kind, attributes) in zip(modules, before, strict=True):
            set_class(module, kind)
            module.__dict__.update(attributes)
            if "nc_forward" in attributes:
                module.__dict__.pop("forward", None)
        engine.plan, engine.entry, engine.fp8 = active


def _ours(attributes: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in attributes.items() if name.startswith("nc_")}
