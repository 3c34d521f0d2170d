"""The zoo: models by name, what each is, and what it needs.

Dropout is off wherever a model has it, so that losses of different ways can be compared.
"""

import difflib
import importlib
import importlib.util
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowcast.bench.model import logits_loss, set_up
from narrowcast.bench.zoo.built import BuiltModel, build_mine, model_loss, parse_builder
from narrowcast.bench.zoo.networks import EncoderClassifier, LstmLanguageModel, UNet
from narrowcast.errors import ConfigError
from narrowcast.workloads import load_recipe
from narrowcast.workloads.genomics.models.config import GenomicConfig
from narrowcast.workloads.genomics.models.heads import NextTokenHead
from narrowcast.workloads.genomics.models.model import GenomicModel

CLASSES = 1000
"""Of ImageNet."""
TINY_BATCH = (2, 32)


@dataclass(frozen=True, kw_only=True)
class ZooEntry:
    """One model of the zoo."""

    about: str
    build: Callable[..., BuiltModel]
    """Takes the device and `quick=`, whether to build a tiny one."""
    transformers: bool = False
    """Whether transformers builds it."""
    liger: bool = False
    """Whether Liger has kernels for it."""

    @property
    def missing(self) -> str:
        """What must be installed for it, or an empty string."""
        if not self.transformers or importlib.util.find_spec("transformers"):
            return ""
        return "transformers is not installed; pip install 'narrowcast[sft]'"


def random_tokens(vocab: int, shape: tuple[int, int], device: torch.device) -> Tensor:
    """Return random tokens, the same for every way."""
    return torch.randint(vocab, shape, generator=_generator(device), device=device)


def _generator(device: torch.device, *, seed: int = 1) -> torch.Generator:
    return torch.Generator("cpu" if device.type == "meta" else device).manual_seed(seed)


def _hugging_face(
    device: torch.device,
    *,
    quick: bool,
    name: str,
    tiny: Mapping[str, Any],
    shape: Mapping[str, Any] | None = None,
    always: Mapping[str, Any] | None = None,
) -> Any:
    """Return a model as transformers builds it, by default in the default shape of its class."""
    model_class = getattr(importlib.import_module("transformers"), name)
    config = model_class.config_class(**(tiny if quick else shape or {}), **(always or {}))
    with device:
        return model_class(config)


def _language(
    device: torch.device,
    *,
    quick: bool,
    batch: tuple[int, int],
    masked: bool = False,
    **settings: Any,
) -> BuiltModel:
    """Return a language model of transformers, and random tokens."""
    model = _hugging_face(device, quick=quick, **settings)
    ids = labels = random_tokens(model.config.vocab_size, TINY_BATCH if quick else batch, device)
    if masked:
        # 15 % of the tokens are predicted, as in the BERT paper.
        drawn = torch.rand(ids.shape, generator=_generator(device, seed=2), device=device)
        labels = torch.where(drawn < 0.15, ids, -100)
    return BuiltModel(
        model=model.train(), loss_fn=model_loss("input_ids", "labels"), inputs=(ids, labels)
    )


def _images(
    device: torch.device,
    *,
    quick: bool,
    batch: int,
    layout: torch.memory_format = torch.contiguous_format,
    **settings: Any,
) -> BuiltModel:
    """Return an image classifier of transformers, and random images with labels."""
    model = _hugging_face(device, quick=quick, **settings)
    count, size = (2, 32) if quick else (batch, 224)
    generator = _generator(device)
    images = torch.randn(count, 3, size, size, generator=generator, device=device)
    labels = torch.randint(CLASSES, (count,), generator=generator, device=device)
    return BuiltModel(
        model=model.to(memory_format=layout).train(),
        loss_fn=model_loss("pixel_values", "labels"),
        inputs=(images.contiguous(memory_format=layout), labels),
    )


def _next_token(model: nn.Module, ids: Tensor) -> BuiltModel:
    """Return a model whose logits predict the following token."""
    return BuiltModel(
        model=model.train(),
        loss_fn=lambda model, *batch: logits_loss(model, batch),
        inputs=(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()),
    )


def _gpt(device: torch.device, *, quick: bool) -> BuiltModel:
    tiny = ("model.layers=2", "model.width=64", "model.heads=4", "model.vocab=256",
            "data.length=32", "batch_size=2")  # fmt: skip
    overrides = (f"device={device.type}", *(tiny if quick else ()))
    bench = set_up(load_recipe("lm/gpt-350m", overrides).recipe)
    return BuiltModel(
        model=bench.model.train(),
        loss_fn=lambda model, *batch: logits_loss(model, batch),
        inputs=tuple(bench.batches[0]),
    )


def _lstm(device: torch.device, *, quick: bool) -> BuiltModel:
    vocab, width, (rows, length) = (256, 32, TINY_BATCH) if quick else (32000, 1024, (64, 256))
    with device:
        model = LstmLanguageModel(vocab, width, layers=2)
    return _next_token(model, random_tokens(vocab, (rows, length + 1), device))


def _hyena(device: torch.device, *, quick: bool) -> BuiltModel:
    width, layers, length = (32, 1, 64) if quick else (768, 12, 8192)
    config = GenomicConfig(
        vocab_size=16, max_length=length, causal=True, width=width, layers=layers
    )
    model = nn.Sequential(GenomicModel(config), NextTokenHead(config.width, 16)).to(device)
    return _next_token(model, random_tokens(16, (2, length + 1), device))


def _unet(device: torch.device, *, quick: bool) -> BuiltModel:
    """Return a U-Net that predicts the noise of images, channels last."""
    widths, count, size = ((32, 64), 2, 8) if quick else ((128, 256, 384, 512), 64, 64)
    with device:
        model = UNet(widths)
    generator = _generator(device)
    images, noise = (
        torch.randn(count, 3, size, size, generator=generator, device=device).contiguous(
            memory_format=torch.channels_last
        )
        for _ in range(2)
    )
    time = torch.randn(count, widths[0], generator=generator, device=device)
    # torch's stubs know no memory_format of a module.
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return BuiltModel(
        model=model.train(),
        loss_fn=lambda model, x, time, noise: F.mse_loss(model(x, time).float(), noise),
        inputs=(images, time, noise),
    )


def _encoder(device: torch.device, *, quick: bool) -> BuiltModel:
    """Return torch's own transformer encoder, with a class for each position."""
    width, layers, heads, count, length = (32, 2, 4, 2, 16) if quick else (1024, 12, 16, 32, 512)
    with device:
        model = EncoderClassifier(width, layers=layers, heads=heads, classes=CLASSES)
    generator = _generator(device)
    x = torch.randn(count, length, width, generator=generator, device=device)
    labels = torch.randint(CLASSES, (count, length), generator=generator, device=device)
    return BuiltModel(
        model=model.train(),
        loss_fn=lambda model, *batch: logits_loss(model, batch),
        inputs=(x, labels),
    )


_LLAMA_348M = {
    "hidden_size": 1024, "num_hidden_layers": 24, "intermediate_size": 2816,
    "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 32000,
    "max_position_embeddings": 1024,
}  # fmt: skip
_LLAMA_1_3B = {
    "hidden_size": 2048, "num_hidden_layers": 24, "intermediate_size": 5504,
    "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 32000,
    "max_position_embeddings": 2048,
}  # fmt: skip
_QWEN2_HALF_B = {
    "hidden_size": 896, "num_hidden_layers": 24, "intermediate_size": 4864,
    "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
    "max_position_embeddings": 1024, "tie_word_embeddings": True,
}  # fmt: skip
_VIT_L = {
    "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
    "intermediate_size": 4096, "image_size": 224,
}  # fmt: skip
_TINY = {
    "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128,
    "num_attention_heads": 4, "vocab_size": 256, "max_position_embeddings": 64,
}  # fmt: skip
_TINY_GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 256}
_TINY_VIT = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64, "image_size": 32,
}  # fmt: skip
_TINY_RESNET = {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 1]}
_SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

_causal = partial(
    _language,
    tiny={**_TINY, "num_key_value_heads": 2},
    always={**_SPECIAL_TOKENS, "use_cache": False},
)
_llama = partial(_causal, name="LlamaForCausalLM")
_qwen = partial(_causal, name="Qwen2ForCausalLM")
_gpt2 = partial(
    _language,
    name="GPT2LMHeadModel",
    tiny=_TINY_GPT2 | _SPECIAL_TOKENS,
    always={"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False},
)
_bert = partial(_language, name="BertForMaskedLM", masked=True, tiny=_TINY, always=_NO_DROPOUT)
_vit = partial(
    _images,
    name="ViTForImageClassification",
    shape=_VIT_L,
    tiny=_TINY_VIT,
    always={"num_labels": CLASSES, **_NO_DROPOUT},
)
_resnet = partial(
    _images,
    name="ResNetForImageClassification",
    layout=torch.channels_last,
    tiny=_TINY_RESNET,
    always={"num_labels": CLASSES},
)

ZOO: Mapping[str, ZooEntry] = {
    "llama-348m": ZooEntry(
        about="transformers' Llama, width 1024, 24 layers, 16 × 1024 tokens",
        build=partial(_llama, shape=_LLAMA_348M, batch=(16, 1024)),
        transformers=True,
        liger=True,
    ),
    "llama-1.3b": ZooEntry(
        about="transformers' Llama, width 2048, 24 layers, 8 × 2048 tokens",
        build=partial(_llama, shape=_LLAMA_1_3B, batch=(8, 2048)),
        transformers=True,
        liger=True,
    ),
    "qwen2-0.5b": ZooEntry(
        about="transformers' Qwen2 in the shape of Qwen2.5-0.5B, 8 × 1024 tokens",
        build=partial(_qwen, shape=_QWEN2_HALF_B, batch=(8, 1024)),
        transformers=True,
        liger=True,
    ),
    "gpt2-124m": ZooEntry(
        about="transformers' GPT-2, 16 × 1024 tokens",
        build=partial(_gpt2, batch=(16, 1024)),
        transformers=True,
    ),
    "bert-base": ZooEntry(
        about="transformers' BERT, masked, 32 × 512 tokens",
        build=partial(_bert, batch=(32, 512)),
        transformers=True,
    ),
    "vit-l": ZooEntry(
        about="transformers' ViT-L/16, 64 × 224²", build=partial(_vit, batch=64), transformers=True
    ),
    "resnet-50": ZooEntry(
        about="transformers' ResNet-50, 256 × 224², channels last",
        build=partial(_resnet, batch=256),
        transformers=True,
    ),
    "unet": ZooEntry(about="a diffusion U-Net, 64 × 64², channels last", build=_unet),
    "lstm": ZooEntry(about="an LSTM language model, 2 × 1024, 64 × 256 tokens", build=_lstm),
    "hyena": ZooEntry(
        about="narrowcast's Hyena model, width 768, 12 layers, 2 × 8192 bases", build=_hyena
    ),
    "encoder": ZooEntry(about="nn.TransformerEncoder, 12 × 1024, 32 × 512", build=_encoder),
    "gpt-406m": ZooEntry(about="the plain GPT of lm/gpt-350m, 16 × 1024 tokens", build=_gpt),
}


def select_models(only: Iterable[str], *, mine: str | None) -> tuple[str, ...]:
    """Return the requested models: those named, the user's own, or all of the zoo."""
    named = tuple(dict.fromkeys(only))
    for name in named:
        if name not in ZOO:
            close = difflib.get_close_matches(name, ZOO, n=1)
            hint = f"Did you mean {close[0]}?" if close else f"Known: {', '.join(ZOO)}."
            raise ConfigError(f"--only must name models of the zoo, got {name}. {hint}")
    if mine is not None:
        parse_builder(mine)
        return (mine, *named)
    return named or tuple(ZOO)


def get_entry(name: str) -> ZooEntry:
    """Return a model of the zoo by name, or the user's own by `module:function`."""
    if name in ZOO:
        return ZOO[name]
    # Whether Liger has kernels for it shows when it is built.
    return ZooEntry(
        about="your own", build=lambda device, *, quick: build_mine(name, device), liger=True
    )


def build_model(name: str, device: torch.device, *, quick: bool) -> BuiltModel:
    """Build a model on its device, from one seed."""
    torch.manual_seed(0)
    return get_entry(name).build(device, quick=quick)
