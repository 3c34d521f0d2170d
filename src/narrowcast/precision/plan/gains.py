"""The measured gain of fp8 for a linear layer, and whether it pays off as the model is run.

A layer in fp8 costs the host more than one in 16 bits. To a compiler the casts are operators in
Python, so compiled layers cost the host what eager ones do (`benchmarks/fp8_host.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from torch import nn

from narrowcast.errors import ConfigError
from narrowcast.hardware import Hardware, Speeds
from narrowcast.precision.plan.policy import PRODUCTS, Policy

WHOLE = ""
"""The model itself, whose own products, and those of the loss, have the policy's format."""

KEPT = ("params", "reduce")
"""Roles of an exception that have nothing to do with products."""


def widened(policy: Policy, name: str, wider: str) -> Policy:
    """Return a policy in which a module, or all that no exception names, has another format."""
    if name == WHOLE:
        return replace(in_one_format(policy, wider), head="")
    _, exception = policy.exception_for(name)
    return policy.with_exceptions({name: ", ".join([wider, *_narrow_roles(exception)])})


def in_one_format(policy: Policy, one: str) -> Policy:
    """Return a policy with all three products in a format that needs no scale."""
    return replace(
        policy,
        forward=one,
        grad_input=one,
        grad_weight=one,
        scaling="none",
        accumulator="fp32",
        output="",
    )


def in_fp32(policy: Policy) -> Policy:
    """Return a policy with every product in fp32, and weights kept as they are."""
    stored = [(glob, ", ".join(_narrow_roles(text))) for glob, text in policy.exceptions]
    exceptions = tuple((glob, text) for glob, text in stored if text)
    return replace(widened(policy, WHOLE, "fp32"), exceptions=exceptions)


def rungs(policy: Policy, hardware: Hardware) -> tuple[Policy, ...]:
    """Return a policy and the wider ones above it: in bf16, then in fp32.

    bf16 is left out where it would be emulated and the policy's own format is not.
    """
    matches = [policy]
    native = {one: hardware.support(one).how == "native" for one in (policy.forward, "bf16")}
    for one in ("bf16", "fp32"):
        wider = _nowhere_below(matches[-1], one)
        emulated = one == "bf16" and native[policy.forward] and not native["bf16"]
        if wider != matches[-1] and not emulated:
            matches.append(wider)
    return tuple(matches)


_WIDTHS = {"bf16": 1, "tf32": 1, "fp32": 2}
"""All others have less range."""


def _nowhere_below(policy: Policy, one: str) -> Policy:
    """Return a policy with no product narrower than `one`, and bf16 instead of fp16."""
    wider = replace(
        policy,
        params=_in_range(policy.params),
        grads=_in_range(policy.grads),
        reduce=_in_range(policy.reduce),
        exceptions=(),
    )
    if not _is_wide(policy, one):
        head = policy.head if _WIDTHS.get(policy.head, 0) > _WIDTHS[one] else ""
        output = policy.output if policy.output == "fp32" else ""
        wider = replace(in_one_format(wider, one), head=head, output=output)
    exceptions = []
    for glob, text in policy.exceptions:
        inputs = replace(policy, exceptions=((glob, text),)).for_module(glob)
        terms = text if _is_wide(inputs, one) else ", ".join([one, *_narrow_roles(text)])
        exceptions.append((glob, _in_range(terms)))
    return replace(wider, exceptions=tuple(exceptions))


def _is_wide(policy: Policy, one: str) -> bool:
    least = min(_WIDTHS.get(getattr(policy, role), 0) for role in PRODUCTS)
    return least >= _WIDTHS[one]


def _in_range(text: str) -> str:
    return text.replace("fp16", "bf16")


def _narrow_roles(text: str) -> list[str]:
    overrides = [word.strip() for word in text.split(",")]
    return [word for word in overrides if word.partition("=")[0].strip() in KEPT]


Execution = Literal["eager", "compiled", "graphed"]
"""How a model's passes are run: launched from Python, by a compiler, replayed as a CUDA graph."""

MIN_SPEEDUP = 1.02
"""Below this gain two measurements of the same thing differ."""


def detect_execution(model: nn.Module, requested: Execution | None = None) -> Execution:
    """Return the requested execution, or whether any part of the model is compiled."""
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


ASSUMED_ROWS = 8192
"""Assumed rows per product of a linear layer until they are known."""


@dataclass(frozen=True, kw_only=True)
class GemmRows:
    """How many rows linear layers multiply at once, and where that is known from."""

    usual: int = ASSUMED_ROWS
    by_module: Mapping[str, int] = field(default_factory=dict)
    """Layers with another number."""
    source: Literal["assumed", "given", "learned"] = "assumed"

    @classmethod
    def of(cls, requested: "int | GemmRows | None") -> "GemmRows":
        """Return the rows of an argument: a number is given, and None is assumed."""
        if isinstance(requested, GemmRows):
            return requested
        return cls() if requested is None else cls(usual=requested, source="given")

    @classmethod
    def learned(cls, seen: Mapping[str, int]) -> "GemmRows":
        """Return the rows of layers as a batch had them; of those it did not reach, the most."""
        usual = max(seen.values())
        others = {name: rows for name, rows in seen.items() if rows != usual}
        return cls(usual=usual, by_module=others, source="learned")

    def in_module(self, name: str) -> int:
        """Return the rows of one layer."""
        return self.by_module.get(name, self.usual)

    def to_json(self) -> dict[str, Any]:
        """Return plain data for JSON and checkpoints."""
        return {"usual": self.usual, "by_module": dict(self.by_module), "source": self.source}

    def __str__(self) -> str:
        least = min([self.usual, *self.by_module.values()])
        rows = f"{self.usual:,}" if least == self.usual else f"{least:,} to {self.usual:,}"
        match self.source:
            case "assumed":
                return (
                    f"{rows} per product, assumed until the first training batch on one device; "
                    "set gemm_rows= to fix them"
                )
            case "given":
                return f"{rows} per product, as requested"
            case "learned":
                return f"{rows} per product, learned from a training batch"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What decides whether a layer gains by fp8."""

    speeds: Speeds | None
    rows: GemmRows
    """How many rows layers multiply at once."""
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
    rows: int | None = None
    """The rows that decided; None if any number gives the same."""


def measured_gain(
    layer: nn.Linear, policy: Policy, measured: Measured, *, rows: int, request: bool
) -> Gain:
    """Return the faster policy for a layer; a `request` for fp8 ignores the host cost."""
    kind, wide, speeds = policy.scaling, policy.functional, measured.speeds
    inputs, outputs = layer.in_features, layer.out_features
    named, gain, late = f"{rows}×{inputs}×{outputs}", None, None
    if speeds is not None:
        gain = speeds.gain(kind, tokens=rows, inputs=inputs, outputs=outputs)
        late = speeds.waited_for(
            kind, tokens=rows, inputs=inputs, outputs=outputs, execution=measured.execution
        )
    if gain is None:
        return Gain(policy=policy, why="speed not measured here")
    decided = rows if measured.skip_slow_fp8 else None
    if gain <= MIN_SPEEDUP and measured.skip_slow_fp8:
        why = f"kept {wide}: fp8 gains nothing at {named} ({gain:.2f} ×)"
        return Gain(policy=in_one_format(policy, wide), why=why, rows=decided)
    if late and measured.skip_slow_fp8 and not request:
        why = (
            f"kept {wide}: when {measured.execution}, fp8 at {named} costs the host more than it "
            "saves"
        )
        why = f"{why} (otherwise {gain:.2f} ×)"
        return Gain(policy=in_one_format(policy, wide), why=why, spares_host=True, rows=decided)
    return Gain(policy=policy, why=f"{gain:.2f} × {wide} at {named}", rows=decided)


def execution_lines(running: Execution, *, spared: int, weighed: bool) -> Sequence[tuple[str, str]]:
    """Return how a model is taken to run, where layers are spared fp8 for it or others might be."""
    if not spared and not weighed:
        return []
    if running == "graphed":
        return [("execution", "graphed: the host cost of fp8 is not counted")]
    stored = f"{spared} layer{'s are' if spared > 1 else ' is'}" if spared else "no layer is"
    message = f"{running}: {stored} kept wider because of the host cost of fp8"
    return [("execution", f"{message}; none if graphed" if spared else message)]
