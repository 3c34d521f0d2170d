"""What is trained: a model, its loss and one batch; and what the user's own `build()` may return.

A builder returns `(model, loss_fn, inputs)`, where `loss_fn(model, *inputs)` is the loss, or
`(model, batch)`, where the model returns its loss: `model(**batch).loss`, as in transformers.
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from narrowcast.errors import ConfigError

CONTRACT = "Return (model, loss_fn, inputs), or (model, batch) where model(**batch) has a loss."


@dataclass(frozen=True, kw_only=True)
class BuiltModel:
    """A model on its device in training mode, and the batch of every step."""

    model: nn.Module
    loss_fn: Callable[..., Tensor]
    """Takes the model, or its compiled form, and the inputs; returns a scalar."""
    inputs: tuple[Any, ...]


def model_loss(*names: str) -> Callable[..., Tensor]:
    """Return the loss of a model that returns it itself, given inputs by these names."""

    def loss_fn(model: nn.Module, *inputs: Any) -> Tensor:
        loss: Tensor = _loss_in(
            model(**dict(zip(names, inputs, strict=True))) if names else model(*inputs)
        )
        return loss

    return loss_fn


def parse_builder(text: str) -> tuple[str, str]:
    """Split `package.module:build`."""
    module, _, name = text.partition(":")
    if not module or not name.isidentifier() or module.endswith(".py"):
        raise ConfigError(
            f"--mine must be package.module:build, got {text}. Write zoo.mine:build for build() in "
            "zoo/mine.py."
        )
    return module, name


def build_mine(text: str, device: torch.device) -> BuiltModel:
    """Call the user's builder, and move what it returns to the device."""
    module_name, name = parse_builder(text)
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists, and something it imports does not
        raise ConfigError(
            f"--mine {text}: there is no module {error.name} in {here} or among installed "
            "packages. Run from the folder that contains it, or install it."
        ) from None
    build = vars(module).get(name)
    if not callable(build):
        known = [each for each, value in vars(module).items() if inspect.isfunction(value)]
        hint = f"It has {', '.join(known)}." if known else "It has no functions."
        raise ConfigError(f"--mine {text}: {module_name} has no function {name}. {hint}")
    return as_built(build(), device, builder=f"{name}()")


def as_built(returned: Any, device: torch.device, *, builder: str = "build()") -> BuiltModel:
    """Check what a builder returned, and move it to the device."""
    if not isinstance(returned, tuple) or len(returned) not in (2, 3):
        what = f"{len(returned)} values" if isinstance(returned, tuple) else _kind(returned)
        _raise_contract(builder, f"returned {what}", CONTRACT)
    model, batch = returned[0], returned[-1]
    if not isinstance(model, nn.Module):
        _raise_contract(builder, f"returned {_kind(model)} as the model", CONTRACT)
    if not any(p.requires_grad for p in model.parameters()):
        _raise_contract(builder, "returned a model without trainable parameters", CONTRACT)
    if len(returned) == 3 and not callable(returned[1]):
        _raise_contract(builder, f"returned {_kind(returned[1])} as the loss function", CONTRACT)
    inputs, names = _inputs(builder, batch)
    loss_fn = returned[1] if len(returned) == 3 else model_loss(*names)
    return BuiltModel(
        model=model.to(device).train(),
        loss_fn=_checked(loss_fn, builder=builder),
        inputs=tuple(each.to(device) if isinstance(each, Tensor) else each for each in inputs),
    )


def _inputs(builder: str, batch: Any) -> tuple[Sequence[Any], Sequence[str]]:
    """Return the inputs in order, and their names if they have some."""
    match batch:
        case Tensor():
            return (batch,), ()
        case Mapping():
            inputs, names = tuple(batch.values()), tuple(batch)
        case list() | tuple():
            inputs, names = tuple(batch), ()
        case _:
            _raise_contract(builder, f"returned {_kind(batch)} as the batch", "Return tensors.")
    if not any(isinstance(each, Tensor) for each in inputs):
        _raise_contract(builder, "returned a batch without a tensor", "Return tensors.")
    return inputs, names


def _loss_in(result: Any) -> Any:
    """Return the loss in a model's output: `loss`, the first of several, or the output itself."""
    match result:
        case Mapping() if "loss" in result:
            return result["loss"]
        case list() | tuple() if result:
            return result[0]
        case _:
            return result


def _checked(loss_fn: Callable[..., Any], *, builder: str) -> Callable[..., Tensor]:
    """Return the loss function with checks of its result. Does not synchronise."""

    def checked(model: nn.Module, *inputs: Any) -> Tensor:
        loss = loss_fn(model, *inputs)
        if not isinstance(loss, Tensor):
            _raise_contract(builder, f"has a loss that is {_kind(loss)}", "Return a scalar tensor.")
        if loss.numel() != 1:
            shape = " × ".join(map(str, loss.shape))
            _raise_contract(builder, f"has a loss of {shape} numbers", "Return its mean.")
        if not loss.requires_grad:
            _raise_contract(builder, "has a loss without gradients", "Do not detach it.")
        return loss.reshape(())

    return checked


def _kind(value: Any) -> str:
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'aeiouAEIOU' else 'a'} {kind}"


def _raise_contract(builder: str, problem: str, fix: str) -> NoReturn:
    raise ConfigError(f"--mine: {builder} {problem}. {fix}")
