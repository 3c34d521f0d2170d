"""Modules of transformers that are known by what they compute: GELUs, MLPs, turned heads.

None is taken by its name. Its own forward is called with numbers of a few rows, in float64, and has
to give what the piece would; a class whose forward is somebody's own is not asked. The numbers of
each distinct module are computed once, whatever the size of the model.
"""

import contextlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from narrowcast.precision.plan.pieces.probing import NOT_RUN, make_twin, numbers, reason_not_probed
from narrowcast.precision.swap import plain_class

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
    """Say why a GELU that is written out is not known; nothing where `gelu_approximation` is."""
    return "" if gelu_approximation(module) else f"{plain_class(module).__name__} is not a GELU"


def gelu_approximation(module: nn.Module) -> str:
    """Return torch's word for the GELU that a module computes; nothing where it is none."""
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
    """Say whether a module has the layers of a gated MLP."""
    return any(all(name in module._modules for name in names) for names in (*_MLPS, _JOINT_MLP))


def looks_like_a_gelu_written_out(module: nn.Module) -> bool:
    """Say whether a module of transformers is called a GELU and takes several operations for it."""
    called = "GELU" in plain_class(module).__name__.upper() and not list(module.children())
    return called and not reason_not_probed(module) and _operations(module) > 1


def looks_like_turning(module: nn.Module) -> bool:
    """Say whether the forward of a module calls what turns queries and keys."""
    forward = inspect.unwrap(plain_class(module).forward)
    return isinstance(forward, FunctionType) and ROTARY in forward.__code__.co_names


def _activation(module: nn.Module | None) -> str:
    """Return which activation a module is; nothing where it is another."""
    if module is None or next(module.parameters(), None) is not None:
        return ""
    with _real_numbers():
        return _probe_activation(module)


def _real_numbers() -> contextlib.AbstractContextManager[Any]:
    """Let numbers be numbers though a model is planned where tensors have none."""
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
    """Count what a module of one input launches; none where it does not run."""
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
    """Say whether a module gives down(activation(gate(x)) · value(x)) of the layers it has."""
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
    """Say whether a function turns (batch, head, length, width) as models of transformers do."""
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
