"""Another plan in force for a while: what passes would be under it, and no step is made."""

import contextlib
from collections.abc import Iterator

from narrowcast.precision.fp8.state import Fp8Model
from narrowcast.precision.modules.rewrite import rewrite_modules
from narrowcast.precision.modules.wrappers import OwnLossScale
from narrowcast.precision.plan.plan import Plan
from narrowcast.precision.products.regions import get_entry
from narrowcast.precision.step.engine import Engine
from narrowcast.precision.swap import restore, set_class, swap


@contextlib.contextmanager
def plan_tried(engine: Engine, plan: Plan) -> Iterator[None]:
    """Let modules compute as `plan` says inside the block; give back the very same afterwards.

    Weights stay as they are kept, and so do loss scales. Scales of fp8 that come from past steps
    have no past here.
    """
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
