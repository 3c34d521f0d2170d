"""The plan of one module: its formats, whether native or emulated, its bytes, and why."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import ParametrizationList

from narrowcast.errors import UnsupportedError
from narrowcast.hardware import Hardware, Speeds, Support
from narrowcast.numerics import FORMATS, BlockFormat, plain_format
from narrowcast.precision.plan.folding import decibel_range
from narrowcast.precision.plan.gains import (
    MIN_SPEEDUP,
    Gain,
    Measured,
    in_one_format,
    measured_gain,
)
from narrowcast.precision.plan.policy import FP8_FORMATS, PRODUCTS, Policy
from narrowcast.precision.quantized_frozen import QuantizedFrozenInfo, QuantizedFrozenLayer
from narrowcast.precision.swap import has_own_forward, plain_class

SCALING: Final = "row"
"""How a kept weight is scaled, and so what is multiplied by it."""


@dataclass(frozen=True, kw_only=True)
class QuantizedFrozenPlan:
    """How one module keeps its weight, and what that has lost."""

    format: str = "e4m3"
    snr_db: float | None
    """None if not measured, ∞ if nothing was lost."""
    widened: bool
    """Whether products have it in a wider format, made of the bytes for each of them."""

    @classmethod
    def of(cls, module: QuantizedFrozenLayer, policy: Policy) -> "QuantizedFrozenPlan":
        """Return the plan of a module whose products have this policy."""
        return cls(snr_db=module.quantized.snr_db, widened=policy.forward not in FP8_FORMATS)

    def to_json(self) -> dict[str, Any]:
        """Return plain data; the loss of a weight that lost nothing is null."""
        lossless = self.snr_db is None or self.snr_db == float("inf")
        return {
            "format": self.format,
            "snr_db": None if lossless else self.snr_db,
            "widened": self.widened,
        }


def frozen_product_policy(policy: Policy, stored: QuantizedFrozenInfo) -> Policy:
    """Return the policy of a kept weight's products: row scales, and in fp8 or not as asked."""
    narrow = policy.forward in FP8_FORMATS
    if stored.products == "wide" or policy.forward not in ("e4m3", "bf16", "fp16", "fp32", "tf32"):
        return in_one_format(policy, policy.functional)
    if stored.products == "fp8" and not narrow:
        return replace(
            policy,
            forward="e4m3",
            output="",
            grad_input="e5m2",
            grad_weight="e5m2",
            scaling=SCALING,
            accumulator="fast",
        )
    return replace(policy, scaling=SCALING) if narrow else policy


def relative_speed(
    module: QuantizedFrozenLayer, policy: Policy, speeds: Speeds | None, *, rows: int
) -> tuple[float | None, str]:
    """Return how fast a kept weight's products are beside those of a bf16 weight, and a word."""
    kind = "frozen-row" if policy.forward in FP8_FORMATS else "frozen-wide"
    outputs, inputs = module.weight_e4m3.shape
    gain = None
    if speeds is not None:
        gain = speeds.gain(kind, tokens=rows, inputs=inputs, outputs=outputs, against="frozen-bf16")
    if gain is None:
        return None, "speed not measured here"
    return gain, f"{gain:.2f} × a bf16 weight at {rows}×{inputs}×{outputs}"


def describe_loss(alike: Sequence[QuantizedFrozenPlan | None]) -> str:
    """Return what the weights of some modules have lost."""
    matches = [each.snr_db for each in alike if each is not None]
    return decibel_range([value for value in matches if value is not None])


_CALLED_A_NORM = re.compile(r"Norm(\dd)?$", re.ASCII)  # LlamaRMSNorm, LayerNorm2d

Kind = Literal[
    "linear", "convolution", "attention", "recurrent", "embedding", "normalisation", "other"
]


def module_kind(module: nn.Module) -> Kind:
    """Return the kind of a module, by its class; any class named a norm counts as one."""
    match module:
        case nn.Linear() | QuantizedFrozenLayer():
            return "linear"
        case _ConvNd():
            return "convolution"
        case nn.MultiheadAttention():
            return "attention"
        case nn.RNNBase() | nn.RNNCellBase():
            return "recurrent"
        case nn.Embedding() | nn.EmbeddingBag():
            return "embedding"
        case nn.LayerNorm() | nn.GroupNorm() | nn.RMSNorm() | nn.LocalResponseNorm() | _NormBase():
            return "normalisation"
    is_leaf = next(module.children(), None) is None
    return "normalisation" if is_leaf and _CALLED_A_NORM.search(type(module).__name__) else "other"


def may_be_complex(module: nn.Module, kind: Kind) -> bool:
    """Return whether a module of its own making has a weight that `view_as_complex` would take."""
    own = module.parameters(recurse=False)
    return kind == "other" and any(weight.dim() > 1 and weight.shape[-1] == 2 for weight in own)


def multiplies(kind: Kind) -> bool:
    """Return whether a module of this kind multiplies."""
    return kind not in ("embedding", "normalisation")


def needs_one_dtype(kind: Kind) -> bool:
    """Return whether torch takes the weights of such a module in one dtype only."""
    return kind in ("recurrent", "normalisation")


How = Literal["native", "emulated", "unchanged"]

BLOCKS_AT = (9, 0)
_NO_BLOCKS = "only compute capability 9.0 has products with one scale per block of 128"

# cuBLAS takes fp8 operands only where both matrix dimensions are multiples of 16.
FP8_MULTIPLE = 16
FP8_BLOCK = 128
"""Values of a block that has a scale, along the dimension that is summed; of a weight, squared."""


@dataclass(frozen=True, kw_only=True)
class ModulePlan:
    """What one module gets."""

    name: str
    kind: Kind
    policy: Policy
    """In force for this module: without exceptions, and after what its shape forbids."""
    how: How
    reason: str
    parameters: int
    """Weights this module is the first to hold; tied weights count once."""
    bytes: Mapping[str, int]
    frozen: QuantizedFrozenPlan | None = None
    """How a frozen weight is kept in fewer bits than any that is trained; often not at all."""
    spares_host: bool = False
    """Whether it is kept wider only for what fp8 would cost the host in eager mode."""
    rows: int | None = None
    """The rows per product that decided its formats; None if any number gives the same."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        products = multiplies(self.kind)
        lookup = self.policy.params
        return {
            "name": self.name,
            "kind": self.kind,
            **{role: getattr(self.policy, role) if products else lookup for role in PRODUCTS},
            "params": self.frozen.format if self.frozen else self.policy.params,
            "output": self.policy.output_format if products else lookup,
            "how": self.how,
            "reason": self.reason,
            "parameters": self.parameters,
            "bytes": dict(self.bytes),
            **({"quantized": self.frozen.to_json()} if self.frozen else {}),
        }


class ListedModule(NamedTuple):
    """A module that gets a plan."""

    name: str
    module: nn.Module
    kind: Kind
    fresh: Sequence[nn.Parameter]
    """Parameters that no earlier module holds."""
    tied: bool
    """Whether it shares a parameter with an earlier module."""
    in_fp32: bool = False
    """Whether its class declares `runs_in_fp32`: its forward pass turns autocast off."""


class ModulePlanner:
    """Decides one module at a time."""

    def __init__(
        self,
        policy: Policy,
        hardware: Hardware,
        emulate: bool | None,
        *,
        measured: Measured,
    ) -> None:
        self._policy, self._hardware, self._emulate = policy, hardware, emulate
        self._unexcepted = replace(policy, exceptions=(), head="")
        self._measured = measured

    def plan_module(self, listed: ListedModule, *, moments: int) -> ModulePlan:
        """Return the plan of one module."""
        name, module, kind, fresh, tied, in_fp32 = listed
        policy = self._policy.for_module(name)
        excepted = policy != self._unexcepted
        reason, gain = "", Gain(policy=policy)
        if kind == "normalisation":
            if policy.reduce == "fp32" or next(module.buffers(), None) is not None:
                # Running statistics are fp32, and torch wants weights of their dtype.
                policy = replace(policy, params="fp32", grads="", master="none", moments="")
            how: How = "unchanged"
            reason = f"kept {policy.reduce}: normalisation"
        elif isinstance(module, ParametrizationList):
            how, reason = "unchanged", "kept fp32: a parametrization computes a weight"
            policy = replace(
                Policy(), scaling="none", reduce=policy.reduce, accumulator=policy.accumulator
            )
        elif kind == "embedding":
            whole = bool(fresh) and not any(p.requires_grad for p in fresh)
            saved = "" if whole else f"kept {policy.params}: "  # a frozen one stays as it came
            how, reason = "unchanged", f"{saved}embedding lookup, no products"
        elif isinstance(module, QuantizedFrozenLayer):
            how, reason, gain = self._plan_quantized_frozen(name, policy, module)
            policy = gain.policy
        elif in_fp32:
            how, reason = "unchanged", "kept fp32: its forward pass turns autocast off"
            policy = in_one_format(policy, "fp32")
        else:
            saved, policy = _within_shape(policy, module, kind)
            how, why = self._product_support(policy)
            narrow = how == "native" and not is_uniform(policy)
            # What is emulated is not asked for because it is fast.
            if narrow and isinstance(module, nn.Linear):
                requested = bool(self._policy.exception_for(name)[1])
                rows = self._measured.rows.in_module(name)
                gain = measured_gain(module, policy, self._measured, rows=rows, request=requested)
                policy = gain.policy
                how, why = self._product_support(policy)
            reason = "; ".join(filter(None, [saved, why, gain.why]))
        notes = ["exception"] if excepted else []
        if policy.params != "fp32" and may_be_complex(module, kind):
            policy = replace(policy, params="fp32", grads="", master="none", moments="")
            notes.append("params kept fp32: pairs may be complex numbers, which bf16 does not have")
        if not isinstance(module, QuantizedFrozenLayer):
            frozen, policy = _with_frozen(policy, module, kind)
            notes += [frozen] if frozen else []
        notes += ["weight tied to an earlier module"] if tied else []
        if notes:
            reason += f" ({', '.join(notes)})"
        return ModulePlan(
            name=name,
            kind=kind,
            policy=policy,
            how=how,
            reason=reason,
            parameters=sum(p.numel() for p in fresh),
            bytes=_bytes(policy, self._policy, fresh, moments) | _fp8_bytes(policy, module, how),
            frozen=QuantizedFrozenPlan.of(module, policy)
            if isinstance(module, QuantizedFrozenLayer)
            else None,
            spares_host=gain.spares_host,
            rows=gain.rows,
        )

    def support(self, format_name: str) -> Support:
        """Return how products of a format will run, or refuse them."""
        result = self._hardware.support(format_name)
        if self._emulate and format_name != "fp32":
            return Support(how="emulated", reason="requested by emulate=true")
        if result.how == "impossible":
            raise UnsupportedError(
                f"{format_name} products cannot run here: {result.reason}. Use the fp32 policy."
            )
        if result.how == "emulated" and self._emulate is False:
            raise UnsupportedError(
                f"{format_name} products need emulation here, but emulate=false was set: "
                f"{result.reason}. Leave out emulate=false to emulate them, or use the fp32 "
                "policy."
            )
        return result

    def _plan_quantized_frozen(
        self, name: str, policy: Policy, module: QuantizedFrozenLayer
    ) -> tuple[How, str, Gain]:
        """Return how a weight that is kept in e4m3 is multiplied, why, and in which formats."""
        policy, narrow = frozen_product_policy(policy, module.quantized), ""
        if policy.forward in FP8_FORMATS and any(
            size % FP8_MULTIPLE for size in module.weight_e4m3.shape
        ):
            policy = in_one_format(policy, policy.functional)
            narrow = f"its sides are not multiples of {FP8_MULTIPLE}"
        how, why = self._product_support(policy)
        speed, decided = "", None
        if how == "native":
            rows, speeds = self._measured.rows.in_module(name), self._measured.speeds
            gain, speed = relative_speed(module, policy, speeds, rows=rows)
            request = module.quantized.products == "fp8" or not self._measured.skip_slow_fp8
            if policy.forward in FP8_FORMATS and gain is not None and not request:
                decided = rows
            if decided is not None and gain is not None and gain <= MIN_SPEEDUP:
                narrow = f"fp8 gains nothing: {speed}"
                policy = in_one_format(policy, policy.functional)
                how, why = self._product_support(policy)
                _, speed = relative_speed(module, policy, speeds, rows=rows)
        done = "" if policy.forward in FP8_FORMATS else f", cast to {policy.forward} for products"
        groups = "row" if module.weight_scale.dim() == 1 else "block"
        stored = f"stored in e4m3 with {groups} scales{done}"
        reason = "; ".join(filter(None, [why, stored, narrow, speed]))
        return how, reason, Gain(policy=policy, rows=decided)

    def _product_support(self, policy: Policy) -> tuple[How, str]:
        names = sorted({policy.forward, policy.grad_input, policy.grad_weight})
        if names == ["fp32"]:
            return "unchanged", "fp32"
        supports = [self.support(name) for name in names if name != "fp32"]
        emulated = [s for s in supports if s.how == "emulated"]
        if emulated:
            return "emulated", f"emulated: {emulated[0].reason}"
        if not is_uniform(policy) and not _is_fp8_product(policy):
            if self._emulate is False:
                raise UnsupportedError(
                    f"Native products need one format for all three, got {policy}. Write one "
                    "format, or leave out emulate=false to emulate them."
                )
            return "emulated", "emulated: no native product mixes these formats"
        if policy.scaling == "block" and self._hardware.capability != BLOCKS_AT:
            if self._emulate is False:
                raise UnsupportedError(
                    "scaling=block needs emulation here, but emulate=false was set: "
                    f"{_NO_BLOCKS}. Write scaling=tensor."
                )
            return "emulated", f"emulated: {_NO_BLOCKS}"
        return "native", f"native: {supports[0].reason}"


def _with_frozen(policy: Policy, module: nn.Module, kind: Kind) -> tuple[str, Policy]:
    """Return the policy of a module whose frozen weights stay as they came, and a word on it."""
    own = list(module.parameters(recurse=kind == "attention"))
    frozen = [p for p in own if not p.requires_grad]
    if all(p.dtype == plain_format(policy.params).dtype for p in frozen):
        return "", policy
    wide = all(p.dtype == plain_format("fp32").dtype for p in frozen)
    if wide and (len(frozen) == len(own) or needs_one_dtype(kind)):
        policy = replace(policy, params="fp32", grads="", master="none", moments="")
    note = "frozen: dtype unchanged"
    return note if len(frozen) == len(own) else f"partly {note}", policy


def widens(policy: Policy) -> bool:
    """Return whether weights are kept in fewer bits than they are multiplied in."""
    return policy.params != "fp32" and policy.functional in ("fp32", "tf32")


def is_uniform(policy: Policy) -> bool:
    """Return whether all products have one format and return it: what a region can do."""
    products = {getattr(policy, role) for role in PRODUCTS}
    one = products.pop()
    return (
        not products
        and not _eight_bits_or_less(one)
        and policy.output_format == Policy(forward=one).output_format
    )


def _is_fp8_product(policy: Policy) -> bool:
    """Return whether tensor cores have these products: e4m3 forward, fp8 or bf16 backward."""
    backward = {policy.grad_input, policy.grad_weight}
    return (
        policy.forward == "e4m3"
        and backward <= {"e4m3", "e5m2", "bf16"}
        and policy.output_format == "bf16"
    )


def _within_shape(policy: Policy, module: nn.Module, kind: Kind) -> tuple[str, Policy]:
    """Return the policy a module's kind and shape allow, and what was kept wider and why."""
    if is_uniform(policy):
        return "", policy
    one, wide = policy.functional, in_one_format(policy, policy.functional)
    if not isinstance(module, nn.Linear):
        return (
            f"kept {one}: only linear layers support 8-bit products or one format per product",
            wide,
        )
    plain = plain_class(module)  # a prepared model is planned as the one it was
    if plain.forward is not nn.Linear.forward or has_own_forward(module):
        return f"kept {one}: {plain.__name__} overrides forward", wide
    formats = [FORMATS[getattr(policy, role)] for role in PRODUCTS]
    blocks = [known.block for known in formats if isinstance(known, BlockFormat)]
    own = [FP8_BLOCK] if policy.scaling == "block" else []
    multiple = max([FP8_MULTIPLE, *own, *blocks])
    shape = (module.in_features, module.out_features)
    scaled = any(_eight_bits_or_less(known.name) for known in formats)
    if scaled and any(size % multiple for size in shape):
        return f"kept {one}: {shape[0]}×{shape[1]} is not a multiple of {multiple}", wide
    return "", policy


def _eight_bits_or_less(name: str) -> bool:
    return name in FP8_FORMATS or isinstance(FORMATS[name], BlockFormat)


def _bytes(
    policy: Policy, whole: Policy, fresh: Sequence[nn.Parameter], moments: int
) -> dict[str, int]:
    """Return what weights take, and beside those that are trained their gradients and the rest."""
    trained = sum(p.numel() for p in fresh if p.requires_grad)
    frozen = [p for p in fresh if not p.requires_grad]
    lowered = policy.params != "fp32"
    extra = {"fp32": 4, "split": 2, "kahan": 2}.get(whole.master, 0) if lowered else 0
    stored = whole.moments_format if lowered or whole.needs_fused_optimizer else "fp32"
    grads = whole.grads_format if lowered else "fp32"
    return {
        "params": trained * _size(policy.params) + sum(p.nbytes for p in frozen),
        "grads": trained * _size(grads),
        "master": trained * extra,
        "moments": round(trained * moments * _moment_size(stored)),
    }


def _fp8_bytes(policy: Policy, module: nn.Module, how: How) -> dict[str, int]:
    """Return the bytes of the fp8 weight in both layouts, or of the scales of a frozen one."""
    if isinstance(module, QuantizedFrozenLayer):
        return {"scales": module.weight_scale.nbytes}
    keeps = how == "native" and _is_fp8_product(policy)
    if not keeps or not isinstance(module, nn.Linear):
        return {}
    layouts = 1 + (policy.grad_input in FP8_FORMATS)
    return {"fp8": layouts * module.weight.numel()}


def _moment_size(name: str) -> float:
    # A block of 256 moments of 8 bits shares an fp32 scale.
    return 1 + 4 / 256 if name == "int8" else _size(name)


def _size(name: str) -> int:
    return 4 if name == "fp32" else 2


Role = Literal["batch", "input", "weight", "output", "loss", "grad_output", "grad_weight", "update"]
ROLES: tuple[Role, ...] = ("input", "weight", "output", "grad_output", "grad_weight")
"""Those that a module has, in the order in which a step comes by them."""
OPERANDS: tuple[Role, ...] = ("input", "weight", "grad_output")
"""Those that a product takes, and so casts: in 8 bits they have a scale."""
GRADIENTS: frozenset[str] = frozenset({"grad_output", "grad_weight"})
"""The two products of the backward pass."""


def roundings(policy: Policy, role: str, *, kind: Kind = "linear") -> tuple[str, ...]:
    """Return the formats that a role's tensor is rounded to in a module, one after the other."""
    if not multiplies(kind):
        return (policy.params if kind == "embedding" else policy.reduce,)
    match role:
        case "input" | "weight":
            return (policy.forward,)
        case "output":
            return (policy.output_format,)
        case "grad_output":
            # What comes back has the format of what went out. The operand made of it is in this
            # format in the product for the input's gradient, and in `policy.grad_weight` in that
            # for the weight's.
            return (policy.output_format, policy.grad_input)
        case "grad_weight":
            # As the product returns it, and as it is stored.
            return (policy.output_format, policy.grads_format)
        case "update":
            return (policy.params,)
        case _:
            raise AssertionError(f"a module has no {role}")
