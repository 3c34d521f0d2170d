"""Linear layers that read the same tensor: queries, keys and values; the gate and the value.

The module that holds them is called with stand-ins for its layers, which record their inputs. Only
forwards of transformers and of this library are called: they have no other effects.
"""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from narrowcast.precision.swap import has_own_forward, plain_class

NAMES = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q_lin", "k_lin", "v_lin"),
    ("q", "k", "v"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("wi_0", "wi_1"),
)
"""What layers are called that may read one tensor."""
_HOUSES = ("transformers.", "narrowcast.")
_ELSEWHERE = ("key_value_states", "encoder_hidden_states")
"""What attention may look at in the place of its own input, by its name in transformers."""
_ANOTHER = "another"
_BATCH, _LENGTH = 1, 2


def siblings_in(model: nn.Module) -> Iterator[tuple[nn.Linear, ...]]:
    """Yield the layers of a model that read one tensor, in the order in which they are called."""
    answers: dict[Any, tuple[str, ...]] = {}
    for module in model.modules():
        for names in NAMES:
            layers = [module._modules.get(name) for name in names]
            if not all(isinstance(each, nn.Linear) for each in layers):
                continue
            shapes = tuple(
                (each.in_features, each.out_features)
                for each in layers
                if isinstance(each, nn.Linear)
            )
            requested = plain_class(module), names, shapes
            if requested not in answers:  # modules of one class and shape do the same
                answers[requested] = find_siblings(module, names)
            matches = [module._modules[name] for name in answers[requested]]
            if matches:
                yield tuple(each for each in matches if isinstance(each, nn.Linear))


def find_siblings(module: nn.Module, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return which of these layers always read one tensor: none, or at least two."""
    plain = plain_class(module)
    if has_own_forward(module) or not plain.forward.__module__.startswith(_HOUSES):
        return ()
    elsewhere = [each for each in _parameters(plain) if each.name in _ELSEWHERE]
    results = _input_letters(module, names, ())
    if elsewhere:
        others = _input_letters(module, names, tuple(each.name for each in elsewhere))
        results = {name: results[name] + others[name] for name in results if name in others}
    for which in results.values():
        same = tuple(
            name for name, each in results.items() if each == which and "another" not in which
        )
        if len(same) > 1:
            return same
    return ()


def _input_letters(
    module: nn.Module, names: tuple[str, ...], elsewhere: tuple[str, ...]
) -> dict[str, str]:
    """Return which tensor each layer was given, as a letter; nothing of those not called."""
    plain = plain_class(module)
    layers = {name: module._modules[name] for name in names}
    width = getattr(layers[names[0]], "in_features", 0)
    x, y = (torch.ones(_BATCH, _LENGTH, width, device="cpu") for _ in range(2))
    seen: dict[str, str] = {}
    stand_ins = {name: _StandIn(name, each, (x, y), seen) for name, each in layers.items()}
    twin = object.__new__(plain)
    twin.__dict__.update(module.__dict__)
    twin.__dict__["_modules"] = {
        name: None if each is None else _Absent() for name, each in module._modules.items()
    } | stand_ins
    needed = [each for each in _parameters(plain)[1:] if each.default is each.empty]
    settings: dict[str, Any] = {each.name: None for each in needed} | dict.fromkeys(elsewhere, y)
    try:
        with torch.no_grad():
            plain.forward(twin, x, **settings)
    except (_Seen, AttributeError, TypeError, ValueError, LookupError, RuntimeError):
        pass
    return {name: which for name, which in seen.items() if which}


def _parameters(plain: type[nn.Module]) -> list[inspect.Parameter]:
    """Return what a forward takes by name."""
    every = list(inspect.signature(plain.forward).parameters.values())[1:]
    return [each for each in every if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]


class _Seen(Exception):  # noqa: N818  # no error: it ends a forward that has shown enough
    """Every layer has been called."""


class _Absent(nn.Module):
    """Placeholder for other modules: returns its input."""

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        return x


class _StandIn(nn.Module):
    """Placeholder for a linear layer that records its input."""

    def __init__(
        self, name: str, layer: Any, known: tuple[Tensor, Tensor], seen: dict[str, str]
    ) -> None:
        super().__init__()
        self._name, self._known, self._seen = name, known, seen
        self.in_features, self.out_features = layer.in_features, layer.out_features
        seen[name] = ""

    def forward(self, x: Tensor) -> Tensor:
        x_itself, elsewhere = self._known
        self._seen[self._name] = "x" if x is x_itself else "y" if x is elsewhere else _ANOTHER
        if all(self._seen.values()):
            raise _Seen
        return x.new_ones(*x.shape[:-1], self.out_features)
