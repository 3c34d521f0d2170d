"""The module that takes the place of one of the target's, and the pass it takes part in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowcast.errors import ConfigError
from narrowcast.workloads.decompose.components.masked import (
    SiteMask,
    activations,
    looked_up,
    masked_embedding,
    masked_output,
    product,
)
from narrowcast.workloads.decompose.components.sites import IDENTITY, Kind, site_kind

Cache = Literal["none", "inputs", "acts"]
"""What a pass keeps of each site: nothing, its inputs, or the activations of its components."""


@dataclass
class Pass:
    """One call of the target: what its sites are to do, and what they were given."""

    masks: Sequence[SiteMask | None]
    components: Sequence[tuple[Tensor, Tensor]]
    """V and U of each site."""
    cache: Cache
    seed: Tensor | None
    """Of all draws in the pass, on the device; None where torch draws them."""
    visited: set[int] = field(default_factory=set)
    inputs: dict[int, Tensor] = field(default_factory=dict)
    acts: dict[int, Tensor] = field(default_factory=dict)


@dataclass
class Line:
    """Where modules learn which pass they are in; in none, they compute as the target's."""

    current: Pass | None = None


class ComponentModule(nn.Module):
    """A frozen matrix of the target, computed by components if the pass has a mask for it."""

    def __init__(
        self, name: str, kind: Kind, weight: Tensor, bias: Tensor | None, *, seeds: int, line: Line
    ) -> None:
        super().__init__()
        self.name, self.kind, self.seeds = name, kind, seeds
        self.index: int | None = None
        self._line = line
        if isinstance(weight, nn.Parameter):
            self.weight = weight
        else:
            self.register_buffer("weight", weight, persistent=False)
        self.bias = bias
        self.register_module(IDENTITY, None)

    @classmethod
    def of(cls, name: str, module: nn.Module, *, seeds: int, line: Line) -> "ComponentModule":
        """Return the replacement of a module."""
        weight = module._parameters["weight"]
        assert weight is not None
        if weight.dim() == 3 and weight.shape[0] != seeds:
            raise ConfigError(
                f"seeds must be {weight.shape[0]} like the weights of {name}, got {seeds}."
            )
        bias = module._parameters.get("bias")
        return cls(name, site_kind(name, module), weight, bias, seeds=seeds, line=line)

    @classmethod
    def identity(
        cls, name: str, width: int, like: Tensor, *, seeds: int, line: Line
    ) -> "ComponentModule":
        """Return an identity that can be decomposed."""
        weight = torch.eye(width, device=like.device, dtype=like.dtype)
        return cls(name, "identity", weight, None, seeds=seeds, line=line)

    @property
    def weight_t(self) -> Tensor:
        """The matrix as (seeds or 1, d_in, d_out), whichever way the module stores it."""
        weight = self.weight.mT if self.kind == "linear" else self.weight
        return weight if weight.dim() == 3 else weight.unsqueeze(0)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        x = _only_input(self.name, args, kwargs)
        before = self._modules[IDENTITY]
        if before is not None:
            x = before(x)
        current = self._line.current
        if current is None or self.index is None:
            return self._plain(x)
        rows = self._rows(x)
        V, U = current.components[self.index]
        self._keep(current, rows, V)
        mask = current.masks[self.index]
        if mask is None:
            return self._plain(x)
        _check_rows(self.name, mask, (*rows.shape[:2], V.shape[-1]))
        if self.kind == "embedding":
            out = masked_embedding(rows, V, U, self.weight, mask)
            return out.reshape(*x.shape, out.shape[-1])
        out = masked_output(
            rows, V, U, self.weight_t, self._biases(), mask, seed=current.seed, stream=self.index
        )
        return out.reshape(*x.shape[:-1], out.shape[-1])

    def _keep(self, current: Pass, rows: Tensor, V: Tensor) -> None:
        assert self.index is not None
        if self.index in current.visited:
            raise ConfigError(
                f"The target calls {self.name} more than once per forward pass, but a mask is for "
                "one call. Choose other sites."
            )
        current.visited.add(self.index)
        if current.cache == "inputs":
            current.inputs[self.index] = rows
        if current.cache == "acts":
            table = self.kind == "embedding"
            current.acts[self.index] = looked_up(V, rows) if table else activations(rows, V)

    def _rows(self, x: Tensor) -> Tensor:
        """Return `x` as (seeds, rows, ...)."""
        width = () if self.kind == "embedding" else (x.shape[-1],)
        if self.seeds == 1:
            return x.reshape(1, -1, *width)
        if x.dim() < 2 or x.shape[0] != self.seeds:
            raise ConfigError(
                f"The first dimension of the input of {self.name} must be {self.seeds} seeds, got "
                f"{tuple(x.shape)}. Pass the batches of all seeds stacked."
            )
        return x.reshape(self.seeds, -1, *width)

    def _biases(self) -> Tensor | None:
        if self.bias is None or self.bias.dim() == 2:
            return self.bias
        return self.bias.unsqueeze(0)

    def _plain(self, x: Tensor) -> Tensor:
        if self.kind == "identity":
            return x
        if self.kind == "embedding":
            return F.embedding(x, self.weight)
        if self.kind == "conv1d":
            assert self.bias is not None
            out = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
        elif self.weight.dim() == 2:
            return F.linear(x, self.weight, self.bias)
        else:
            out = product(self._rows(x), self.weight.mT)
            out = out if self.bias is None else out + self.bias.unsqueeze(1)
        return out.reshape(*x.shape[:-1], out.shape[-1])


def _only_input(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    settings = [*args, *kwargs.values()]
    if len(settings) != 1 or not isinstance(settings[0], Tensor):
        raise ConfigError(
            f"The target calls {name} with {len(settings)} arguments, but a site takes one tensor. "
            "Choose other sites."
        )
    return settings[0]


def _check_rows(name: str, mask: SiteMask, expected: tuple[int, int, int]) -> None:
    if mask.importance.shape != expected:
        raise ConfigError(
            f"The mask of {name} must have shape {expected} (seeds, rows, components), got "
            f"{tuple(mask.importance.shape)}. Make masks from a pass over the same batch."
        )
