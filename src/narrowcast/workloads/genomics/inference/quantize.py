"""Weights of a finished network in 8 bits, and how far its predictions are from fp32."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from narrowcast.errors import UnsupportedError
from narrowcast.workloads.genomics.data.rows import Row
from narrowcast.workloads.genomics.targets import OneClass

if TYPE_CHECKING:
    from narrowcast.workloads.genomics.inference.finished import Finished

WeightsFormat: TypeAlias = Literal["full", "int8", "e4m3"]
LARGEST = {"int8": 127.0, "e4m3": 448.0}
"""What the largest weight of a row is stored as."""
QUANTIZED = (nn.Linear, nn.Conv1d, nn.Embedding)
"""Layers whose weight is stored in 8 bits; the output layer is not."""


@final
class StoredRows(nn.Module):
    """A parametrization that stores a weight in 8 bits, with an fp32 scale per row."""

    def __init__(self, weights_format: Literal["int8", "e4m3"]) -> None:
        super().__init__()
        self.weights_format = weights_format

    def forward(self, codes: Tensor, scale: Tensor) -> Tensor:
        """Return the weight in fp32."""
        return codes.to(scale.dtype) * scale

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes and scales of a weight, rounded to nearest even."""
        largest = weight.abs().amax(tuple(range(1, weight.dim())), keepdim=True).float()
        most = LARGEST[self.weights_format]
        scale = (largest / most).clamp_min(torch.finfo(torch.float32).tiny)
        codes = (weight / scale).clamp(-most, most)
        if self.weights_format == "int8":
            return codes.round().to(torch.int8), scale
        return codes.to(torch.float8_e4m3fn), scale


@torch.no_grad()
def quantize_weights(network: nn.Module, weights_format: Literal["int8", "e4m3"]) -> int:
    """Store the weights of layers in 8 bits, in place; return of how many layers."""
    network.requires_grad_(False)
    layers = [
        module
        for name, module in network.named_modules()
        if type(module) in QUANTIZED and name != "head.out"
    ]
    for layer in layers:
        parametrize.register_parametrization(
            layer, "weight", StoredRows(weights_format), unsafe=True
        )
    if not layers:
        raise UnsupportedError(
            "This network has no linear layer, convolution or embedding below its output layer. "
            "Leave --weights out."
        )
    return len(layers)


def weight_bytes(network: nn.Module) -> int:
    """Return the bytes of all parameters and buffers."""
    tensors = [*network.parameters(), *network.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def quantization_note(run: "Finished", reference: "Finished", rows: Sequence[Row]) -> str:
    """Return how a quantized run differs from `reference` on some rows, as a sentence."""
    one, two = (each.answers(rows)[0].double() for each in (reference, run))
    error = (two - one).square().mean().sqrt().item()
    size = one.square().mean().sqrt().item()
    before, after = (weight_bytes(each.network) / 2**20 for each in (reference, run))
    changed = ""
    if isinstance(run.target, OneClass):
        count = int((one.argmax(-1) != two.argmax(-1)).sum())
        changed = f", and {count} of {len(rows)} predicted classes differ"
    return (
        f"weights of {run.quantized} layers in {run.weights_format}: {after:.2f} MiB instead of "
        f"{before:.2f}; outputs on the first {len(rows)} records differ from fp32 by {error:.2g} "
        f"(root mean square; the outputs: {size:.2g}){changed}"
    )
