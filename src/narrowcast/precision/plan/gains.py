"""What fp8 gains a linear layer, as measured on the GPU, and whether that is worth it as it is run.

A layer in fp8 costs the host more than one in 16 bits; where the device would wait for that, it is
kept wider. To a compiler the casts are operators in Python, so compiled layers cost the host what
eager ones do (`benchmarks/fp8_host.py`). In a captured step the host takes no part.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from torch import nn

from narrowcast.errors import ConfigError
from narrowcast.hardware import Speeds
from narrowcast.precision.plan.policy import Policy
from narrowcast.precision.plan.widening import in_one_format

Execution = Literal["eager", "compiled", "graphed"]
"""How a model's passes are run: launched from Python, by a compiler, replayed as a CUDA graph."""

MIN_SPEEDUP = 1.02
"""Below this gain two measurements of the same thing differ."""


def detect_execution(model: nn.Module, requested: Execution | None = None) -> Execution:
    """Return how a model will run, as asked; else whether it, or a part, was given to a compiler.

    A model that is compiled after it was planned has to say so.
    """
    if requested is not None:
        if requested not in get_args(Execution):
            terms = " or ".join(f'"{word}"' for word in get_args(Execution))
            raise ConfigError(f"execution must be one of {terms}, got {requested!r}.")
        return requested
    compiled = any(
        module._compiled_call_impl is not None or "_orig_mod" in module._modules
        for module in model.modules()
    )
    return "compiled" if compiled else "eager"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What decides whether a layer gains by fp8."""

    speeds: Speeds | None
    rows: int
    """How many rows a layer multiplies at once."""
    execution: Execution
    skip_slow_fp8: bool
    """Whether a layer that gains nothing is kept wider."""


@dataclass(frozen=True, kw_only=True)
class Gain:
    """What a layer gets, and why."""

    policy: Policy
    why: str = ""
    spares_host: bool = False
    """Whether fp8 was left out for what it costs the host alone."""


def measured_gain(layer: nn.Linear, policy: Policy, measured: Measured, *, request: bool) -> Gain:
    """Return the policy that is the faster one for a layer, and what was measured.

    Where an exception has `asked` for fp8, nothing is left out for what it costs the host.
    """
    kind, wide, speeds = policy.scaling, policy.functional, measured.speeds
    rows, inputs, outputs = measured.rows, layer.in_features, layer.out_features
    named, gain, late = f"{rows}×{inputs}×{outputs}", None, None
    if speeds is not None:
        gain = speeds.gain(kind, tokens=rows, inputs=inputs, outputs=outputs)
        late = speeds.waited_for(
            kind, tokens=rows, inputs=inputs, outputs=outputs, execution=measured.execution
        )
    if gain is None:
        return Gain(policy=policy, why="speed not measured here")
    if gain <= MIN_SPEEDUP and measured.skip_slow_fp8:
        why = f"kept {wide}: fp8 gains nothing at {named} ({gain:.2f} ×)"
        return Gain(policy=in_one_format(policy, wide), why=why)
    if late and measured.skip_slow_fp8 and not request:
        why = (
            f"kept {wide}: when {measured.execution}, fp8 at {named} costs the host more than it "
            "saves"
        )
        why = f"{why} (otherwise {gain:.2f} ×)"
        return Gain(policy=in_one_format(policy, wide), why=why, spares_host=True)
    return Gain(policy=policy, why=f"{gain:.2f} × {wide} at {named}")


def execution_lines(running: Execution, *, spared: int, weighed: bool) -> Sequence[tuple[str, str]]:
    """Say how a model is taken to run, where layers are spared fp8 for it or others might be."""
    if not spared and not weighed:
        return []
    if running == "graphed":
        return [("execution", "graphed: the host cost of fp8 is not counted")]
    stored = f"{spared} layer{'s are' if spared > 1 else ' is'}" if spared else "no layer is"
    message = f"{running}: {stored} kept wider because of the host cost of fp8"
    return [("execution", f"{message}; none if graphed" if spared else message)]
