"""What is trained: a model, its loss, and one batch; and what somebody's own `build()` may return.

A builder of one's own returns `(model, loss_of, inputs)`, where `loss_of(model, *inputs)` is the
loss, or `(model, batch)`, where the model itself gives it: `model(**batch).loss`, as models of
transformers do.
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

from narrowcast.errors import RecipeError

CONTRACT = "return (model, loss_of, inputs), or (model, batch) where model(**batch) has a loss"


@dataclass(frozen=True, kw_only=True)
class Built:
    """A model on its device, in training mode, and the batch of every step."""

    model: nn.Module
    loss_of: Callable[..., Tensor]
    """From the model, or what it was compiled to, and the inputs: a scalar."""
    inputs: tuple[Any, ...]


def drawing(device: torch.device, *, seed: int = 1) -> torch.Generator:
    """Return what a batch on the device is drawn from; of shapes only nothing is drawn."""
    return torch.Generator("cpu" if device.type == "meta" else device).manual_seed(seed)


def own_loss(*names: str) -> Callable[..., Tensor]:
    """Return the loss of a model that takes inputs by these names and gives the loss itself."""

    def loss_of(model: nn.Module, *inputs: Any) -> Tensor:
        loss: Tensor = _loss_in(model(**dict(zip(names, inputs, strict=True))))
        return loss

    return loss_of


def place_of(text: str) -> tuple[str, str]:
    """Take apart `package.module:build`."""
    module, _, name = text.partition(":")
    if not module or not name.isidentifier() or module.endswith(".py"):
        raise RecipeError(
            f"--mine {text}: that is no place of a function; write package.module:build, e.g. "
            "zoo.mine:build for build() in zoo/mine.py"
        )
    return module, name


def build_mine(text: str, device: torch.device) -> Built:
    """Call somebody's own builder, and bring what it returns to the device."""
    module_name, name = place_of(text)
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # it is there, and what it imports is not
        raise RecipeError(
            f"--mine {text}: there is no module {error.name}, looked for in {here} and among what "
            "is installed; start where its package lies, or install it"
        ) from None
    build = vars(module).get(name)
    if not callable(build):
        known = [each for each, value in vars(module).items() if inspect.isfunction(value)]
        told = f"it has {', '.join(known)}" if known else "it has no functions"
        raise RecipeError(f"--mine {text}: {module_name} has no function {name}; {told}")
    return as_built(build(), device, who=f"{name}()")


def as_built(returned: Any, device: torch.device, *, who: str = "build()") -> Built:
    """Check what a builder returned, and bring it to the device."""
    if not isinstance(returned, tuple) or len(returned) not in (2, 3):
        what = f"{len(returned)} things" if isinstance(returned, tuple) else _kind(returned)
        _refuse(who, f"returned {what}", CONTRACT)
    model, batch = returned[0], returned[-1]
    if not isinstance(model, nn.Module):
        _refuse(who, f"returned {_kind(model)} in the place of the model", CONTRACT)
    if not any(p.requires_grad for p in model.parameters()):
        why = "has no parameters" if not list(model.parameters()) else "is frozen throughout"
        _refuse(who, f"returned a model that {why}: there is nothing to train", CONTRACT)
    if len(returned) == 3 and not callable(returned[1]):
        _refuse(who, f"returned {_kind(returned[1])} in the place of the loss", CONTRACT)
    inputs, names = _inputs(who, batch)
    loss_of = returned[1] if len(returned) == 3 else _of_model(names)
    return Built(
        model=model.to(device).train(),
        loss_of=_checked(loss_of, who=who),
        inputs=tuple(each.to(device) if isinstance(each, Tensor) else each for each in inputs),
    )


def _inputs(who: str, batch: Any) -> tuple[Sequence[Any], Sequence[str]]:
    """Return the inputs in order, and the names they are given by, if any."""
    match batch:
        case Tensor():
            return (batch,), ()
        case Mapping():
            inputs, names = tuple(batch.values()), tuple(batch)
        case list() | tuple():
            inputs, names = tuple(batch), ()
        case _:
            _refuse(who, f"returned {_kind(batch)} as its batch", "give tensors, by name or not")
    if not any(isinstance(each, Tensor) for each in inputs):
        _refuse(who, "returned a batch without a tensor", "give the tensors of one step")
    return inputs, names


def _of_model(names: Sequence[str]) -> Callable[..., Tensor]:
    if names:
        return own_loss(*names)
    return lambda model, *inputs: _loss_in(model(*inputs))


def _loss_in(result: Any) -> Any:
    """Return the loss of what a model gave: itself, under its name, or the first of several."""
    match result:
        case Mapping() if "loss" in result:
            return result["loss"]
        case list() | tuple() if result:
            return result[0]
        case _:
            return result


def _checked(loss_of: Callable[..., Any], *, who: str) -> Callable[..., Tensor]:
    """Refuse what nobody can take gradients of; asks nothing of the device."""

    def checked(model: nn.Module, *inputs: Any) -> Tensor:
        loss = loss_of(model, *inputs)
        if not isinstance(loss, Tensor):
            _refuse(who, f"has a loss that is {_kind(loss)}", "let it be a tensor with one number")
        if loss.numel() != 1:
            shape = " × ".join(map(str, loss.shape))
            _refuse(who, f"has a loss of {shape} numbers", "take its mean: it must be one number")
        if not loss.requires_grad:
            _refuse(who, "has a loss without gradients", "do not detach it, and no torch.no_grad()")
        return loss.reshape(())

    return checked


def _kind(value: Any) -> str:
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'aeiouAEIOU' else 'a'} {kind}"


def _refuse(who: str, what: str, instead: str) -> NoReturn:
    raise RecipeError(f"--mine: {who} {what}; {instead}")
