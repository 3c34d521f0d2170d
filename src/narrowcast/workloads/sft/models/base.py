"""The model of a recipe before training, quantized before it moves to its device."""

import importlib
import importlib.util
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from narrowcast.config.problems import shortened
from narrowcast.config.sections import Recipe
from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.hardware import detect_hardware
from narrowcast.numerics import plain_format
from narrowcast.precision.quantized_frozen import store_blocks
from narrowcast.precision.weights.frozen_base import dequantize_frozen, quantize_frozen
from narrowcast.workloads.sft.attention import separate_conversations
from narrowcast.workloads.sft.data.settings import SftData
from narrowcast.workloads.sft.ica.settings import IcaSection
from narrowcast.workloads.sft.models.loading import (
    block_scaled_weights,
    empty_blocks,
    is_block_scaled,
    load_config,
    load_model,
)
from narrowcast.workloads.sft.settings import LoraSection, SftModel

BITSANDBYTES = ("int8", "nf4", "fp4")
"""Formats of bitsandbytes."""


def loading_options(base: str, *, device: torch.device, compute: torch.dtype) -> dict[str, Any]:
    """Return the options of `from_pretrained` for bitsandbytes; `compute` is the matmul dtype."""
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
            bnb_4bit_use_double_quant=True,  # also quantizes the scales: 0.4 bits per weight less
            bnb_4bit_compute_dtype=compute,
        )
    # bitsandbytes quantizes while loading, on the compute device.
    return {"quantization_config": made, "device_map": {"": str(device)}}


def dequantized_base(model: Any, base: str) -> Any:
    """Return the base with the quantized values as plain weights, for merging."""
    if base == "e4m3":
        model.requires_grad_(False)
        quantize_frozen(model, base)
        dequantize_frozen(model)
    return model


def check_mergeable(model: Any) -> None:
    """Raise for weights of bitsandbytes, which would quantize the sum again."""
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


def add_adapters(model: Any, settings: LoraSection, *, seed: int) -> Any:
    """Freeze a model and add LoRA adapters to its linear layers."""
    import peft

    targets = _targets(model, settings)
    if settings.merge_adapter_with_base:
        _check_not_tied(model, targets)
    config: Any = peft.LoraConfig(
        r=settings.lora_r,
        lora_alpha=settings.lora_alpha,  # type: ignore[arg-type]  # it divides
        lora_dropout=settings.lora_dropout,
        target_modules=list(targets),
        bias=settings.lora_bias,
        use_rslora=settings.use_rslora,
        use_dora=settings.use_dora,
        fan_in_fan_out=_are_turned(model, targets),
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        try:
            adapted = peft.get_peft_model(model, config)
        except ValueError as error:
            raise UnsupportedError(
                f"peft cannot add adapters to {', '.join(targets)}: {shortened(str(error), 300)}. "
                "Write other layers in lora.lora_target_modules."
            ) from error
    return adapted.train()


def add_embedding_noise(model: Any, alpha: float) -> None:
    """Add uniform noise to token embeddings in training (NEFTune, arXiv 2310.05914)."""

    def noisy(module: nn.Module, _: Any, output: torch.Tensor) -> torch.Tensor:
        if not module.training:
            return output
        most = alpha / math.sqrt(output.shape[1] * output.shape[2])
        return output + torch.empty_like(output).uniform_(-most, most)

    model.get_input_embeddings().register_forward_hook(noisy)


def _check_not_tied(model: Any, targets: Sequence[str]) -> None:
    """Raise if merging would change a weight shared with another module."""
    holders: dict[int, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        holders.setdefault(id(weight), []).append(name.rpartition(".")[0])
    for names in holders.values():
        tied = [name for name in names if name.rpartition(".")[2] in targets]
        if tied and len(names) > 1:
            others = ", ".join(name for name in names if name != tied[0])
            raise ConfigError(
                f"lora.merge_adapter_with_base=true would also change {others}, whose weight is "
                f"tied to {tied[0]}. Remove {tied[0].rpartition('.')[2]} from "
                "lora.lora_target_modules, or write lora.merge_adapter_with_base=false."
            )


def adapted(model: Any) -> tuple[str, ...]:
    """Return the last names of the layers with adapters."""
    result = model.targeted_module_names
    return tuple(dict.fromkeys(name.rpartition(".")[2] for name in result))


def _are_turned(model: Any, targets: Sequence[str]) -> bool:
    """Return whether target layers are Conv1D, as in GPT-2."""
    from transformers.pytorch_utils import Conv1D

    named = model.named_modules()
    return any(isinstance(m, Conv1D) and n.rpartition(".")[2] in targets for n, m in named)


def _linear_names(model: Any) -> tuple[str, ...]:
    """Return the last names of linear layers except the head."""
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    names = [
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    ]
    return tuple(dict.fromkeys(names))


def _targets(model: Any, settings: LoraSection) -> tuple[str, ...]:
    """Return the names of layers that get adapters, or raise if one does not exist."""
    known = _linear_names(model)
    if not settings.targets:
        if not known:
            raise UnsupportedError(
                f"{type(model).__name__} has no linear layers besides its head to add adapters to. "
                "Write model.tune=full."
            )
        return known
    names = [name for name, _ in model.named_modules()]
    for target in settings.targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            raise ConfigError(
                f"lora.lora_target_modules must name linear layers, got {target}. The linear "
                f"layers are {', '.join(known)}."
            )
    return settings.targets


class Built(NamedTuple):
    """A model ready for training."""

    model: Any
    bounded: bool
    """Whether its attention mask is `conversation_bounds`."""
    quantized: Mapping[str, float]
    """SNR in dB by quantized layer."""


def build_model(recipe: Recipe, *, device: torch.device) -> Built:
    """Return the model on a device; only shapes on the meta device."""
    settings, lora = recipe.section(SftModel), recipe.section(LoraSection)
    # A missing package is reported before conflicting settings.
    loading_options(settings.base_dtype, device=device, compute=torch.float32)
    check_merge(settings, lora)
    config = load_config(settings.path, trust_remote_code=settings.trust_remote_code)
    blocks = is_block_scaled(config)
    if blocks and settings.base_dtype in BITSANDBYTES:
        raise UnsupportedError(
            f"model.base_dtype={settings.base_dtype} would round the e4m3 weights of "
            f"model.path={settings.path} again. Write model.base_dtype=auto, which keeps them."
        )
    if blocks and settings.base_products == "fp8":
        raise UnsupportedError(
            "model.base_products=fp8 needs row scales, but the e4m3 weights of "
            f"model.path={settings.path} have block scales. Write model.base_products=auto."
        )
    quantized = settings.base_dtype in (("auto", "e4m3") if blocks else ("e4m3",))
    quantized = quantized and settings.tune == "lora"
    _check_dora(recipe, quantized=quantized)
    first = torch.device("cpu") if quantized and device.type != "meta" else device
    model = _loaded(recipe, device=device, on=first)
    bounded = _bound(model, recipe, device)
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if settings.neftune_noise_alpha is not None:
        add_embedding_noise(model, settings.neftune_noise_alpha)
    if settings.tune == "full":
        return Built(model=model, bounded=bounded, quantized={})
    if lora.merge_adapter_with_base:
        check_mergeable(model)
    model = add_adapters(model, lora, seed=recipe.seed)
    stored: dict[str, float] = {}
    if quantized:
        if blocks:
            stored = _store_blocks(model, settings.path, config)
        else:
            stored = quantize_frozen(model, "e4m3", products=settings.base_products)
        model = model.to(device)
    return Built(model=model, bounded=bounded, quantized=stored)


def _check_dora(recipe: Recipe, *, quantized: bool) -> None:
    """Raise if DoRA meets a setting that it does not work with."""
    if not recipe.section(LoraSection).use_dora:
        return
    reasons = {
        "model.base_dtype=e4m3": quantized,
        "ica.freeze": recipe.section(IcaSection).freezes,
        "model.tune=full": recipe.section(SftModel).tune == "full",
    }
    for name in (name for name, is_set in reasons.items() if is_set):
        raise UnsupportedError(
            f"lora.use_dora=true is not supported with {name}. DoRA needs the norms of plain base "
            "weights, and trains the magnitude of every output. Write lora.use_dora=false."
        )


def _store_blocks(model: Any, name: str, config: Any) -> dict[str, float]:
    """Store the e4m3 weights of a model's files in its frozen layers; return these layers."""
    head, stored = model.get_output_embeddings(), dict[str, float]()
    weights = {} if head.weight.is_meta else block_scaled_weights(name, config)
    for place, layer in model.named_modules():
        if type(layer) is not nn.Linear or layer.weight.requires_grad or layer is head:
            continue
        key = place.removeprefix("base_model.model.").removesuffix(".base_layer") + ".weight"
        if layer.weight.is_meta:  # of a plan, which reads no weights
            store_blocks(layer, *empty_blocks(layer.weight))
        elif key in weights:
            store_blocks(layer, *weights[key])
            stored[place] = math.inf
    return stored


def base_to_merge(recipe: Recipe) -> Any:
    """Return the base that adapters were trained with, in fp32 on the CPU."""
    cpu, settings = torch.device("cpu"), recipe.section(SftModel)
    remote = settings.trust_remote_code
    config = load_config(settings.path, trust_remote_code=remote)
    if is_block_scaled(config) and settings.base_dtype in ("auto", "e4m3"):
        return load_model(settings.path, dtype=torch.float32, trust_remote_code=remote)
    model = _loaded(recipe, device=cpu, on=cpu).float()
    return model if is_block_scaled(config) else dequantized_base(model, settings.base_dtype)


def _bound(model: Any, recipe: Recipe, device: torch.device) -> bool:
    """Use `conversation_bounds` for packed rows, and on a GPU, where transformers synchronises."""
    packing = recipe.section(SftData).packing
    if recipe.section(SftModel).attn_implementation != "auto":
        return False
    if packing:
        separate_conversations(model)
        return True
    if device.type != "cuda":
        return False
    try:
        separate_conversations(model)
    except UnsupportedError:  # not needed for rows of one conversation
        return False
    return True


def check_merge(settings: SftModel, lora: LoraSection) -> None:
    """Raise if adapters are to be merged into weights of bitsandbytes."""
    if settings.base_dtype in BITSANDBYTES and lora.merge_adapter_with_base:
        raise ConfigError(
            "lora.merge_adapter_with_base=true is not possible with "
            f"model.base_dtype={settings.base_dtype}: bitsandbytes would quantize the merged "
            "weights again. Write lora.merge_adapter_with_base=false, or model.base_dtype=e4m3 or "
            "bf16."
        )


def _loaded(recipe: Recipe, *, device: torch.device, on: torch.device) -> Any:
    settings = recipe.section(SftModel)
    attention = settings.attn_implementation
    dtype = _dtype(recipe, device=device)
    compute = dtype or torch.bfloat16
    return load_model(
        settings.path,
        dtype=dtype,
        device=on,
        trust_remote_code=settings.trust_remote_code,
        seed=recipe.seed,
        **({} if attention == "auto" else {"attn_implementation": attention}),
        **loading_options(settings.base_dtype, device=device, compute=compute),
    )


def _dtype(recipe: Recipe, *, device: torch.device) -> torch.dtype | None:
    """Return the initial dtype, None for that of the files; trained weights are fp32."""
    settings = recipe.section(SftModel)
    if settings.tune == "full":
        return torch.float32
    if settings.base_dtype in ("fp32", "bf16", "fp16"):
        return plain_format(settings.base_dtype).dtype
    where = recipe.device if device.type == "meta" else str(device)
    return torch.float32 if detect_hardware(where).support("bf16").how == "emulated" else None
