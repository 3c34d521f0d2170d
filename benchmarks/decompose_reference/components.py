"""The target with components: hooks that replace what chosen modules return, for one call each."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Mask:
    """What is done to one module in a call."""

    components: Tensor
    """m, (…, C)."""
    delta: tuple[Tensor, Tensor] | None = None
    """W - (VU)^T and its mask (…)."""
    routed: Tensor | None = None
    """Where components are used, (…); elsewhere the module is as it was."""


class Components(nn.Module):
    """V (d_in, C) and U (C, d_out) of one linear layer, and its bias."""

    def __init__(self, linear: nn.Linear, components: int) -> None:
        super().__init__()
        d_out, d_in = linear.weight.shape
        self.V = nn.Parameter(torch.randn(d_in, components) / d_in**0.5)
        self.U = nn.Parameter(torch.randn(components, d_out) / components**0.5)
        bias = None if linear.bias is None else linear.bias.detach().clone()
        self.register_buffer("bias", bias)

    @property
    def weight(self) -> Tensor:
        """(d_out, d_in), as the layer's."""
        return torch.einsum("ic,co->oi", self.V, self.U)

    def inner(self, x: Tensor) -> Tensor:
        """The activations of components, (…, C)."""
        return torch.einsum("...i,ic->...c", x, self.V)

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        y = torch.einsum("...c,co->...o", self.inner(x) * mask.components, self.U)
        if mask.delta is not None:
            delta, delta_mask = mask.delta
            y = y + delta_mask[..., None] * torch.einsum("...i,oi->...o", x, delta)
        return y if self.bias is None else y + self.bias


class ComponentModel(nn.Module):
    """A frozen target, and components for those of its linear layers that patterns name."""

    def __init__(
        self,
        target: nn.Module,
        patterns: Mapping[str, int],
        *,
        output: Callable[[Any], Tensor] = lambda found: found,
    ) -> None:
        super().__init__()
        self.target, self.output = target.requires_grad_(False), output
        found = {
            name: (module, size)
            for name, module in target.named_modules()
            for pattern, size in patterns.items()
            if fnmatch(name, pattern)
        }
        self.names = list(found)
        self._modules_by_name = {name: module for name, (module, _) in found.items()}
        # ModuleDict allows no dots in its keys.
        self.by_key = nn.ModuleDict(
            {_key(n): Components(m, size) for n, (m, size) in found.items()}
        )

    def components(self, name: str) -> Components:
        """Return those of one module."""
        return self.by_key[_key(name)]

    def tie(self, one: str, two: str) -> None:
        """Let two transposed layers share their components: memory, not parameters."""
        first, second = self.components(one), self.components(two)
        second.V.data, second.U.data = first.U.data.T, first.V.data.T

    def deltas(self) -> dict[str, Tensor]:
        """Return W - (VU)^T of each module; called outside autocast."""
        return {n: self._modules_by_name[n].weight - self.components(n).weight for n in self.names}

    def forward(self, batch: Tensor, masks: Mapping[str, Mask] | None = None) -> Tensor:
        """Run the target, with components where there are masks."""
        hooks = {name: partial(self._replace, name, mask) for name, mask in (masks or {}).items()}
        with self._hooked(hooks):
            return self.output(self.target(batch))

    def with_inputs(self, batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Run the target as it is; return what comes of it, and the input of each module."""
        inputs: dict[str, Tensor] = {}

        def keep(name: str, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            inputs[name] = args[0]

        with self._hooked({name: partial(keep, name) for name in self.names}):
            return self.output(self.target(batch)), inputs

    def _replace(
        self, name: str, mask: Mask, module: nn.Module, args: tuple[Tensor, ...], output: Tensor
    ) -> Tensor:
        found = self.components(name)(args[0], mask)
        return found if mask.routed is None else torch.where(mask.routed[..., None], found, output)

    @contextmanager
    def _hooked(self, hooks: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
        handles = [
            self._modules_by_name[name].register_forward_hook(hook) for name, hook in hooks.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _key(name: str) -> str:
    return name.replace(".", "-")
