"""HyenaDNA as a `GenomicModel`: the same network under other names (Nguyen et al. 2023)."""

import math
from typing import Any

import torch
from torch import Tensor

from narrowcast.errors import CheckpointError, UnsupportedError
from narrowcast.workloads.genomics.models.config import GenomicConfig
from narrowcast.workloads.genomics.models.hyena import BANDS, FADED, FAST, SLOW
from narrowcast.workloads.genomics.published.checkpoint import Checkpoint
from narrowcast.workloads.genomics.sequences.tokenizers import Tokenizer

SHIFT = 0.05
"""Added to the decay of its filters."""
IDS = {
    "[CLS]": 0, "[SEP]": 1, "[BOS]": 2, "[MASK]": 3, "[PAD]": 4, "[UNK]": 6, "[EOS]": 1,
    "[RC]": 6,
    "A": 7, "C": 8, "G": 9, "T": 10, "N": 11, "[N]": 11,
}  # fmt: skip
"""Its vocabulary."""
KNOWN = {
    "hyena_order": 2, "emb_dim": 2 * BANDS + 1, "num_inner_mlps": 2, "short_filter_order": 3,
    "use_bias": True, "train_freq": True,
}  # fmt: skip
"""Settings that all published models have."""
CLOSE = 1e-3
"""How far stored positions may be from computed ones."""


def hyenadna_config(checkpoint: Checkpoint, tokenizer: Tokenizer) -> GenomicConfig:
    """Return the config of a checkpoint; raise if it is of another architecture."""
    config = checkpoint.config
    for name, value in KNOWN.items():
        if config.get(name, value) != value:
            raise UnsupportedError(
                f"model.path={checkpoint.name} must have {name}={value}, got {config[name]}. Use a "
                "published HyenaDNA checkpoint."
            )
    width = int(config["d_model"])
    if config.get("d_inner", 4 * width) != 4 * width:
        raise UnsupportedError(
            f"model.path={checkpoint.name} must have d_inner={4 * width}, four times d_model, got "
            f"{config['d_inner']}. Use a published HyenaDNA checkpoint."
        )
    return GenomicConfig(
        vocab_size=tokenizer.vocab_size,
        width=width,
        layers=int(config["n_layer"]),
        max_length=int(config["max_seq_len"]),
        causal=True,
        backbone="hyena",
        filter_width=int(config.get("filter_order", 64)),
        filter_shift=SHIFT,
        gelu="tanh",
    )


def hyenadna_weights(
    checkpoint: Checkpoint, config: GenomicConfig, tokenizer: Tokenizer
) -> dict[str, Tensor]:
    """Return the weights under our names; raise if some are missing."""
    weights = {
        name.removeprefix("hyena.").removeprefix("backbone."): weight
        for name, weight in checkpoint.weights().items()
    }
    try:
        return dict(_renamed(weights, config, tokenizer))
    except (KeyError, IndexError) as error:
        raise CheckpointError(
            f"model.path={checkpoint.name}: the weights do not match config.json: {error} is "
            "missing. Copy the whole checkpoint again."
        ) from error


def _renamed(weights: dict[str, Tensor], config: GenomicConfig, tokenizer: Tokenizer) -> Any:
    ids = [IDS[token] for token in tokenizer.tokens]
    yield "backbone.embed.weight", weights["embeddings.word_embeddings.weight"][ids]
    for part in ("weight", "bias"):
        yield f"backbone.norm.{part}", weights[f"ln_f.{part}"]
    for layer in range(config.layers):
        theirs, ours = f"layers.{layer}", f"backbone.blocks.{layer}"
        implicit = f"{theirs}.mixer.filter_fn"
        _check_positions(weights, implicit, config)
        for part in ("weight", "bias"):
            for new, old in (
                ("mixer_norm", "norm1"), ("mlp_norm", "norm2"), ("mixer.project", "mixer.in_proj"),
                ("mixer.out", "mixer.out_proj"), ("mlp.up", "mlp.fc1"), ("mlp.down", "mlp.fc2"),
            ):  # fmt: skip
                yield f"{ours}.{new}.{part}", weights[f"{theirs}.{old}.{part}"]
            for at in range(3):
                place = f"{ours}.mixer.filter.{'weights' if part == 'weight' else 'biases'}.{at}"
                yield place, weights[f"{implicit}.implicit_filter.{2 * at}.{part}"]
        yield f"{ours}.mixer.short.weight", weights[f"{theirs}.mixer.short_filter.weight"][:, 0]
        yield f"{ours}.mixer.short.bias", weights[f"{theirs}.mixer.short_filter.bias"]
        yield f"{ours}.mixer.filter.output", weights[f"{implicit}.implicit_filter.6.weight"]
        yield f"{ours}.mixer.filter.bias", weights[f"{implicit}.bias"][None]
        # All layers share it, and files keep one of its names.
        names = (f"{implicit}.implicit_filter.{at}.freq" for at in (3, 5, 1))
        frequency = weights[next((n for n in names if n in weights), f"{implicit}.freq")]
        yield f"{ours}.mixer.filter.frequency", frequency.flatten()


def _check_positions(weights: dict[str, Tensor], place: str, config: GenomicConfig) -> None:
    """Check stored positions and decay rates against those that are computed."""
    length = config.max_length
    angles = 2 * math.pi * torch.arange(length)[:, None] / length
    angles = angles * torch.linspace(1e-4, BANDS - 1, BANDS)
    time = torch.linspace(0, 1, length)[:, None]
    rates = torch.linspace(math.log(FADED) / SLOW, math.log(FADED) / FAST, config.width)
    for name, computed in (
        ("pos_emb.z", torch.cat([time, angles.cos(), -angles.sin()], 1)),
        ("modulation.deltas", rates),
    ):
        stored = weights.get(f"{place}.{name}")
        if stored is not None and (
            stored.numel() != computed.numel()
            or not torch.allclose(stored.float().view_as(computed), computed, atol=CLOSE)
        ):
            raise UnsupportedError(
                f"{place}.{name} was trained, or is of another length than max_seq_len={length}. "
                "Only checkpoints with computed positions can be loaded; use a published HyenaDNA."
            )
