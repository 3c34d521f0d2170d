"""Architectures of transformers by kind of input: text to text, speech, images, proteins, video.

Every entry has the full shape, a tiny one for CPUs, and the batch. Dropout and random masks that
the host draws are off, so that losses of different ways can be compared.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from narrowcast.bench.zoo.built import BuiltModel, model_loss

IGNORED = -100
"""A label without a loss."""


@dataclass(frozen=True, kw_only=True)
class Draw:
    """Random inputs on a device, from one seed."""

    device: torch.device
    quick: bool

    def _generator(self, seed: int) -> torch.Generator:
        where = "cpu" if self.device.type == "meta" else self.device
        return torch.Generator(where).manual_seed(seed)

    def tokens(self, vocab: int, *shape: int, lowest: int = 0, seed: int = 1) -> Tensor:
        generator = self._generator(seed)
        return torch.randint(lowest, vocab, shape, generator=generator, device=self.device)

    def normal(self, *shape: int, seed: int = 2) -> Tensor:
        return torch.randn(*shape, generator=self._generator(seed), device=self.device)

    def boxes(self, *shape: int, seed: int = 3) -> Tensor:
        """Return boxes as centre, width and height, inside the unit square."""
        drawn = torch.rand(*shape, 4, generator=self._generator(seed), device=self.device)
        return drawn * 0.25 + torch.tensor([0.375, 0.375, 0.125, 0.125], device=self.device)


@dataclass(frozen=True, kw_only=True)
class Published:
    """A model class of transformers with its shapes, and the batch that it is trained on."""

    name: str
    shape: Mapping[str, Any]
    tiny: Mapping[str, Any]
    inputs: Callable[[Draw, Any], Mapping[str, Any]]
    """Takes the draw and the config; returns the arguments of `forward`, among them labels."""
    always: Mapping[str, Any] = field(default_factory=dict)
    layout: torch.memory_format = torch.contiguous_format

    def __call__(self, device: torch.device, *, quick: bool) -> BuiltModel:
        """Build the model with random weights, and its batch."""
        library = importlib.import_module("transformers")
        model_class = getattr(library, self.name)
        settings = {**self.always, **(self.tiny if quick else self.shape)}
        for key, value in settings.items():
            if key == "backbone_config":
                settings[key] = library.ResNetConfig(**value)
        config = model_class.config_class(**settings)
        with device:
            model = model_class(config).to(device)  # some make weights on the CPU all the same
        inputs = self.inputs(Draw(device=device, quick=quick), config)
        if self.layout is torch.channels_last:
            inputs = {
                key: value.contiguous(memory_format=self.layout) if value.dim() == 4 else value
                for key, value in inputs.items()
            }
        return BuiltModel(
            model=model.to(memory_format=self.layout).train(),
            loss_fn=model_loss(*inputs),
            inputs=tuple(inputs.values()),
        )


def _pairs_of_texts(draw: Draw, config: Any) -> Mapping[str, Any]:
    (rows, source, target) = (2, 16, 8) if draw.quick else (16, 512, 128)
    return {
        "input_ids": draw.tokens(config.vocab_size, rows, source, lowest=2),
        "labels": draw.tokens(config.vocab_size, rows, target, lowest=2, seed=3),
    }


def _speech_and_text(draw: Draw, config: Any) -> Mapping[str, Any]:
    rows, length = (2, 8) if draw.quick else (8, 128)
    frames = 2 * config.max_source_positions
    return {
        "input_features": draw.normal(rows, config.num_mel_bins, frames),
        "labels": draw.tokens(min(config.vocab_size, 50257), rows, length, seed=3),
    }


def _waveforms(draw: Draw, config: Any) -> Mapping[str, Any]:
    rows, samples, length = (2, 2000, 2) if draw.quick else (16, 80_000, 60)
    return {
        "input_values": draw.normal(rows, samples),
        "labels": draw.tokens(config.vocab_size, rows, length, lowest=1, seed=3),
    }


def _images(draw: Draw, config: Any, *, rows: int = 64) -> Mapping[str, Any]:
    rows = 2 if draw.quick else rows
    return {
        "pixel_values": draw.normal(rows, 3, config.image_size, config.image_size),
        "labels": draw.tokens(config.num_labels, rows, seed=3),
    }


def _segmentation(draw: Draw, config: Any) -> Mapping[str, Any]:
    rows, size = (2, 64) if draw.quick else (16, 512)
    return {
        "pixel_values": draw.normal(rows, 3, size, size),
        "labels": draw.tokens(config.num_labels, rows, size, size, seed=3),
    }


def _detection(draw: Draw, config: Any) -> Mapping[str, Any]:
    rows, size, objects = (2, 64, 2) if draw.quick else (8, 640, 8)
    classes, boxes = (
        draw.tokens(config.num_labels, rows, objects, seed=3),
        draw.boxes(rows, objects),
    )
    labels = [{"class_labels": classes[i], "boxes": boxes[i]} for i in range(rows)]
    return {"pixel_values": draw.normal(rows, 3, size, size), "labels": labels}


def _video(draw: Draw, config: Any) -> Mapping[str, Any]:
    rows, size = (2, config.image_size) if draw.quick else (8, config.image_size)
    return {
        "pixel_values": draw.normal(rows, config.num_frames, 3, size, size),
        "labels": draw.tokens(config.num_labels, rows, seed=3),
    }


def _images_and_texts(draw: Draw, config: Any) -> Mapping[str, Any]:
    rows = 4 if draw.quick else 128
    text, vision = config.text_config, config.vision_config
    length = text.max_position_embeddings
    return {
        "input_ids": draw.tokens(text.vocab_size, rows, length),
        "pixel_values": draw.normal(rows, 3, vision.image_size, vision.image_size),
        "return_loss": True,
    }


def _tokens(draw: Draw, config: Any, *, rows: int, length: int) -> Mapping[str, Any]:
    """Return tokens, each its own label: the model shifts them."""
    shape = (2, 32) if draw.quick else (rows, length)
    ids = draw.tokens(config.vocab_size, *shape, lowest=3)
    return {"input_ids": ids, "labels": ids}


def _masked_tokens(draw: Draw, config: Any, *, rows: int, length: int) -> Mapping[str, Any]:
    """Return tokens of which 15 % are predicted, as in the BERT paper."""
    shape = (2, 32) if draw.quick else (rows, length)
    ids = draw.tokens(config.vocab_size, *shape, lowest=4)
    predicted = draw.tokens(100, *shape, seed=3) < 15
    return {"input_ids": ids, "labels": torch.where(predicted, ids, IGNORED)}


def _series(draw: Draw, config: Any) -> Mapping[str, Any]:
    rows = 2 if draw.quick else 128
    channels = config.num_input_channels
    return {
        "past_values": draw.normal(rows, config.context_length, channels),
        "future_values": draw.normal(rows, config.prediction_length, channels, seed=3),
    }


def _batch(function: Callable[..., Mapping[str, Any]], **settings: int) -> Callable[..., Any]:
    return lambda draw, config: function(draw, config, **settings)


_DECODER = {"use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_TINY_DECODER = {
    "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256, "max_position_embeddings": 64,
}  # fmt: skip
_TINY_MOE = {key: value for key, value in _TINY_DECODER.items() if key != "head_dim"}
_TINY_ENCODER = {
    "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "num_attention_heads": 4,
}  # fmt: skip
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_CLASSES = 1000

T5_BASE = Published(
    name="T5ForConditionalGeneration",
    shape={"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12},
    tiny={"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 64},
    always={"dropout_rate": 0.0, "use_cache": False, "decoder_start_token_id": 0},
    inputs=_pairs_of_texts,
)
WHISPER_SMALL = Published(
    name="WhisperForConditionalGeneration",
    shape={
        "d_model": 768, "encoder_layers": 12, "decoder_layers": 12, "encoder_ffn_dim": 3072,
        "decoder_ffn_dim": 3072, "encoder_attention_heads": 12, "decoder_attention_heads": 12,
    },
    tiny={
        "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        "vocab_size": 64, "max_source_positions": 16, "num_mel_bins": 8, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3,
    },
    always={"use_cache": False},
    inputs=_speech_and_text,
)  # fmt: skip
WAV2VEC2_BASE = Published(
    name="Wav2Vec2ForCTC",
    shape={},
    tiny={
        **_TINY_ENCODER, "conv_dim": [16] * 7, "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 4,
    },
    # Random masks are drawn by the host.
    always={
        "apply_spec_augment": False, "layerdrop": 0.0, "hidden_dropout": 0.0,
        "attention_dropout": 0.0, "activation_dropout": 0.0, "final_dropout": 0.0,
        "ctc_loss_reduction": "mean",
    },
    inputs=_waveforms,
)  # fmt: skip
CONVNEXT_B = Published(
    name="ConvNextForImageClassification",
    shape={"depths": [3, 3, 27, 3], "hidden_sizes": [128, 256, 512, 1024]},
    tiny={"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 16, 32], "image_size": 32},
    always={"num_labels": _CLASSES},
    inputs=_batch(_images, rows=64),
    layout=torch.channels_last,
)
SWIN_B = Published(
    name="SwinForImageClassification",
    shape={"embed_dim": 128, "depths": [2, 2, 18, 2], "num_heads": [4, 8, 16, 32]},
    tiny={
        "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 4], "image_size": 32, "window_size": 4,
    },
    always={"num_labels": _CLASSES, "drop_path_rate": 0.0},
    inputs=_batch(_images, rows=64),
)  # fmt: skip
SEGFORMER_B2 = Published(
    name="SegformerForSemanticSegmentation",
    shape={
        "depths": [3, 4, 6, 3], "hidden_sizes": [64, 128, 320, 512], "decoder_hidden_size": 768,
        "num_attention_heads": [1, 2, 5, 8],
    },
    tiny={
        "depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 16, 32], "decoder_hidden_size": 16,
        "num_attention_heads": [1, 2, 2, 4],
    },
    always={"num_labels": 150, "classifier_dropout_prob": 0.0, "drop_path_rate": 0.0},
    inputs=_segmentation,
)  # fmt: skip
DETR_R50 = Published(
    name="DetrForObjectDetection",
    shape={"backbone_config": {"out_features": ["stage4"]}},
    tiny={
        "backbone_config": {
            "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1],
            "out_features": ["stage2"],
        },
        "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        "num_queries": 8,
    },
    always={
        "num_labels": 91, "dropout": 0.0, "use_timm_backbone": False, "backbone": None,
        "use_pretrained_backbone": False,
    },
    inputs=_detection,
)  # fmt: skip
CLIP_B16 = Published(
    name="CLIPModel",
    shape={"text_config": {}, "vision_config": {"patch_size": 16}},
    tiny={
        "text_config": {
            **_TINY_ENCODER, "vocab_size": 64, "max_position_embeddings": 16, "pad_token_id": 1,
            "bos_token_id": 0, "eos_token_id": 2,
        },
        "vision_config": {**_TINY_ENCODER, "image_size": 32, "patch_size": 8},
        "projection_dim": 16, "logit_scale_init_value": 0.0,
    },
    inputs=_images_and_texts,
)  # fmt: skip
VIDEOMAE_B = Published(
    name="VideoMAEForVideoClassification",
    shape={},
    tiny={**_TINY_ENCODER, "image_size": 32, "patch_size": 8, "num_frames": 4},
    always={"num_labels": 400},
    inputs=_video,
)
DEBERTA_V3_BASE = Published(
    name="DebertaV2ForMaskedLM",
    shape={
        "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
        "intermediate_size": 3072, "position_buckets": 256,
    },
    tiny={**_TINY_ENCODER, "vocab_size": 256, "position_buckets": 8},
    always={
        "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "norm_rel_ebd": "layer_norm",
        "share_att_key": True, "position_biased_input": False, **_NO_DROPOUT,
    },
    inputs=_batch(_masked_tokens, rows=32, length=256),
)  # fmt: skip
ESM2_150M = Published(
    name="EsmForMaskedLM",
    shape={
        "hidden_size": 640, "num_hidden_layers": 30, "num_attention_heads": 20,
        "intermediate_size": 2560,
    },
    tiny=_TINY_ENCODER,
    always={
        "vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32, "token_dropout": False,
        "position_embedding_type": "rotary", "emb_layer_norm_before": False, **_NO_DROPOUT,
    },
    inputs=_batch(_masked_tokens, rows=16, length=512),
)  # fmt: skip
MAMBA2_130M = Published(
    name="Mamba2ForCausalLM",
    shape={
        "hidden_size": 768, "num_hidden_layers": 24, "num_heads": 24, "vocab_size": 50288,
        "n_groups": 1, "tie_word_embeddings": True,
    },
    tiny={
        "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 16,
        "state_size": 16, "n_groups": 1, "chunk_size": 16, "vocab_size": 256,
    },
    always={"use_cache": False},
    inputs=_batch(_tokens, rows=4, length=1024),
)  # fmt: skip
PATCHTST = Published(
    name="PatchTSTForPrediction",
    shape={"num_input_channels": 7, "d_model": 128, "ffn_dim": 256, "num_attention_heads": 16},
    tiny={"num_input_channels": 2, "d_model": 16, "ffn_dim": 32, "num_attention_heads": 4},
    always={
        "context_length": 336, "prediction_length": 96, "patch_length": 16, "patch_stride": 8,
        "scaling": None, "num_hidden_layers": 3,
    },
    inputs=_series,
)  # fmt: skip
GEMMA3_HALF_B = Published(
    name="Gemma3ForCausalLM",
    shape={
        "hidden_size": 1024, "num_hidden_layers": 16, "intermediate_size": 4096,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128,
        "vocab_size": 262144, "max_position_embeddings": 1024, "sliding_window": 512,
    },
    tiny={**_TINY_DECODER, "sliding_window": 16},
    always=_DECODER,
    inputs=_batch(_tokens, rows=8, length=1024),
)  # fmt: skip
QWEN3_0_6B = Published(
    name="Qwen3ForCausalLM",
    shape={
        "hidden_size": 1024, "num_hidden_layers": 28, "intermediate_size": 3072,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 1024,
    },
    tiny=_TINY_DECODER,
    always={**_DECODER, "tie_word_embeddings": True},
    inputs=_batch(_tokens, rows=8, length=1024),
)  # fmt: skip
PHI3_0_9B = Published(
    name="Phi3ForCausalLM",
    shape={
        "hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 5632,
        "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 1024,
    },
    tiny=_TINY_MOE,
    always=_DECODER,
    inputs=_batch(_tokens, rows=8, length=1024),
)  # fmt: skip
MIXTRAL_350M = Published(
    name="MixtralForCausalLM",
    shape={
        "hidden_size": 768, "num_hidden_layers": 10, "intermediate_size": 1536,
        "num_attention_heads": 12, "num_key_value_heads": 4, "max_position_embeddings": 1024,
    },
    tiny={**_TINY_MOE, "num_local_experts": 4},
    always=_DECODER,
    inputs=_batch(_tokens, rows=8, length=1024),
)  # fmt: skip
QWEN3_MOE_0_9B = Published(
    name="Qwen3MoeForCausalLM",
    shape={
        "hidden_size": 1024, "num_hidden_layers": 8, "moe_intermediate_size": 512,
        "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "num_experts": 64,
        "vocab_size": 32000, "max_position_embeddings": 1024,
    },
    tiny={**_TINY_DECODER, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2},
    always=_DECODER,
    inputs=_batch(_tokens, rows=8, length=1024),
)  # fmt: skip
