"""Keep what a fine-tuning does not train in fewer bits: a frozen base in e4m3, and back.

Layer by layer: the wide weight of one is let go before the next is made, so at no time is there
more memory in use than before.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.numerics import E4M3
from narrowcast.precision.plan.policy import HEADS, matches, suggestion
from narrowcast.precision.quantized_frozen import (
    LARGEST,
    Products,
    QuantizedFrozenLayer,
    keep_layer,
)
from narrowcast.precision.swap import is_swapped


@torch.no_grad()
def quantize_frozen(
    model: nn.Module,
    format: str = "e4m3",  # noqa: A002  # what policies call it
    *,
    skip: Sequence[str] = (),
    products: Products = "auto",
) -> dict[str, float]:
    """Keep the frozen weights of linear layers in e4m3, a byte each; return what each layer keeps.

    Call it before `prepare`, and after adapters are put on, if there are any. It takes every
    `nn.Linear` and every `Conv1D` of transformers whose weight has `requires_grad=False`, but no
    output layer (`lm_head`, `head`), none that shares its weight with another module, and nothing
    that a glob of `skip` names, or that is inside of that. Returned is the signal-to-noise ratio of
    each weight in dB, by the layer's name; of a model on the meta device, nothing.

    `products` says what they are multiplied in: `auto` as the policy says, `fp8` in fp8 wherever
    shapes allow, with inputs and gradients scaled by row, `wide` never in fp8.
    """
    if format != E4M3.name:
        raise ConfigError(
            f"quantize_frozen was asked for {format}; what it keeps weights in is e4m3. For 16 "
            "bits "
            "call model.to(torch.bfloat16)"
        )
    if products not in ("auto", "fp8", "wide"):
        raise ConfigError(f"products={products!r} is none of auto, fp8, wide; write one of them")
    if is_swapped(model):
        raise ConfigError(
            "quantize_frozen was called on a model that is prepared; call it before prepare(), or "
            "release() first"
        )
    _check_globs(model, skip)
    layers = dict(_candidates(model, skip))
    if not layers:
        raise ConfigError(
            "no linear layer of this model has a frozen weight to keep; freeze the base with "
            "requires_grad_(False), or put adapters on it, which does"
        )
    for name, layer in layers.items():  # before anything is changed
        _check_quantizable(name, layer.weight)
    results = {name: keep_layer(layer, products) for name, layer in layers.items()}
    return {name: snr_db for name, snr_db in results.items() if snr_db is not None}


@torch.no_grad()
def dequantize_frozen(model: nn.Module, dtype: torch.dtype | None = None) -> list[str]:
    """Give plain layers back, with wide weights; return their names.

    `dtype` is that of the weights; left out, each has the one it came in. bf16 and fp32 hold all
    that e4m3 kept; what that has lost stays lost.
    """
    if is_swapped(model):
        raise ConfigError(
            "dequantize_frozen was called on a model that is prepared; release() it first"
        )
    names = [name for name, each in model.named_modules() if isinstance(each, QuantizedFrozenLayer)]
    for name in names:
        layer = model.get_submodule(name)
        assert isinstance(layer, QuantizedFrozenLayer)
        layer.nc_widen(dtype)
    return names


def check_not_quantized(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse to train what is kept in e4m3, or to hold it as if it were."""
    held = {p for group in optimizer.param_groups for p in group["params"]}
    for name, module in model.named_modules():
        if isinstance(module, QuantizedFrozenLayer):
            weight = module.weight_e4m3
            if weight.requires_grad or weight in held:
                raise ConfigError(
                    f"the weight of {name} is kept in e4m3 and cannot be trained; give the "
                    "optimizer [p for p in model.parameters() if p.requires_grad], or call "
                    "dequantize_frozen(model) and make it anew"
                )


def _candidates(model: nn.Module, skip: Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers whose weight nobody trains and no other module has."""
    holders: dict[int, int] = {}
    for module in model.modules():
        for weight in module.parameters(recurse=False):
            holders[id(weight)] = holders.get(id(weight), 0) + 1
    for name, module in model.named_modules():
        if not _is_linear(module) or "forward" in module.__dict__:
            continue
        weight = module._parameters.get("weight")
        if weight is None:  # somebody computes it
            continue
        shared = holders[id(weight)] > 1
        head = not HEADS.isdisjoint(name.split("."))  # inside of an adapter, too
        if weight.requires_grad or shared or head or _is_skipped(name, skip):
            continue
        if weight.dtype in (torch.float32, torch.bfloat16, torch.float16):
            yield name, module


def _is_skipped(name: str, skip: Sequence[str]) -> bool:
    parts = name.split(".")
    around = [".".join(parts[: i + 1]) for i in range(len(parts))]
    return any(matches(each, glob) for each in around for glob in skip)


def _is_linear(module: nn.Module) -> bool:
    """Say whether a module does nothing but multiply by its weight; `Conv1D` is what GPT-2 has."""
    kind = type(module)
    gpt2 = kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"
    return kind is nn.Linear or gpt2


def _check_quantizable(name: str, weight: object) -> None:
    assert isinstance(weight, Tensor)
    if weight.is_meta or not weight.numel():
        return
    low, high = weight.aminmax()
    if not bool((low >= -LARGEST) & (high <= LARGEST)):  # nor is NaN
        raise UnsupportedError(
            f"the weight of {name} holds numbers that are not finite, or beyond {LARGEST:.2g}, "
            "which e4m3 cannot keep; look at where the model comes from, or leave the layer as it "
            f'is: skip=("{name}",)'
        )


def _check_globs(model: nn.Module, skip: Sequence[str]) -> None:
    names = [name for name, _ in model.named_modules()]
    for glob in skip:
        if not any(matches(name, glob) for name in names):
            raise ConfigError(f"skip: {glob!r} names no module{suggestion(glob, names)}")
