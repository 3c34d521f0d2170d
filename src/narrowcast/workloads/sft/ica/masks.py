"""Masks: silence, keep or scale channels of a model by factors changed in place."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, Self, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from narrowcast.errors import ConfigError
from narrowcast.workloads.sft.ica.blocks import Block, find_blocks
from narrowcast.workloads.sft.ica.networks import (
    Channels,
    Site,
    check_channels,
    check_number,
    check_site,
)


@final
class Masks:
    """Factors of a model's channels, until `remove`; changes accumulate until `clear`."""

    def __init__(self, model: nn.Module, *, site: Site = "mlp_output") -> None:
        check_site(site)
        blocks = find_blocks(model)
        self.site = site
        self.width, self.depth = blocks.width(site), blocks.depth
        self._gates = [_Gate(block, self.width, site) for block in blocks.blocks]
        # torch does not notice hooks that are added after compilation.
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()

    def lesion(self, channels: Channels) -> Self:
        """Silence channels."""
        return self.scale(channels, 0.0)

    def preserve(self, channels: Channels) -> Self:
        """Silence all other channels, in every layer."""
        self._check_channels(channels)
        for layer, gate in enumerate(self._gates):
            stored = torch.zeros_like(gate.factor)
            stored[list(channels.get(layer, ()))] = 1
            gate.factor *= stored
        return self

    def scale(self, channels: Channels, factor: float) -> Self:
        """Multiply channels by a factor."""
        check_number("factor", factor, "a number")
        self._check_channels(channels)
        for layer, chosen in channels.items():
            self._gates[layer].factor[list(chosen)] *= factor
        return self

    def clear(self) -> Self:
        """Reset all factors to 1."""
        for gate in self._gates:
            gate.factor.fill_(1)
        return self

    def factors(self) -> Tensor:
        """Return a copy of the factors, (layers, channels)."""
        return torch.stack([gate.factor.cpu() for gate in self._gates])

    def remove(self) -> None:
        """Remove the masks from the model."""
        # First reset to 1: compiled code goes on using the factors.
        self.clear()
        for gate in self._gates:
            gate.handle.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.remove()

    def _check_channels(self, channels: Channels) -> None:
        check_channels(channels)
        for layer, chosen in channels.items():
            outside = [c for c in chosen if not 0 <= c < self.width]
            if not 0 <= layer < self.depth or outside:
                what = f"channel {outside[0]} of layer {layer}" if outside else f"layer {layer}"
                raise ConfigError(
                    f"The networks were made for another model: {what} is outside this model's "
                    f"{self.depth} layers of {self.width} {self.site} channels. Build networks for "
                    "this model."
                )


@contextlib.contextmanager
def preserved(
    model: nn.Module, channels: Channels, *, site: Site = "mlp_output"
) -> Iterator[nn.Module]:
    """Silence all other channels of a model inside the block."""
    with Masks(model, site=site) as masks:
        masks.preserve(channels)
        yield model


@contextlib.contextmanager
def scaled(
    model: nn.Module, channels: Channels, factor: float, *, site: Site = "mlp_output"
) -> Iterator[nn.Module]:
    """Multiply channels of a model inside the block."""
    with Masks(model, site=site) as masks:
        masks.scale(channels, factor)
        yield model


def lesioned(
    model: nn.Module, channels: Channels, *, site: Site = "mlp_output"
) -> contextlib.AbstractContextManager[nn.Module]:
    """Silence channels of a model inside the block."""
    return scaled(model, channels, 0.0, site=site)


class _Gate:
    """Factors of one layer."""

    def __init__(self, block: Block, width: int, site: Site) -> None:
        weight = next(block.down.module.parameters())
        # Not in the weight's dtype, which is an integer type for quantized weights.
        self.factor = torch.ones(width, device=weight.device)
        self.handle: RemovableHandle
        if site == "mlp_output":
            self.handle = block.output.register_forward_hook(self._after)
        else:
            self.handle = block.down.module.register_forward_pre_hook(self._before)

    def _after(self, _module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        return output * self.factor.to(output.device, output.dtype)

    def _before(self, _module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        first, *rest = args
        return (first * self.factor.to(first.device, first.dtype), *rest)


def random_like(
    channels: Channels, width: int, *, generator: torch.Generator
) -> dict[int, tuple[int, ...]]:
    """Return as many random channels per layer."""
    return {
        layer: tuple(sorted(torch.randperm(width, generator=generator)[: len(chosen)].tolist()))
        for layer, chosen in channels.items()
    }
