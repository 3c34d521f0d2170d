"""Masks: channels of a model silenced, kept alone, or made louder, and the model given back.

Every layer gets one factor for each channel, all ones, once; lesion, preserve and scale change
these numbers in place. So a compiled model sees every change without compiling again, twenty random
masks cost twenty copies of a few thousand numbers, and a model whose factors are ones computes what
it did before, to the last bit.
"""

import contextlib
import sys
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from narrowcast.errors import ConfigError
from narrowcast.workloads.sft.ica.arguments import check_channels, check_number, check_site
from narrowcast.workloads.sft.ica.blocks import Block, find_blocks
from narrowcast.workloads.sft.ica.networks import Channels, Site


@final
class Masks:
    """The factors of a model's channels, until `remove`.

    What is done adds up: a lesion and a scale are both in force until `clear`.
    """

    def __init__(self, model: nn.Module, *, site: Site = "mlp_output") -> None:
        check_site(site)
        blocks = find_blocks(model)
        self.site = site
        self.width, self.depth = blocks.width(site), blocks.depth
        self._gates = [_Gate(block, self.width, site) for block in blocks.blocks]
        # What was compiled before would go on as if nobody had come: torch does not look whether
        # hooks were added since.
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()

    def lesion(self, channels: Channels) -> Self:
        """Silence channels."""
        return self.scale(channels, 0.0)

    def preserve(self, channels: Channels) -> Self:
        """Silence all other channels; all of a layer that has none of these."""
        self._check_channels(channels)
        for layer, gate in enumerate(self._gates):
            stored = torch.zeros_like(gate.factor)
            stored[list(channels.get(layer, ()))] = 1
            gate.factor *= stored
        return self

    def scale(self, channels: Channels, factor: float) -> Self:
        """Multiply channels: above 1 they are amplified."""
        check_number("factor", factor, "a number")
        self._check_channels(channels)
        for layer, chosen in channels.items():
            self._gates[layer].factor[list(chosen)] *= factor
        return self

    def clear(self) -> Self:
        """Let every channel be as it is."""
        for gate in self._gates:
            gate.factor.fill_(1)
        return self

    def factors(self) -> Tensor:
        """Return a copy of what is in force, (layers, channels)."""
        return torch.stack([gate.factor.cpu() for gate in self._gates])

    def remove(self) -> None:
        """Take the factors out of the model."""
        # Ones first: whatever was compiled with them goes on using them.
        self.clear()
        for gate in self._gates:
            gate.handle.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
def lesioned(
    model: nn.Module, channels: Channels, *, site: Site = "mlp_output"
) -> Iterator[nn.Module]:
    """Silence channels of a model inside the block."""
    with Masks(model, site=site) as masks:
        masks.lesion(channels)
        yield model


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


class _Gate:
    """The factors of one layer, on their way into the model."""

    def __init__(self, block: Block, width: int, site: Site) -> None:
        weight = next(block.down.module.parameters())
        # Not of the weight's dtype: those of quantised weights are no numbers.
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
    """Return as many channels of each layer, drawn by chance."""
    return {
        layer: tuple(sorted(torch.randperm(width, generator=generator)[: len(chosen)].tolist()))
        for layer, chosen in channels.items()
    }
