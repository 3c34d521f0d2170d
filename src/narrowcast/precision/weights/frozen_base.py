"""Store a frozen base in e4m3, and back, layer by layer so that the memory peak does not grow."""

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
    """Store the frozen weights of linear layers in e4m3, one byte per weight.

    Call it before `prepare`, and after adding adapters. It converts every `nn.Linear` and every
    transformers `Conv1D` with `requires_grad=False`, except output layers (`lm_head`, `head`) and
    layers that share their weight.

    Args:
        model: The model, changed in place.
        format: The storage format. Only "e4m3" is supported.
        skip: Globs of modules to leave out, with everything inside them.
        products: "auto" multiplies as the policy says. "fp8" uses fp8 wherever shapes allow, with
            row scales. "wide" never uses fp8.

    Returns:
        The signal-to-noise ratio of each weight in dB, by layer name. Empty on the meta device.

    Raises:
        ConfigError: No layer qualifies, an argument is invalid, or the model is prepared.

    Example:
        >>> model.requires_grad_(False)
        >>> model = get_peft_model(model, lora_config)
        >>> nc.quantize_frozen(model)
    """
    if format != E4M3.name:
        raise ConfigError(
            f"quantize_frozen only supports e4m3, got {format}. For 16 bits call "
            "model.to(torch.bfloat16)."
        )
    if products not in ("auto", "fp8", "wide"):
        raise ConfigError(f"products must be auto, fp8 or wide, got {products!r}.")
    if is_swapped(model):
        raise ConfigError(
            "quantize_frozen was called on a prepared model. Call it before prepare(), or call "
            "release() first."
        )
    _check_globs(model, skip)
    layers = dict(_candidates(model, skip))
    if not layers:
        raise ConfigError(
            "This model has no linear layer with a frozen weight to quantize. Freeze the base "
            "with requires_grad_(False), or add adapters, which does that."
        )
    for name, layer in layers.items():  # before anything is changed
        _check_quantizable(name, layer.weight)
    results = {name: keep_layer(layer, products) for name, layer in layers.items()}
    return {name: snr_db for name, snr_db in results.items() if snr_db is not None}


@torch.no_grad()
def dequantize_frozen(model: nn.Module, dtype: torch.dtype | None = None) -> list[str]:
    """Undo `quantize_frozen`: restore plain layers with 16- or 32-bit weights.

    The precision lost in e4m3 is not restored.

    Args:
        model: The model, changed in place.
        dtype: The dtype of the restored weights. None: the original dtype of each.

    Returns:
        The names of the restored layers.

    Raises:
        ConfigError: The model is prepared.
    """
    if is_swapped(model):
        raise ConfigError("dequantize_frozen was called on a prepared model. Call release() first.")
    names = [name for name, each in model.named_modules() if isinstance(each, QuantizedFrozenLayer)]
    for name in names:
        layer = model.get_submodule(name)
        assert isinstance(layer, QuantizedFrozenLayer)
        layer.nc_widen(dtype)
    return names


def _candidates(model: nn.Module, skip: Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers whose weight is frozen and not shared."""
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
    """Return whether a module only multiplies by its weight; `Conv1D` is what GPT-2 has."""
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
            f"The weight of {name} has values that e4m3 cannot store: inf, NaN, or above "
            f"{LARGEST:.2g}. Check where the model comes from, or leave the layer out: "
            f'skip=("{name}",).'
        )


def _check_globs(model: nn.Module, skip: Sequence[str]) -> None:
    names = [name for name, _ in model.named_modules()]
    for glob in skip:
        if not any(matches(name, glob) for name in names):
            raise ConfigError(f"skip: {glob!r} matches no module{suggestion(glob, names)}.")
