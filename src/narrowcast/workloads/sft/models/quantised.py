"""A frozen base in 8 or 4 bits: in e4m3 by the engine, or in int8, nf4 and fp4 by bitsandbytes.

All of them are for adapters: weights that are trained have no place in so few bits.
"""

import importlib
import importlib.util
from typing import Any

import torch

from narrowcast.config.problems import shortened
from narrowcast.errors import UnsupportedError
from narrowcast.precision.quantized_frozen import Products
from narrowcast.precision.weights.frozen_base import dequantize_frozen, quantize_frozen

BITSANDBYTES = ("int8", "nf4", "fp4")
"""Those that bitsandbytes keeps."""


def loading_options(base: str, *, device: torch.device, compute: torch.dtype) -> dict[str, Any]:
    """Return what `from_pretrained` is told of the base; nothing but for bitsandbytes.

    `compute` is what 4-bit weights are widened to for their products: the policy's format, and fp32
    where that is emulated.
    """
    if base not in BITSANDBYTES:
        return {}
    _check_bitsandbytes(base, device)
    from transformers import BitsAndBytesConfig

    make: Any = BitsAndBytesConfig  # has no types in transformers
    if base == "int8":
        made = make(load_in_8bit=True)
    else:
        made = make(
            load_in_4bit=True,
            bnb_4bit_quant_type=base,
            bnb_4bit_use_double_quant=True,  # of the scales too: 0.4 bits a weight less
            bnb_4bit_compute_dtype=compute,
        )
    # bitsandbytes quantises as it loads, on the device it will compute on.
    return {"quantization_config": made, "device_map": {"": str(device)}}


def keep_base(model: Any, *, products: Products = "auto") -> dict[str, float]:
    """Keep the frozen weights of a model with adapters in e4m3; return what each layer keeps."""
    return quantize_frozen(model, "e4m3", products=products)


def dequantized_base(model: Any, base: str) -> Any:
    """Return a plain base with the weights that adapters were trained beside, to merge them into.

    What e4m3 keeps is given back in the dtype the model is in; fp32 and bf16 hold all of it.
    """
    if base == "e4m3":
        model.requires_grad_(False)
        quantize_frozen(model, base)
        dequantize_frozen(model)
    return model


def check_mergeable(model: Any) -> None:
    """Refuse to merge adapters into weights of bitsandbytes, which would round the sum to them."""
    kinds = {type(module).__name__ for module in model.modules()}
    matches = sorted(kinds & {"Linear8bitLt", "Linear4bit"})
    if matches:
        raise UnsupportedError(
            "Adapters cannot be merged into a base quantized by bitsandbytes "
            f"({', '.join(matches)}): the merged weights would be quantized again. Keep the "
            "adapter (lora.merge_adapter_with_base=false), or load the base in 16 bits "
            "(model.base_dtype=bf16) and merge into that."
        )


def _check_bitsandbytes(base: str, device: torch.device) -> None:
    instead = "write model.base_dtype=e4m3, which runs anywhere in 8 bits, or model.base_dtype=bf16"
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UnsupportedError(
            f"model.base_dtype={base} needs bitsandbytes, which is not installed. Run pip install "
            f"bitsandbytes, or {instead}."
        )
    try:
        result: Any = importlib.import_module("bitsandbytes")
    except (ImportError, OSError, RuntimeError) as error:
        raise UnsupportedError(
            f"model.base_dtype={base} needs bitsandbytes, which cannot be imported: "
            f"{shortened(str(error), 200)}. Install a build for this machine, or {instead}."
        ) from error
    if device.type not in {"meta", *getattr(result, "supported_torch_devices", ("cuda",))}:
        raise UnsupportedError(
            f"model.base_dtype={base} is not supported by bitsandbytes on {device.type}. Instead, "
            f"{instead}."
        )
