"""The zoo: models by name, what each is, and what it needs.

Dropout is off wherever a model has it, so that losses of different ways can be compared.
"""

import difflib
import importlib
import importlib.util
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowcast.bench.model import logits_loss, set_up
from narrowcast.bench.zoo import published
from narrowcast.bench.zoo.built import BuiltModel, build_mine, model_loss, parse_builder
from narrowcast.bench.zoo.networks import (
    ActorCritic,
    DiffusionTransformer,
    EncoderClassifier,
    GraphNetwork,
    LstmLanguageModel,
    Recommender,
    TabularNetwork,
    UNet,
)
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


def _dit(device: torch.device, *, quick: bool) -> BuiltModel:
    """Return a diffusion transformer that predicts the noise of latents."""
    width, layers, heads, count, size = (32, 2, 4, 2, 8) if quick else (1024, 16, 16, 64, 32)
    draw = published.Draw(device=device, quick=quick)
    with device:
        model = DiffusionTransformer(width, layers=layers, heads=heads, size=size)
    latents, noise = (draw.normal(count, 4, size, size, seed=seed) for seed in (1, 2))
    return BuiltModel(
        model=model.train(),
        loss_fn=lambda model, x, time, noise: F.mse_loss(model(x, time).float(), noise),
        inputs=(latents, draw.normal(count, 256, seed=3), noise),
    )


def _dlrm(device: torch.device, *, quick: bool) -> BuiltModel:
    tables, rows, width, hidden, count = (
        (4, 50, 8, 16, 16) if quick else (26, 100_000, 128, 512, 8192)
    )
    draw = published.Draw(device=device, quick=quick)
    with device:
        model = Recommender([rows] * tables, width, dense=13, hidden=hidden)
    return BuiltModel(
        model=model.train(),
        loss_fn=lambda model, dense, categories, clicks: F.binary_cross_entropy_with_logits(
            model(dense, categories).float(), clicks
        ),
        inputs=(
            draw.normal(count, 13),
            draw.tokens(rows, count, tables),
            draw.tokens(2, count, seed=3).float(),
        ),
    )


def _graph(device: torch.device, *, quick: bool) -> BuiltModel:
    nodes, edges, inputs, width = (50, 200, 8, 16) if quick else (170_000, 2_300_000, 128, 256)
    draw = published.Draw(device=device, quick=quick)
    with device:
        model = GraphNetwork(inputs, width, layers=3, classes=40)
    return BuiltModel(
        model=model.train(),
        loss_fn=lambda model, x, edges, labels: F.cross_entropy(model(x, edges).float(), labels),
        inputs=(
            draw.normal(nodes, inputs),
            draw.tokens(nodes, 2, edges),
            draw.tokens(40, nodes, seed=3),
        ),
    )


def _tabular(device: torch.device, *, quick: bool) -> BuiltModel:
    rows, features, width = (16, 8, 16) if quick else (4096, 128, 512)
    draw = published.Draw(device=device, quick=quick)
    with device:
        model = TabularNetwork(features, width, layers=6, classes=10)
    return BuiltModel(
        model=model.train(),
        loss_fn=lambda model, x, labels: F.cross_entropy(model(x).float(), labels),
        inputs=(draw.normal(rows, features), draw.tokens(10, rows, seed=3)),
    )


def _actor_critic(device: torch.device, *, quick: bool) -> BuiltModel:
    """Return an actor-critic network with the loss of PPO."""
    rows, size = (4, 36) if quick else (2048, 84)
    draw = published.Draw(device=device, quick=quick)
    with device:
        model = ActorCritic(width=512, actions=18, size=size)

    def loss_fn(
        model: nn.Module, screens: Tensor, actions: Tensor, advantages: Tensor, returns: Tensor
    ) -> Tensor:
        logits, value = model(screens)
        chosen = logits.float().log_softmax(-1).gather(1, actions[:, None])[:, 0]
        ratio = (chosen + math.log(18)).exp()  # the old policy drew uniformly
        gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        loss: Tensor = 0.5 * F.mse_loss(value.float(), returns) - gain.mean()
        return loss

    return BuiltModel(
        model=model.train(),
        loss_fn=loss_fn,
        inputs=(
            draw.normal(rows, 4, size, size),
            draw.tokens(18, rows, seed=3),
            draw.normal(rows, seed=4),
            draw.normal(rows, seed=5),
        ),
    )


def _audio_codec(device: torch.device, *, quick: bool) -> BuiltModel:
    """Return transformers' DAC, which compresses and restores audio."""
    tiny = {
        "encoder_hidden_size": 8, "downsampling_ratios": [2, 4], "decoder_hidden_size": 32,
        "upsampling_ratios": [4, 2], "n_codebooks": 2, "codebook_size": 16, "codebook_dim": 4,
    }  # fmt: skip
    model = _hugging_face(device, quick=quick, name="DacModel", tiny=tiny)
    rows, samples = (2, 512) if quick else (16, 16_384)

    def loss_fn(model: nn.Module, audio: Tensor) -> Tensor:
        result = model(audio)
        restored = result.audio_values
        loss: Tensor = F.l1_loss(restored, audio[:, 0, : restored.shape[-1]])
        loss += result.loss.mean()
        return loss

    return BuiltModel(
        model=model.train(),
        loss_fn=loss_fn,
        inputs=(published.Draw(device=device, quick=quick).normal(rows, 1, samples),),
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
    "dit": ZooEntry(about="a diffusion transformer, 16 × 1024, 64 latents of 32²", build=_dit),
    "dlrm": ZooEntry(about="a recommender with 26 tables of 100,000 rows, 8192 rows", build=_dlrm),
    "gnn": ZooEntry(about="GraphSAGE, 3 × 256, 170,000 nodes, 2.3 M edges", build=_graph),
    "tabular": ZooEntry(about="a residual MLP with batch norm, 4096 rows", build=_tabular),
    "actor-critic": ZooEntry(about="PPO on 2048 × 4 × 84² screens", build=_actor_critic),
    "dac": ZooEntry(
        about="transformers' audio codec DAC, 16 × 1 s", build=_audio_codec, transformers=True
    ),
    **{
        name: ZooEntry(about=f"transformers' {about}", build=build, transformers=True)
        for name, about, build in (
            ("t5-base", "T5, 16 × (512 → 128) tokens", published.T5_BASE),
            ("whisper-small", "Whisper, 8 × 3000 frames → 128 tokens", published.WHISPER_SMALL),
            ("wav2vec2-base", "wav2vec 2.0 with CTC, 16 × 5 s", published.WAV2VEC2_BASE),
            ("convnext-b", "ConvNeXt, 64 × 224², channels last", published.CONVNEXT_B),
            ("swin-b", "Swin, 64 × 224²", published.SWIN_B),
            ("segformer-b2", "SegFormer, 16 × 512²", published.SEGFORMER_B2),
            ("detr-r50", "DETR with ResNet-50, 8 × 640²", published.DETR_R50),
            ("clip-b16", "CLIP with ViT-B/16, 128 pairs", published.CLIP_B16),
            ("videomae-b", "VideoMAE, 8 × 16 frames of 224²", published.VIDEOMAE_B),
            ("deberta-v3-base", "DeBERTa, 32 × 256 tokens", published.DEBERTA_V3_BASE),
            ("esm2-150m", "ESM-2, 16 × 512 amino acids", published.ESM2_150M),
            ("mamba2-130m", "Mamba 2, 4 × 1024 tokens", published.MAMBA2_130M),
            ("patchtst", "PatchTST, 128 × 7 series", published.PATCHTST),
            ("gemma3-0.5b", "Gemma 3 of 0.5 B, 8 × 1024 tokens", published.GEMMA3_HALF_B),
            ("qwen3-0.6b", "Qwen3-0.6B, 8 × 1024 tokens", published.QWEN3_0_6B),
            ("phi3-0.9b", "Phi-3 of 0.95 B, 8 × 1024 tokens", published.PHI3_0_9B),
            ("mixtral-350m", "Mixtral of 348 M, 8 × 1024 tokens", published.MIXTRAL_350M),
            ("qwen3-moe-0.9b", "Qwen3 MoE of 0.9 B, 8 × 1024 tokens", published.QWEN3_MOE_0_9B),
        )
    },
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
