"""Modules of torch and transformers that are known by what they compute: norms, GELUs, MLPs.

A module's own forward is called with a few rows of float64 numbers and must return what the fused
piece would. A class with an overridden forward is not probed.
"""

import contextlib
import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from narrowcast.precision.plan.module_plan import module_kind
from narrowcast.precision.swap import has_own_forward, plain_class

NOT_RUN = (AttributeError, TypeError, ValueError, LookupError, RuntimeError)
"""What other people's forwards raise that want something else."""


def in_a_line(error: Exception) -> str:
    """Describe an error of a third-party forward, short enough for a plan."""
    first = next(iter(str(error).splitlines()), "")
    text = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return text if len(text) <= 90 else f"{text[:89]}…"


def reason_not_probed(module: nn.Module) -> str:
    """Return why a module's forward must not be traced; empty if it may."""
    plain = plain_class(module)
    if has_own_forward(module) or not plain.forward.__module__.startswith("transformers."):
        return f"{plain.__name__} overrides forward"
    return ""


def make_twin(module: nn.Module, **attributes: Any) -> Any:
    """Return a private copy of a module with other weights and inner layers."""
    twin = object.__new__(plain_class(module))
    twin.__dict__.update(module.__dict__)
    twin.__dict__.update(attributes)
    return twin


def numbers(*shape: int, seed: int) -> Tensor:
    """Return numbers to ask with, the same every time."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")


ROTARY = "apply_rotary_pos_emb"
"""What transformers calls the function that turns queries and keys, in the module of each model."""

_MLPS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
_JOINT_MLP = ("gate_up_proj", "down_proj")
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
_ROWS, _WIDTH = 3, 8
_NEAR = 1e-9
"""Between float64 and what is another function, or another constant."""


@dataclass(frozen=True)
class GatedMlp:
    """The names of a gated MLP's layers, and its activation; of one layer for gate and value."""

    gate: str
    value: str
    """The same as `gate` where one layer gives both, as halves."""
    down: str
    activation: str
    activation_name: str


def reason_not_gelu(module: nn.Module) -> str:
    """Return why a decomposed GELU is not recognised; empty if it is."""
    return "" if gelu_approximation(module) else f"{plain_class(module).__name__} is not a GELU"


def gelu_approximation(module: nn.Module) -> str:
    """Return torch's name for the GELU that a module computes; empty if it is not a GELU."""
    return {"gelu": "none", "gelu_tanh": "tanh"}.get(_activation(module), "")


def match_gated_mlp(module: nn.Module) -> GatedMlp | str:
    """Return the parts of a gated MLP of transformers, or why it is not known."""
    why = reason_not_probed(module)
    name = plain_class(module).__name__
    children = {key for key, each in module._modules.items() if each is not None}
    for names in (*_MLPS, _JOINT_MLP):
        extra = children - set(names)
        if children < set(names) or not set(names) <= children or len(extra) != 1:
            continue
        (act,) = extra
        activation = _activation(module._modules[act])
        known = GatedMlp(names[0], names[-2], names[-1], activation, act)
        return why or (
            known if activation and _is_gated(module, known) else f"{name} computes something else"
        )
    return why or f"{name} has other layers"


def match_rotary(module: nn.Module) -> FunctionType | str:
    """Return the forward of an attention layer that turns halves by `ROTARY`, or why not."""
    why = reason_not_probed(module)
    forward = plain_class(module).forward
    name = plain_class(module).__name__
    if why or not isinstance(forward, FunctionType) or inspect.unwrap(forward) is not forward:
        return why or f"{name} has a wrapped forward"
    turn = forward.__globals__.get(ROTARY)
    if ROTARY not in forward.__code__.co_names or not callable(turn) or not _turns_halves(turn):
        return f"{name} rotates its heads in a different way"
    return forward


def looks_like_a_gated_mlp(module: nn.Module) -> bool:
    """Return whether a module has the layers of a gated MLP."""
    return any(all(name in module._modules for name in names) for names in (*_MLPS, _JOINT_MLP))


def looks_like_a_gelu_written_out(module: nn.Module) -> bool:
    """Return whether a module of transformers is named a GELU and takes several operations."""
    called = "GELU" in plain_class(module).__name__.upper() and not list(module.children())
    return called and not reason_not_probed(module) and _operations(module) > 1


def looks_like_turning(module: nn.Module) -> bool:
    """Return whether the forward of a module calls what turns queries and keys."""
    forward = inspect.unwrap(plain_class(module).forward)
    return isinstance(forward, FunctionType) and ROTARY in forward.__code__.co_names


def _activation(module: nn.Module | None) -> str:
    """Return the name of a known activation; empty for others."""
    if module is None or next(module.parameters(), None) is not None:
        return ""
    with _real_numbers():
        return _probe_activation(module)


def _real_numbers() -> contextlib.AbstractContextManager[Any]:
    """Make tensors have values although the model is planned on the meta device."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def _probe_activation(module: nn.Module) -> str:
    drawn = numbers(64, seed=2)
    x = torch.cat((4 * drawn, 100 * drawn))  # far out too: some are cut off there
    try:
        with torch.no_grad():
            result = type(module).forward(module, x)
    except NOT_RUN:
        return ""
    same = (name for name, known in _ACTIVATIONS.items() if _are_near(result, known(x)))
    return next(same, "")


def _operations(module: nn.Module) -> int:
    """Count the kernels that a module with one input launches; None if it does not run."""
    counting = _Counting()
    with _real_numbers(), contextlib.suppress(*NOT_RUN), torch.no_grad():
        x = numbers(_ROWS, seed=2)
        with counting:
            type(module).forward(module, x)
    return counting.operations


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return func(*args, **(kwargs or {}))


def _is_gated(module: nn.Module, known: GatedMlp) -> bool:
    """Return whether a module gives down(activation(gate(x)) · value(x)) of the layers it has."""
    joint = known.gate == known.value
    matrices = {
        known.gate: numbers(_WIDTH, _WIDTH * (2 if joint else 1), seed=3),
        known.down: numbers(_WIDTH, _WIDTH, seed=5),
    }
    if not joint:
        matrices[known.value] = numbers(_WIDTH, _WIDTH, seed=4)
    layers: dict[str, Any] = {name: _layer(matrix) for name, matrix in matrices.items()}
    x = numbers(_ROWS, _WIDTH, seed=6)
    act = module._modules[known.activation_name]
    twin = make_twin(module, _modules={**layers, known.activation_name: act})
    gate, value = layers[known.gate](x), layers[known.value](x)
    if joint:
        gate, value = gate.chunk(2, -1)
    expected = layers[known.down](_ACTIVATIONS[known.activation](gate) * value)
    try:
        with torch.no_grad():
            return _are_near(type(twin).forward(twin, x), expected)
    except NOT_RUN:
        return False


def _layer(matrix: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: x @ matrix


def _turns_halves(turn: Callable[..., Any]) -> bool:
    """Return whether a function turns (batch, head, length, width) as models of transformers do."""
    query, key = numbers(2, 3, _ROWS, _WIDTH, seed=7), numbers(2, 1, _ROWS, _WIDTH, seed=8)
    angles = numbers(2, 2, _ROWS, _WIDTH, seed=9)
    try:
        matched = turn(query, key, angles[0], angles[1])
        return all(
            _are_near(a, halves_turned(b, angles[0][:, None], angles[1][:, None]))
            for a, b in zip(matched, (query, key), strict=True)
        )
    except NOT_RUN:
        return False


def halves_turned(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn pairs of numbers that are half a head apart."""
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat((-second, first), -1) * sine


def _are_near(result: Any, expected: Tensor) -> bool:
    if not isinstance(result, Tensor) or result.shape != expected.shape:
        return False
    return bool(((result - expected).abs() <= _NEAR * (1 + expected.abs())).all())


WIDEST = 32768
"""Numbers of a row that a program of 512 threads still holds in registers, 64 in each."""


@dataclass(frozen=True)
class RmsNorm:
    """What a norm computes: x / rms(x), times its weight and an offset."""

    eps: float
    offset: float
    rounds: bool
    """Whether the quotient is rounded to what came in before it meets a weight in fp32."""
    rounds_to_weight_dtype: bool
    """Whether it is where the weight has 16 bits as well, which T5 makes a difference of."""
    promotes: bool
    """Whether the result is in the wider format of what came in and the weight."""
    of_torch: bool = False
    """Whether it is torch's own, which is one pass already in a single dtype."""


def match_rms_norm(module: nn.Module) -> RmsNorm | str:
    """Return what a norm of torch or of transformers computes, or why it is not known."""
    if isinstance(module, nn.RMSNorm):
        return _torchs_norm(module)
    why = reason_not_probed(module)
    weight = module._parameters.get("weight")
    own = [
        each for each in ("variance_epsilon", "eps") if isinstance(vars(module).get(each), float)
    ]
    if why or weight is None or weight.dim() != 1 or len(module._parameters) != 1 or len(own) != 1:
        return why or f"{plain_class(module).__name__} is not a known norm"
    if weight.numel() > WIDEST:
        return f"its rows of {weight.numel()} are too wide"
    eps = get_epsilon(module)
    if eps <= 0:
        return f"{plain_class(module).__name__} has no epsilon"
    fp32, bf16 = torch.float32, torch.bfloat16
    requested = _normed(module, torch.float64, fp32), _normed(module, bf16, fp32)
    residuals = _normed(module, bf16, bf16)
    yes = (True, False)
    for offset, rounds, promotes in itertools.product((0.0, 1.0), yes, yes):
        known = RmsNorm(eps, offset, rounds, rounds, promotes)
        if all(_is_as_known(known, *each) for each in requested):
            other = replace(known, rounds_to_weight_dtype=not rounds)
            by = {each: _is_as_known(each, *residuals) for each in (known, other)}
            if any(by.values()):
                return known if by[known] else other
            # Some add a weight of 16 bits and the offset in 16 bits: a rounding more, of two.
            if _is_as_known(known, *residuals, within=2.0**-6):
                return known
    return f"{plain_class(module).__name__} is not a known norm"


def _torchs_norm(module: nn.RMSNorm) -> RmsNorm | str:
    plain, weight = plain_class(module), module._parameters.get("weight")
    if has_own_forward(module) or plain.forward is not nn.RMSNorm.forward:
        return f"{plain.__name__} overrides forward"
    if weight is None or weight.dim() != 1:
        return "it has no weight" if weight is None else "its rows have several dimensions"
    if weight.numel() > WIDEST:
        return f"its rows of {weight.numel()} are too wide"
    eps = get_epsilon(module)
    return RmsNorm(
        eps, 0.0, rounds=False, rounds_to_weight_dtype=False, promotes=True, of_torch=True
    )


def get_epsilon(norm: nn.Module) -> float:
    """Return the current epsilon of a norm."""
    own = vars(norm).get("eps", vars(norm).get("variance_epsilon"))
    # As torch has it of fp32, in which it is computed.
    return torch.finfo(torch.float32).eps if own is None else float(own)


def reason_not_layer_norm(module: nn.Module) -> str:
    """Return why a torch layer norm is not recognised; empty if it is."""
    plain = plain_class(module)
    if has_own_forward(module) or plain.forward is not nn.LayerNorm.forward:
        return f"{plain.__name__} overrides forward"
    weight = module._parameters.get("weight")
    if weight is None:
        return "it has no weight"
    return "" if weight.numel() <= WIDEST else f"its rows of {weight.numel()} are too wide"


def looks_like_a_norm(module: nn.Module) -> bool:
    """Return whether a module is a norm by the mean of squares, or derived from torch's."""
    if isinstance(module, nn.RMSNorm):
        return True
    by_name = "RMS" in plain_class(module).__name__ or "variance_epsilon" in vars(module)
    return module_kind(module) == "normalisation" and by_name


def looks_like_a_layer_norm(module: nn.Module) -> bool:
    """Return whether a module is torch's layer norm, or one derived from it."""
    return isinstance(module, nn.LayerNorm)


def _normed(
    module: nn.Module, dtype: torch.dtype, weight_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return rows, a weight, and what the norm makes of them."""
    x = numbers(_ROWS, _WIDTH, seed=0).to(dtype)
    weight = numbers(_WIDTH, seed=1).to(weight_dtype)
    twin = make_twin(module, _parameters={"weight": nn.Parameter(weight)})
    try:
        with torch.no_grad():
            return x, weight, type(twin).forward(twin, x)
    except NOT_RUN:
        return x, weight, None


def _is_as_known(
    known: RmsNorm, x: Tensor, weight: Tensor, matched: Tensor | None, *, within: float = 2.0**-20
) -> bool:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + known.eps)
    narrow = weight.dtype != torch.float32
    if known.rounds_to_weight_dtype if narrow else known.rounds:
        normed = normed.to(x.dtype)
    result = normed * (weight.float() + known.offset)
    if narrow or not known.promotes:
        result = result.to(x.dtype)
    if matched is None or matched.shape != result.shape:
        return False
    # No kernel is given float64: whether a result stays as wide, as T5's does, is of no account.
    if matched.dtype != result.dtype and x.dtype != torch.float64:
        return False
    # The same operations in the same order but for the offset, whose sum may be rounded elsewhere.
    return bool(((matched.double() - result.double()).abs() <= within * result.abs()).all())
