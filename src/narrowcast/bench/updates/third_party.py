"""AdamW of other libraries over bf16 weights: Kahan sums, stochastic rounding, 8-bit moments."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from narrowcast.bench.measure.timing import Trial
from narrowcast.bench.updates.weights import Weights, trial_of

GRADIENT_AND_WEIGHT = 2 + 2 + 2 * 2
"""bf16 gradient for the norm and again for the update; bf16 weight there and back."""
EIGHT_BITS = 2 * 2 * 1
"""Two moments of a byte, there and back; their scales are a hundredth of it."""
SIXTEEN_BITS = 2 * 2 * 2

BYTES: Mapping[str, float] = {
    "optimi": GRADIENT_AND_WEIGHT + 2 * 2 + SIXTEEN_BITS,  # and a compensation
    "bitsandbytes-8bit": GRADIENT_AND_WEIGHT + EIGHT_BITS,
    "torchao-8bit": GRADIENT_AND_WEIGHT + EIGHT_BITS,
    "torchao-fp8": GRADIENT_AND_WEIGHT + EIGHT_BITS,
    "torchao-stochastic": GRADIENT_AND_WEIGHT + SIXTEEN_BITS,
}


def build(weights: Weights, *, which: str) -> Trial:
    """Return the update of one library's AdamW over bf16 weights, clipped by torch."""
    weights.narrow(torch.bfloat16)
    parameters = weights.parameters
    optimizer = _optimizer(which)(parameters, **weights.settings())
    largest = weights.recipe.clip_norm

    def update() -> None:
        if largest is not None:
            torch.nn.utils.clip_grad_norm_(parameters, largest)
        optimizer.step()

    return trial_of(weights, update, bytes_per_parameter=BYTES[which])


def _optimizer(which: str) -> Callable[..., Any]:
    """Return what makes the optimizer from parameters and settings."""
    match which:
        case "optimi":
            optimi: Any = importlib.import_module("optimi")
            # The Triton kernel is the default wherever there is a GPU.
            return lambda params, **given: optimi.AdamW(params, kahan_sum=True, **given)
        case "bitsandbytes-8bit":
            library: Any = importlib.import_module("bitsandbytes")
            return library.optim.AdamW8bit  # type: ignore[no-any-return]
        case _:
            torchao: Any = importlib.import_module("torchao.optim")
            kind = {"torchao-8bit": "AdamW8bit", "torchao-fp8": "AdamWFp8"}.get(which, "_AdamW")
            made = getattr(torchao, kind)
            return lambda params, **given: made(params, bf16_stochastic_round=True, **given)
