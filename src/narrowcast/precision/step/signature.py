"""What a captured step takes for granted: how its inputs are built, and what the model is."""

import traceback
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.kernels.launch import PLAIN as PLAIN_TENSORS
from narrowcast.precision.memory.checkpointing import Recomputed
from narrowcast.precision.nested import leaves
from narrowcast.precision.step.engine import Engine

PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), type),
    *(torch.dtype, torch.device, torch.Size, torch.memory_format),
)
"""Types of what may stand beside tensors: none can change and stay the same object."""
# Mapped over all weights and modules in every step.
_REQUIRES_GRAD, _TRAINING = attrgetter("requires_grad"), attrgetter("training")

Form = tuple[tuple[str, Any, str], ...]
"""What is no tensor among inputs: what it is called, its type, and itself in words."""


@final
@dataclass(frozen=True)
class Inputs:
    """The arguments of a step."""

    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    signature: Any
    """All that a capture is for: only the values of tensors may be others."""
    form: Form

    def changed_since(self, other: Form) -> str:
        """Say which of the numbers is another than it was there."""
        before = {name: (kind, text) for name, kind, text in other}
        for name, kind, text in self.form:
            if before.get(name) != (kind, text):
                return f"the input {name} ({text})"
        return "the number of inputs"


def parse_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
    """Take in the arguments of a step; refuse those whose tensors nobody would find.

    Numbers and words count by type and to the last digit: 1 is not True, 0.0 not -0.0.
    """
    tensors: list[Any] = []
    form: list[tuple[str, Any, str]] = []
    named = [*((f"input {i}", each) for i, each in enumerate(args)), *kwargs.items()]
    for name, value in (leaf for outer, each in named for leaf in leaves(each, outer)):
        if isinstance(value, Tensor):
            _check_no_graph(value, name)
            tensors.append((name, value.shape, value.dtype))
        elif isinstance(value, PLAIN):
            form.append((name, type(value), repr(value)))
        else:
            raise ConfigError(
                "graphed(): inputs must be tensors, numbers and strings, alone or in tuples, "
                f"lists and dicts, got {type(value).__name__} for {name}. Capture other objects "
                "in the function itself."
            )
    return Inputs((args, kwargs), (tuple(tensors), tuple(form)), tuple(form))


def _check_no_graph(tensor: Tensor, name: str) -> None:
    if tensor.requires_grad:
        raise UnsupportedError(
            f"graphed(): inputs must not require grad, got {name}, because a replayed step does "
            "not pass its gradient on. Detach it, and compute what has weights inside the "
            "function."
        )


@final
class CaptureTerms:
    """A prepared model as it was when steps of it began to be captured."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._plan = engine, engine.plan
        self._modules = list(engine.model.modules())
        self._parameters = list(dict.fromkeys([*engine.model.parameters(), *engine.weights.all]))
        # Where those of other kinds lie, they know themselves.
        self._plain = [p for p in self._parameters if type(p) in PLAIN_TENSORS]
        homes = [(n, m, key) for n, m in engine.model.named_modules() for key in m._buffers]
        self._holders, self._keys = [m._buffers for _, m, _ in homes], [key for *_, key in homes]
        self._names = [f"{name}.{key}".lstrip(".") for name, _, key in homes]
        self._then = self._now()
        # Whether the update knows its tensors is asked once it has met them.
        self._fused = engine.weights.fused
        self._met = False

    def hold(self) -> bool:
        """Say whether nothing has changed that a replay would not know of.

        Formats, modes, what is trained, and where weights and moments lie.
        """
        if self._engine.plan is not self._plan or self._engine.weights.fused is not self._fused:
            return False
        if self._fused is not None:
            bound = self._fused.is_bound
            if self._met and not bound:
                return False
            self._met = bound
        return self._then == self._now()

    def buffers(self) -> list[int]:
        """Return which tensors the buffers are now, as numbers."""
        return list(map(id, map(dict.get, self._holders, self._keys)))

    def changed_by_passes(self, buffers: list[int]) -> str:
        """Say what passes do that no graph can, given what the buffers were before."""
        if any(isinstance(module, Recomputed) and module.nc_draws for module in self._modules):
            return (
                "blocks recomputed by memory.activation_checkpointing use random numbers "
                "(dropout), which a graph cannot reproduce"
            )
        pairs = zip(self._names, self.buffers(), buffers, strict=True)
        name = next((name for name, now, then in pairs if now != then), "")
        return name and (
            f"the forward pass replaces the buffer {name}, but a graph keeps reading the old "
            f"tensor (write self.{name.rpartition('.')[2]}.copy_(…))"
        )

    def _now(self) -> tuple[list[Any], ...]:
        return (
            list(map(_TRAINING, self._modules)),
            list(map(_REQUIRES_GRAD, self._parameters)),
            list(map(Tensor.data_ptr, self._plain)),
        )


def synchronizing_line(error: BaseException) -> str:
    """Return the line of somebody's own code that waited for the device, with where it is."""
    ours = str(Path(__file__).parents[2])
    theirs = str(Path(torch.__file__).parent)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((ours, theirs))]
    result = (own or list(frames))[-1]
    return f"{Path(result.filename).name}:{result.lineno} ({result.line})"
